"""Agreement among the benches of all ranks, so that all make the same calls: numbers, faults, barriers.

Runs inside the worker processes. Everything here goes over a gloo group of its own, beside the messages measured.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ringattn.errors import DeviceError
from ringattn.hardware.identity import pid_scope

from .messages import MESSAGE_MIB, LinkReading, Rendezvous

JOIN_TIMEOUT_S = 100.0  # below what the parent gives a worker to start
GROUP_TIMEOUT_S = 900.0  # a candidate that hangs is ended long before, by the parent of its worker
SMALL_BYTES = 8  # of a message whose time is all latency
ROUNDS, SMALL_ROUNDS = 7, 50


class SingleRank:
    """The ranks of a bench that has its device for itself."""

    rank, size = 0, 1
    group: Any = None
    siblings: tuple[int, ...] = ()

    def max_over_ranks(self, *values: float) -> tuple[float, ...]:
        return values

    def barrier(self) -> None: ...

    def first_rank_at_fault(self, fault: str) -> tuple[int, str] | None:
        return (0, fault) if fault else None


def siblings_in(group: Any) -> tuple[int, ...]:
    """Return the processes of the other ranks on this host; every rank of the group calls it."""
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, (pid_scope(), os.getpid()), group=group)
    own = dist.get_rank(group)
    return tuple(pid for rank, (place, pid) in enumerate(everyone) if rank != own and place == pid_scope())


class RankGroup(SingleRank):
    """One rank among several, in a process group made for this generation of workers.

    Raises DeviceError where the others cannot be met.
    """

    def __init__(self, rendezvous: Rendezvous, device: torch.device) -> None:
        self.rank, self.size = rendezvous.rank, rendezvous.world
        try:
            store = dist.TCPStore(  # type: ignore[attr-defined]
                rendezvous.host, rendezvous.port, is_master=False, timeout=timedelta(seconds=JOIN_TIMEOUT_S)
            )
            own = dist.PrefixStore(f"workers/{rendezvous.generation}", store)  # type: ignore[attr-defined]
            on_gpu = device.type == "cuda"
            dist.init_process_group(
                "nccl" if on_gpu else "gloo",
                store=own,
                rank=rendezvous.rank,
                world_size=rendezvous.world,
                timeout=timedelta(seconds=GROUP_TIMEOUT_S),
                device_id=device if on_gpu else None,
            )
            self._control = dist.new_group(backend="gloo", timeout=timedelta(seconds=GROUP_TIMEOUT_S))
        except RuntimeError as error:  # torch's DistError and its kin
            text = (str(error).strip() or type(error).__name__).splitlines()[0]
            raise DeviceError(f"rank {rendezvous.rank} cannot meet the others: {text}") from error
        self.group = dist.group.WORLD
        self.siblings = siblings_in(self._control)

    def max_over_ranks(self, *values: float) -> tuple[float, ...]:
        """Return the largest of each number over the ranks, once all have come."""
        largest = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._control)
        return tuple(largest.tolist())

    def barrier(self) -> None:
        """Wait until every rank is here."""
        dist.barrier(group=self._control)

    def first_rank_at_fault(self, fault: str) -> tuple[int, str] | None:
        """Return the lowest rank with a fault, and the fault; the same on all ranks."""
        if not self.max_over_ranks(float(bool(fault)))[0]:
            return None
        said: list[Any] = [None] * self.size
        dist.all_gather_object(said, fault, group=self._control)
        return next((rank, text) for rank, text in enumerate(said) if text)


def ring_neighbours(peers: SingleRank) -> tuple[int, int]:
    """Return the ranks before and after this one."""
    return (peers.rank - 1) % peers.size, (peers.rank + 1) % peers.size


def exchange(send: torch.Tensor, receive: torch.Tensor, peers: SingleRank) -> None:
    """Send a message to the next rank and receive one from the one before; both are complete on return."""
    before, after = ring_neighbours(peers)
    operations: Sequence[Any] = [
        dist.P2POp(dist.isend, send, after, peers.group),
        dist.P2POp(dist.irecv, receive, before, peers.group),
    ]
    for work in dist.batch_isend_irecv(list(operations)):
        work.wait()
    if send.is_cuda:
        torch.cuda.synchronize(send.device)


def measure_links(peers: SingleRank, device: torch.device) -> LinkReading:
    """Measure medians of full rounds of messages, begun together; every rank calls it."""
    large_s = _round_s(peers, device, MESSAGE_MIB * 2**20, ROUNDS)
    return LinkReading(large_s, _round_s(peers, device, SMALL_BYTES, SMALL_ROUNDS))


def _round_s(peers: SingleRank, device: torch.device, size_bytes: int, rounds: int) -> float:
    send = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    receive = torch.empty_like(send)
    for _ in range(2):  # connections are made by the first
        exchange(send, receive, peers)
    taken_s = []
    for _ in range(rounds):
        peers.barrier()
        begin = time.perf_counter()
        exchange(send, receive, peers)
        taken_s.append(time.perf_counter() - begin)
    return statistics.median(taken_s)
