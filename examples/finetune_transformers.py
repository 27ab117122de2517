"""Fine-tunes a Hugging Face causal language model on sequences that lie over several ranks; the model is unchanged.

python examples/finetune_transformers.py                             # one rank, a tiny random Llama
torchrun --nproc-per-node 4 examples/finetune_transformers.py        # four ranks hold each sequence
torchrun --nproc-per-node 8 examples/finetune_transformers.py --model PATH --seq-len 131072

Every rank holds all parameters and its share of every sequence. Runs on CPUs (gloo) and GPUs (NCCL).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ringattn import RingAttention
from ringattn.integrations.transformers import register

parser = argparse.ArgumentParser(description="Fine-tune a causal language model over one or several ranks.")
parser.add_argument("--model", help="folder of a saved model; a tiny random Llama without it")
parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE", help="a text to learn")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--seq-len", type=int, default=250, help="of whole sequences")
args = parser.parse_args()

on_gpu = torch.cuda.is_available()
rank, group = 0, None
if "LOCAL_RANK" in os.environ:  # torchrun
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, group = dist.get_rank(), dist.group.WORLD
world = dist.get_world_size() if group else 1
device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"

register(process_group=group)
torch.manual_seed(0)  # the same parameters and sequences on every rank
text = args.text.read_text("utf-8")
if args.model is None:
    tiny = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, attn_implementation="ringtune",
    )  # fmt: skip
    model, tokens = LlamaForCausalLM(tiny), torch.tensor(list(text.encode()))
else:
    model = AutoModelForCausalLM.from_pretrained(args.model, attn_implementation="ringtune", dtype=torch.bfloat16)
    tokens = AutoTokenizer.from_pretrained(args.model)(text, return_tensors="pt").input_ids[0]
model.to(device).train()
config = model.config
head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
# Says which positions this rank holds, as the model's own attention does.
attention = RingAttention(
    config.num_attention_heads, head_dim, config.num_key_value_heads, causal=True, device=device, process_group=group
)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if args.model is None else 1e-5)
for step in range(args.steps):
    start = int(torch.randint(len(tokens) - args.seq_len - 1, ()))
    row = tokens[None, start : start + args.seq_len + 1].to(device)
    # Labels are shifted before the sequence is cut, so that no rank needs a token of another.
    inputs, labels = attention.shard(row[:, :-1]), attention.shard(row[:, 1:])
    positions = attention.positions(args.seq_len)[None]
    # The whole length lets ranks hold different numbers of positions, where it is no multiple of theirs.
    logits = model(inputs, position_ids=positions, use_cache=False, total_length=args.seq_len).logits
    loss = functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum") / args.seq_len
    loss.backward()
    mean = loss.detach().clone()
    if group is not None:
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # the sum over ranks is the gradient of the whole sequence's loss
        dist.all_reduce(mean)
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step + 1:3}  loss {mean.item():.5f}", flush=True)
if group is not None:
    dist.destroy_process_group()
