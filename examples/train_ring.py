"""A small causal language model on real text whose sequences lie over several ranks: the same loss on any number.

python examples/train_ring.py                                                   # one rank
torchrun --nproc-per-node 4 examples/train_ring.py                              # four ranks hold each sequence
torchrun --nproc-per-node 4 examples/train_ring.py --sequence-ranks 2           # FSDP2 over the other two

Runs on CPUs (gloo) and GPUs (NCCL). Sequence ranks share each sequence and hold the same parameters; along the other
dimension of the mesh sequences differ and FSDP2 shards the parameters.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from ringattn import RingAttention
from ringattn.errors import InputError

HEADS, HEAD_DIM, LAYERS = 4, 16, 2
WIDTH = HEADS * HEAD_DIM
MESH = ("sequence", "data")


def rotated(x_BSHD: Tensor, positions_S: Tensor) -> Tensor:
    """Apply a rotary embedding by *global* positions: which a rank holds, the attention module says."""
    half = x_BSHD.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x_BSHD.device) / half)
    angles = (positions_S[:, None] * frequencies)[:, None]
    first, second = x_BSHD.split(half, -1)
    return torch.cat((first * angles.cos() - second * angles.sin(), first * angles.sin() + second * angles.cos()), -1)


class Block(nn.Module):
    def __init__(self, sequence_group: DeviceMesh | None, device: str) -> None:
        super().__init__()
        self.attention = RingAttention(HEADS, HEAD_DIM, causal=True, device=device, process_group=sequence_group)
        self.before_attention, self.before_mlp = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, positions: Tensor, total_length: int) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = qkv.unbind(2)
        # The whole length lets ranks hold different numbers of positions, where it is no multiple of theirs.
        attended = self.attention(rotated(q, positions), rotated(k, positions), v, total_length=total_length)
        x = x + self.out(attended.flatten(2))
        return x + self.mlp(self.before_mlp(x))


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, sequence_group: DeviceMesh | None, device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(sequence_group, device) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False))

    def forward(self, tokens: Tensor, positions: Tensor, total_length: int) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions, total_length)
        return self.head(x)


parser = argparse.ArgumentParser(description="Train a small causal language model over one or several ranks.")
parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE", help="a text to learn")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--seq-len", type=int, default=256, help="of whole sequences")
parser.add_argument("--batch-size", type=int, default=4, help="sequences a step, of all ranks together")
parser.add_argument("--sequence-ranks", type=int, help="ranks that share a sequence; all of them without it")
args = parser.parse_args()

on_gpu = torch.cuda.is_available()
mesh, rank, world = None, 0, 1
if "LOCAL_RANK" in os.environ:  # torchrun
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()


def refuse(why: str) -> NoReturn:
    """Refuse in one line, said by one rank; the others wait, since torchrun ends all when one has ended."""
    if rank == 0:
        print(f"{parser.prog}: error: {why}", file=sys.stderr, flush=True)
    if world > 1:
        dist.barrier()
    sys.exit(2)


text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
sequence_ranks = world if args.sequence_ranks is None else args.sequence_ranks
if sequence_ranks < 1 or world % sequence_ranks:
    refuse(
        f"--sequence-ranks is {sequence_ranks}, no divisor of {world}, the number of ranks; start more with torchrun"
    )
data_ranks = world // sequence_ranks
if args.batch_size < 1 or args.batch_size % data_ranks:
    refuse(f"--batch-size is {args.batch_size}; it must be a multiple of {data_ranks}, the groups of ranks")
if not 1 <= args.seq_len < len(text) - 1:
    refuse(f"--seq-len is {args.seq_len}; with a text of {len(text)} bytes it is from 1 to {len(text) - 2}")
if world > 1:
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (sequence_ranks, data_ranks), mesh_dim_names=MESH)
device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"

torch.manual_seed(0)  # the same parameters on every rank
model = LanguageModel(mesh["sequence"] if mesh else None, device).to(device)
attention: RingAttention = model.blocks[0].attention
if mesh is not None:  # two dimensions: gradients are averaged over the first, parameters sharded over the second
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

generator = torch.Generator().manual_seed(1)
try:
    positions = attention.positions(args.seq_len)
except InputError as error:  # too short for so many ranks
    refuse(f"--seq-len: {error}")
data_rank = mesh.get_local_rank("data") if mesh else 0
# Gradients are averaged over ranks, which may hold different numbers of positions: each adds up its own, and divides
# by what a rank holds on average.
tokens_a_rank = args.batch_size * args.seq_len / world
for step in range(args.steps):
    starts = torch.randint(len(text) - args.seq_len - 1, (args.batch_size,), generator=generator)
    rows = torch.stack([text[start : start + args.seq_len + 1] for start in starts[data_rank::data_ranks]]).to(device)
    # Labels are shifted before the sequence is cut, so that no rank needs a token of another.
    inputs, labels = attention.shard(rows[:, :-1]), attention.shard(rows[:, 1:])
    logits = model(inputs, positions, args.seq_len)
    loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / tokens_a_rank
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    if mesh is not None:
        dist.all_reduce(mean)
        mean /= world
    if rank == 0 and (step % 5 == 4 or step == args.steps - 1):
        print(f"step {step + 1:3}  loss {mean.item():.5f}", flush=True)
if rank == 0:
    longest_share = -(-args.seq_len // sequence_ranks)
    print(f"plan {attention.plan_for(longest_share, torch.float32, train=True)}")
if dist.is_initialized():
    dist.destroy_process_group()
