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
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

from ringattn import RingAttention

HEADS, HEAD_DIM, LAYERS = 4, 16, 2
WIDTH = HEADS * HEAD_DIM


def rotated(x_BSHD: Tensor, positions_S: Tensor) -> Tensor:
    """Rotary embedding by *global* positions: which of them a rank holds, the attention module says."""
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

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, HEAD_DIM))
        q, k, v = qkv.unbind(2)
        attended = self.attention(rotated(q, positions), rotated(k, positions), v)
        x = x + self.out(attended.flatten(2))
        return x + self.mlp(self.before_mlp(x))


class LanguageModel(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self, sequence_group: DeviceMesh | None, device: str) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(Block(sequence_group, device) for _ in range(LAYERS))
        self.head = nn.Sequential(nn.RMSNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False))

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, positions)
        return self.head(x)


parser = argparse.ArgumentParser(description="Train a small causal language model over one or several ranks.")
parser.add_argument("--text", type=Path, default=Path(__file__).parents[1] / "LICENSE", help="a text to learn")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--seq-len", type=int, default=256, help="of whole sequences")
parser.add_argument("--batch-size", type=int, default=4, help="sequences a step, of all ranks together")
parser.add_argument("--sequence-ranks", type=int, help="ranks that share a sequence; all of them without it")
args = parser.parse_args()

on_gpu = torch.cuda.is_available()
mesh, rank = None, 0
if "LOCAL_RANK" in os.environ:  # torchrun
    if on_gpu:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if on_gpu else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sequence_ranks = args.sequence_ranks or world
    shape = (sequence_ranks, world // sequence_ranks)
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", shape, mesh_dim_names=("sequence", "data"))
device = f"cuda:{torch.cuda.current_device()}" if on_gpu else "cpu"

torch.manual_seed(0)  # the same parameters on every rank
model = LanguageModel(mesh["sequence"] if mesh else None, device).to(device)
attention: RingAttention = model.blocks[0].attention
if mesh is not None and mesh.size() > 1:
    for (
        block
    ) in model.blocks:  # two dimensions: gradients are averaged over the first, parameters sharded over the second
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

text = torch.frombuffer(bytearray(args.text.read_bytes()), dtype=torch.uint8).long()
generator = torch.Generator().manual_seed(1)
positions = attention.positions(args.seq_len)
data_rank, data_ranks = (mesh.get_local_rank("data"), mesh["data"].size()) if mesh else (0, 1)
for step in range(args.steps):
    starts = torch.randint(len(text) - args.seq_len - 1, (args.batch_size,), generator=generator)
    rows = torch.stack([text[start : start + args.seq_len + 1] for start in starts[data_rank::data_ranks]]).to(device)
    # Labels are shifted before the sequence is cut, so that no rank needs a token of another.
    inputs, labels = attention.shard(rows[:, :-1]), attention.shard(rows[:, 1:])
    loss = functional.cross_entropy(model(inputs, positions).flatten(0, 1), labels.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    mean = loss.detach().clone()
    if mesh is not None:
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    if rank == 0 and (step % 5 == 4 or step == args.steps - 1):
        print(f"step {step + 1:3}  loss {mean.item():.5f}", flush=True)
if rank == 0:
    print(f"plan {attention.plan_for(args.seq_len // attention.shape.world, torch.float32, train=True)}")
if mesh is not None:
    dist.destroy_process_group()
