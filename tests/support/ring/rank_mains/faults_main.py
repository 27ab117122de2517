"""One rank of ``test_ring_faults_gpu``, started without torchrun: something goes wrong on rank 1 of a working ring.

Says "broken" when it does, and whatever this rank is told of it. Without a GPU it runs the same on gloo.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ringattn import Profile, RingAttention, Workload, detect
from ringattn.kernels.contract import BoundKernel
from ringattn.kernels.registry import KERNELS
from ringattn.workload import BranchTunables, Tunables

HEADS, HEAD_DIM, LOCAL, TIMEOUT_S = 8, 64, 1024, 20
ON_GPU = torch.cuda.is_available()
DEVICE, KERNEL = ("cuda", "flash") if ON_GPU else ("cpu", "flash-cpu")
RANK = int(os.environ["RANK"])


def module(schedule: str = "ring", exchange: str = "") -> RingAttention:
    world = dist.get_world_size()
    branch = BranchTunables(KERNEL, KERNEL)
    tunables = Tunables("bf16", (branch,), schedule=schedule, layout="zigzag", exchange=exchange)
    workload = Workload("train", True, LOCAL, HEADS, HEAD_DIM, "bf16", world=world)
    profile = Profile.single(detect(DEVICE), workload, tunables)
    return RingAttention(HEADS, HEAD_DIM, causal=True, profile=profile, device=DEVICE, process_group=dist.group.WORLD)


def step(attn: RingAttention, length: int = LOCAL) -> None:
    leaves = [torch.randn(1, length, HEADS, HEAD_DIM, device=DEVICE).bfloat16().requires_grad_() for _ in range(3)]
    attn(*leaves).sum().backward()
    wait()


def wait() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def broken() -> None:
    print("broken", flush=True)


def go_on(attn: RingAttention) -> None:
    """As a program would that knows of nothing: on GPUs, whose calls return before they have run, a later one tells."""
    while True:
        step(attn)


def killed(attn: RingAttention) -> None:
    if RANK == 1:
        broken()
        os.kill(os.getpid(), signal.SIGKILL)
    step(attn)


def killed_symmetric(attn: RingAttention) -> None:
    """Rank 1 while the others wait for it on their GPUs."""
    attn = module("ulysses", "symmetric")
    for _ in range(3):
        step(attn)
    dist.barrier()
    killed(attn)
    step(attn)


def _with_a_backward_that(breaks: Callable[[], object]) -> None:
    """From now on, for modules that are built on this rank."""
    kernel = KERNELS[KERNEL]
    load = kernel.load

    def broken_load(config: Any) -> BoundKernel:
        def backward(*_: Tensor, **__: Any) -> Any:
            broken()
            breaks()

        return load(config)._replace(backward=backward)

    object.__setattr__(kernel, "load", broken_load)


def _raise() -> None:
    raise ValueError("kernel broke")


def raises(attn: RingAttention) -> None:
    if RANK == 1:
        _with_a_backward_that(_raise)
    go_on(module())


def memory(attn: RingAttention) -> None:
    if RANK == 1:
        _with_a_backward_that(lambda: torch.empty(1 << 50, dtype=torch.uint8, device=DEVICE))
    go_on(module())


def profile(attn: RingAttention) -> None:
    broken()
    step(module("all-gather" if RANK == 1 else "ring"))
    print("one plan for all", flush=True)


def shape(attn: RingAttention) -> None:
    broken()
    step(attn, LOCAL // 2 if RANK == 1 else LOCAL)


def main() -> None:
    options: dict[str, Any] = {}
    if ON_GPU:
        torch.cuda.set_device(RANK)
        options["device_id"] = torch.device("cuda", RANK)
    backend = "nccl" if ON_GPU else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=TIMEOUT_S), **options)
    attn = module()
    for _ in range(3):
        step(attn)
    dist.barrier()
    try:
        {each.__name__: each for each in (killed, killed_symmetric, raises, memory, profile, shape)}[sys.argv[1]](attn)
    except Exception as error:  # noqa: BLE001  the test looks at it
        print(f"{type(error).__name__}: {error}", flush=True)
    os._exit(0)  # what is left of the group may hang


if __name__ == "__main__":
    main()
