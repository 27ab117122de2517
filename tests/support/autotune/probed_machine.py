"""A machine for a whole probe: invented, replayed in simulated time, and watched."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from machines import environment_of, row_of

from autotune.measure.evaluator import Block
from autotune.measure.simulated import QUIET, ReplayEvaluator, SimulatedClock, Trouble
from autotune.probe.machine.environment import Environment
from autotune.probe.request import ProbeObserver, ProbeRequest
from autotune.probe.tuning import run_probe
from autotune.trial_outcome import TrialOutcome
from ringattn.profile.schema import Profile
from ringattn.workload import Tunables, Workload


def truth(cell: Workload, tunables: Tunables) -> float:
    """math is faster up to 1024, flash-cpu from there on; every other change costs 5 %."""
    kernels = {(b.forward, b.backward or b.forward) for b in tunables.branches}
    flash = sum(name == "flash-cpu" for pair in kernels for name in pair) / (2 * len(kernels))
    kernel = (flash - 1) * (-0.4 if cell.seq_len > 1024 else 0.4)
    frills = 0.05 * sum(
        [tunables.checkpoint != "selective", tunables.pool_threshold_mib is not None, not tunables.pattern_cache]
    )
    return kernel + frills + (0.1 if tunables.dtype != "fp32" else 0.0)


class Machine:
    """One invented machine for one test; its evaluator is made anew for every probe, its clock goes on."""

    def __init__(self, tmp_path: Path, trouble: Trouble = QUIET) -> None:
        self.clock = SimulatedClock()
        self.truth = truth
        self.trouble = trouble
        self.made: list[ReplayEvaluator] = []
        self.interrupt_after: int | None = None
        self.environment: Environment = environment_of(tmp_path, self._evaluator, self.clock)

    def _evaluator(self) -> ReplayEvaluator:
        def log_ratio(cell: Workload, tunables: Tunables) -> float:
            return self.truth(cell, tunables)

        evaluator = Interrupting(row_of(log_ratio), self.clock, 0, self.trouble)
        evaluator.left = self.interrupt_after
        self.made.append(evaluator)
        return evaluator


class Interrupting(ReplayEvaluator):
    """Ctrl-C after so many blocks; None is never."""

    left: int | None = None

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
        return super().block(cell, order, timeout_s=timeout_s)


class Watching(ProbeObserver):
    def __init__(self) -> None:
        self.cells: list[Workload] = []
        self.trials: list[tuple[Workload, str, TrialOutcome]] = []
        self.etas: list[tuple[float, float]] = []
        self.notes: list[str] = []
        self.results: list[object] = []

    def plan(self, cells: Sequence[Workload], estimate_s: float) -> None:
        self.cells = list(cells)

    def trial(self, cell: Workload, candidate: str, outcome: TrialOutcome) -> None:
        self.trials.append((cell, candidate, outcome))

    def eta(self, fraction: float, remaining_s: float) -> None:
        self.etas.append((fraction, remaining_s))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def finished(self, result: object) -> None:
        self.results.append(result)


def request_for(path: Path, **changes: object) -> ProbeRequest:
    """Four cells: two lengths of two patterns."""
    request = ProbeRequest(output=path, effort="quick", seq_lens=(512, 4096), modes=("train",))
    return replace(request, **changes)  # type: ignore[arg-type]


def leave_probe(folder: Path) -> Path:
    """Leave what a probe of the four cells leaves in its folder; return the profile."""
    for name, content in _files_of_a_probe().items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder / "m.yaml"


@cache
def _files_of_a_probe() -> dict[Path, bytes]:
    """The same every time, and 2 s of a core's."""
    with tempfile.TemporaryDirectory() as folder:
        run_probe(request_for(Path(folder) / "m.yaml"), ProbeObserver(), Machine(Path(folder)).environment)
        return {path.relative_to(folder): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


def winners(profile: Profile) -> dict[str, str]:
    return {str(e.workload): e.choice.tunables.branches[0].forward for e in profile.plans if e.choice is not None}


class Unfinished(ProbeObserver):
    def finished(self, result: object) -> None:
        raise AssertionError("nothing was measured")
