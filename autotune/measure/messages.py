"""Messages between the tuner and its worker process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from ringattn.hardware.kernel_faults import Combination
from ringattn.workload import Tunables, Workload

REAL_BENCH = "autotune.measure.benchmark:DeviceBench"
POOL_BENCH = "autotune.measure.pool.pool_bench:PoolBench"
MESSAGE_MIB = 64  # size of the message that links are measured with

Action = Literal["check", "validate", "first-call", "run-profile", "block", "links", "kernel", "stop"]
MessageKind = Literal["ready", "phase", "result", "done", "no-device", "bug"]


@dataclass(frozen=True, slots=True)
class Request:
    """Request to a worker; a block times all of ``plans`` in order.

    ``part`` (i, n) of a validation is every n-th of its lengths from the i-th on. ``pool_processes`` are those of this
    probe on the same device while a block is timed. ``lockstep``: other ranks do the same, so a block ends at the first
    plan that fails, and nothing is tried again. A kernel alone is checked as ``combination`` at ``rows``.
    """

    action: Action
    workload: Workload | None = None
    plans: tuple[Tunables, ...] = ()
    profile_path: str = ""
    pace_ms: float | None = None
    lockstep: bool = False
    part: tuple[int, int] = (0, 1)
    pool_processes: tuple[int, ...] = ()
    combination: Combination | None = None
    rows: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """Message of a worker: a phase of a candidate, by name, or the result of candidate ``index``."""

    kind: MessageKind
    index: int = 0
    value: Any = None


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address at which the workers of all ranks meet: a store, and in it a prefix for each generation of workers."""

    rank: int
    world: int
    host: str
    port: int
    generation: int


@dataclass(frozen=True, slots=True)
class LinkReading:
    """Seconds of a round in which every rank sends a message to the next, large and small, on one rank."""

    large_s: float
    small_s: float
