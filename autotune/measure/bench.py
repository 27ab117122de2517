"""The interface between a worker and what measures in it, and its settings. No torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import Combination, Verdict
from ringattn.workload import Tunables, Workload

from .evaluator import Checked, Interference, Proven, Sample
from .messages import LinkReading, Rendezvous

Phase = Callable[[str], None]


class WrongAnswer(Exception):
    """A candidate disagrees with float64; the message names the input that broke it."""


class PeerWrong(WrongAnswer):
    """Another rank's part of the answer disagrees with float64."""


class Bench(Protocol):
    """Measures candidates inside a worker. Anything a candidate does wrong is raised."""

    def check(self, workload: Workload, tunables: Tunables, phase: Phase, pace_ms: float | None) -> Checked: ...

    def validate(self, workload: Workload, tunables: Tunables, phase: Phase, part: tuple[int, int]) -> Proven: ...

    def first_call(self, workload: Workload, tunables: Tunables) -> Proven: ...

    def run_profile(self, workload: Workload, profile_path: str) -> Tunables: ...

    def links(self) -> LinkReading: ...

    def sample(self, workload: Workload, tunables: Tunables) -> Sample: ...

    def begin_block(self, pool_processes: Sequence[int] = ()) -> None: ...

    def end_block(self) -> tuple[Interference, ...]: ...

    def unmonitored(self) -> tuple[str, ...]: ...


@runtime_checkable
class ChecksKernels(Protocol):
    """A bench that compares single kernels with float64."""

    def check_kernel(self, asked: Combination, rows: int) -> Verdict: ...


@dataclass(frozen=True, slots=True)
class BenchSettings:
    """Settings of a bench, sent to a worker at its start.

    ``train_too``: gradients are wanted somewhere in this probe, so reference rows are computed with them.
    ``varied_lengths``: lengths change between calls, so part of the first call counts in every sample.
    ``rendezvous``: where the other ranks are, None for one alone.
    """

    device: str
    facts: HardwareFacts
    seed: int
    sample_target_ms: float
    ragged_lengths: int
    train_too: bool = True
    varied_lengths: bool = False
    rendezvous: Rendezvous | None = None
