"""Requests and results of a probe and of a verification, and the observer that follows them.

Everything here is plain data and imports neither torch nor optuna; ``autotune.probe.tuning`` answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from autotune.trial_outcome import TrialOutcome
from ringattn.planning.preference import Launch, Preference
from ringattn.wording import plural
from ringattn.workload import HeadOffset, Mode, Tunables, Workload

if TYPE_CHECKING:
    from ringattn.profile.schema import Profile

Effort = Literal["quick", "standard", "full"]
Precision = Literal["auto", "bf16", "fp16", "tf32", "fp32"]
Layout = Literal["auto", "contiguous", "zigzag"]
CellStatus = Literal["tuned", "default", "refused", "inconclusive", "resumed"]


class UsualShape(NamedTuple):
    """Shape that commands take where none is named: a row of every default grid."""

    seq_len: int
    heads: int
    head_dim: int


ON_A_GPU, ON_A_CPU = UsualShape(16384, 16, 128), UsualShape(2048, 4, 64)


def usual_dtype(vendor: str, arch: str) -> str:
    """Return the input dtype that is measured by default on a device of this vendor and architecture."""
    if vendor == "cpu":
        return "fp32"
    sm = int(arch.removeprefix("sm_"))
    return "bf16" if sm >= 80 else "fp16" if sm >= 70 else "fp32"


def usual_shape(vendor: str) -> UsualShape:
    """Return the shape that is measured by default on a device of this vendor, "cpu" or another."""
    return ON_A_CPU if vendor == "cpu" else ON_A_GPU


# Said of one cell or of several.
VALIDATION_PENDING = "default kept, right at the length measured, but no time was left to validate it at others"


@dataclass(frozen=True, slots=True)
class ProbeRequest:
    """Request of a probe. ``None`` and empty tuples: as the default grid of the device has it."""

    output: Path | None = None  # None: the user's profile folder, under a name made from the fingerprint
    effort: Effort = "standard"
    budget_s: float | None = None  # None: the effort's own
    modes: tuple[Mode, ...] = ()
    causal: bool | None = None
    seq_lens: tuple[int, ...] = ()
    longest: int | None = None  # of the whole sequence: without seq_lens, lengths up to it instead of the grid's
    recorded: tuple[tuple[Workload, int], ...] = ()  # with their calls, of which the costliest are the cells
    add_kernels: tuple[str, ...] = ()  # measured against the plans of the profile at ``output``, and nothing else
    batch_size: int | None = None
    documents: int | None = None  # so many packed into each length
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    segment_lengths: tuple[int, ...] | None = None
    dilation_rates: tuple[int, ...] | None = None
    head_offset: HeadOffset = "interleaved"  # of that pattern
    dense: bool = False  # without the grid's dilated pattern
    input_dtype: str | None = None  # of a model's weights; None: the device's usual one. A precision wins over it
    precision: Precision = "auto"
    max_error: float | None = None  # relative 2-norm against float64; None: the accuracy check alone decides
    varied_lengths: bool = False  # lengths vary between calls: first-call cost counts in the score
    memory_limit_mib: int | None = None  # workspace beyond the inputs
    prefer: Preference = "time"
    launch: Launch = "eager"
    seed: int = 0
    sampler: str = "auto"  # tpe, gp, random, grid, or package.module:Class of an Optuna sampler
    storage: str | None = None  # URL of an Optuna storage; None: the journal beside the profile
    device: str | None = None
    ranks: int = 1  # that hold one sequence together and are tuned as one
    layout: Layout = "auto"  # of a sequence over them
    resume: bool = True
    dry_run: bool = False


@dataclass(frozen=True, slots=True)
class CellReport:
    """Result of one cell: the chosen plan and how sure the tuner is of it."""

    workload: Workload
    status: CellStatus
    chosen: Tunables | None = None
    default: Tunables | None = None
    default_ratio: float | None = None
    ratio_low: float | None = None
    ratio_high: float | None = None
    trials: int = 0
    failures: int = 0
    elapsed_s: float = 0.0
    note: str = ""
    validation_pending: bool = False
    noise: float | None = (
        None  # standard deviation of one paired log-ratio; None where fewer than two blocks were timed
    )

    @property
    def text(self) -> str:
        """Return the note, and whether validation is pending, in words."""
        return "; ".join(filter(None, (self.note, VALIDATION_PENDING if self.validation_pending else "")))


def inconclusive_lines(reports: Iterable[CellReport]) -> tuple[str, ...]:
    """Return why cells are inconclusive, each reason once with all of its cells."""
    cells: dict[str, list[str]] = {}
    for report in reports:
        if report.status == "inconclusive":
            cells.setdefault(report.text, []).append(str(report.workload))
    return tuple(
        f"{of[0]}: {reason}" if len(of) == 1 else f"{plural(len(of), 'cell')}: {reason} ({', '.join(of)})"
        for reason, of in cells.items()
    )


@dataclass(frozen=True, slots=True)
class DryCell:
    """One cell of a dry run: how many distinct plans it has, and which were ruled out beforehand and why."""

    workload: Workload
    kernels: tuple[str, ...]  # "forward" or "forward/backward" names that stage 1 would race
    candidates: int  # distinct plans in the whole valid space
    estimate_s: float
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = ()
    layout: str = ""  # of the sequence over several ranks
    measured: bool = False  # its row is there already: it stays, or is verified where all are


@dataclass(frozen=True, slots=True)
class DryRun:
    """Result of a dry run: what a probe would do, without a single measurement."""

    cells: tuple[DryCell, ...]
    estimate_s: float
    tunables: tuple[tuple[str, tuple[str, ...]], ...] = ()  # name and the values searched, as text
    verifies: bool = False  # all cells are in the profile: they are verified, and only those that are stale searched


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of a probe; ``inconclusive`` says why numbers could not be believed, each reason with its cells.

    ``profile_path`` is where the profile is, or where a dry run would have written it.
    """

    profile_path: Path | None
    profile: Profile | None
    cells: tuple[CellReport, ...]
    elapsed_s: float
    inconclusive: tuple[str, ...] = ()
    dry_run: DryRun | None = None
    verified: bool = False  # an unchanged machine: recorded winners were re-timed instead of searched


