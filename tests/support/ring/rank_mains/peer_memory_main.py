"""What torchrun starts on each GPU of ``test_ring_gpu``: rounds of copies to every peer, checked after each barrier.

Then how long a barrier takes, and copies of rows of several widths.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn.distributed.peer_memory import PeerMemory

ROUNDS, ROWS, HEADS, HEAD_DIM = 200, 4096, 32, 128


def content(rank: int, number: int, rows: int) -> Tensor:
    """(1, rows, HEADS, HEAD_DIM) that no other rank and round has."""
    generator = torch.Generator("cuda").manual_seed(1000 * number + rank)
    return torch.randn((1, rows, HEADS, HEAD_DIM), generator=generator, device="cuda").bfloat16()


def check_rounds(memory: PeerMemory) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    shard = HEADS // world
    buffer = memory.allocate(ROWS * HEADS * HEAD_DIM * 2)
    sizes, delays = random.Random(0), random.Random(rank)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    for number in range(ROUNDS):
        rows = sizes.randrange(1, ROWS // world)
        x = content(rank, number, rows)
        torch.cuda._sleep(delays.choice((0, 100_000, 1_000_000)))
        memory.begin()
        memory.barrier(range(world))  # what came last is read
        for step in range(world):
            to = (rank + step) % world
            there = buffer.of[to].view(torch.bfloat16)[: world * rows * shard * HEAD_DIM]
            there = there.view(world, 1, rows, shard, HEAD_DIM)[rank]
            memory.copy(x[:, :, to * shard : (to + 1) * shard], there, far=to != rank)
        memory.barrier(range(world)).wait()
        found = buffer.own.view(torch.bfloat16)[: world * rows * shard * HEAD_DIM].view(world, 1, rows, shard, HEAD_DIM)
        for sender in range(world):
            expected = content(sender, number, rows)[:, :, rank * shard : (rank + 1) * shard]
            wrong += (found[sender] != expected).sum()
    assert wrong.item() == 0, f"{wrong.item()} wrong elements"


def median_us(step: Callable[[], object]) -> float:
    times = []
    for _ in range(20):
        dist.barrier()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(400_000)
        begin.record()
        step()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[len(times) // 2]


def measure(memory: PeerMemory) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    x = content(rank, 0, 8192)
    buffer = memory.allocate(x.nbytes)
    peer = (rank + 1) % world

    def barrier() -> None:
        memory.begin()
        memory.barrier(range(world)).wait()

    def push(heads: int) -> None:
        memory.begin()
        there = buffer.of[peer].view(torch.bfloat16)[: 8192 * heads * HEAD_DIM].view(1, 8192, heads, HEAD_DIM)
        memory.copy(x[:, :, :heads], there, far=True)
        memory.barrier(range(world)).wait()

    for name, step in {
        "barrier": barrier,
        **{f"{n} of {HEADS} heads": lambda n=n: push(n) for n in (16, 8, 4, 2)},
    }.items():
        taken = median_us(step)
        if rank == 0:
            print(f"{name}: {taken:.1f} us", flush=True)


def main() -> None:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    group = dist.group.WORLD
    assert group is not None
    memory = PeerMemory(group, device)
    check_rounds(memory)
    if dist.get_rank() == 0:
        print(f"checked {ROUNDS} rounds", flush=True)
    measure(memory)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