@dataclass(frozen=True, slots=True)
class VerifiedCell:
    """One recorded winner, re-timed against the default and the runners-up."""

    workload: Workload
    recorded: Tunables
    best: Tunables  # the fastest of what was re-timed
    best_ratio: float  # time of ``best`` / time of the recorded winner
    ratio_low: float
    ratio_high: float
    stale: bool
    note: str = ""

    @property
    def is_slower(self) -> bool:
        """Return whether it is stale by its time, and not because it no longer runs."""
        return self.stale and self.best != self.recorded


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Result of a verification, one line each per stale winner and per inconclusive cell."""

    stale: tuple[str, ...]
    cells: tuple[VerifiedCell, ...] = ()
    elapsed_s: float = 0.0
    inconclusive: tuple[str, ...] = ()
    interference: tuple[str, ...] = ()  # that was seen while they were timed, the largest of each kind
    left_out: int = 0  # rows at their default, which no probe could measure
    other_ranks: int = 0  # rows for other numbers of ranks than it ran on


class ProbeObserver:
    """Ignores what the engine reports; an observer overrides what it cares about.

    Calls come from one thread, in order; none may block for long.
    """

    def plan(self, cells: Sequence[Workload], estimate_s: float) -> None: ...

    def stage(self, cell: Workload, name: str) -> None: ...

    def trial(self, cell: Workload, candidate: str, outcome: TrialOutcome) -> None: ...

    def eta(self, fraction: float, remaining_s: float) -> None: ...

    def note(self, text: str) -> None: ...

    def finished(self, result: ProbeResult | VerifyResult) -> None: ...
