"""The interface between search and measurement: what can be asked of a machine, real or simulated.

The search knows this protocol, a clock, and nothing of processes, tensors or tables.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import Enum
from signal import SIGKILL
from typing import Any, Literal, Protocol, runtime_checkable

from ringattn.profile.schema import LinkSpeed
from ringattn.workload import Tunables, Workload

FailureKind = Literal["oom", "crash", "timeout", "wrong", "compile", "error"]
Direction = Literal["forward", "backward"]


class Clock(Protocol):
    """Monotonic seconds, real or simulated."""

    def now(self) -> float: ...


class MonotonicClock:
    """The clock of this machine."""

    def now(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Killed:
    """A signal ended the worker. No candidate sends SIGKILL to itself: that is another process's."""

    signal: int


@dataclass(frozen=True, slots=True)
class Stopped:
    """A signal such as SIGSTOP held the worker, which no candidate does to itself, until it was given up."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The worker was ended before it got to the candidate."""


@dataclass(frozen=True, slots=True)
class KernelUnavailable:
    """A kernel that cannot be loaded in this environment, whatever it is asked; ``reason`` is one line."""

    kernel: str
    reason: str


@dataclass(frozen=True, slots=True)
class PeerFailed:
    """A rank failed only because another did, whose own fault is the one to record."""


@dataclass(frozen=True, slots=True)
class StillCompiling:
    """The time was over before the first call had compiled what it needs: no verdict on the plan."""


Cause = Killed | Stopped | Ended | KernelUnavailable | PeerFailed | StillCompiling

# Names in the journal, which outlive those of the classes.
_CAUSES: Mapping[str, type[Cause]] = {
    "killed": Killed,
    "held": Stopped,
    "ended": Ended,
    "kernel-unavailable": KernelUnavailable,
    "peer-failed": PeerFailed,
    "still-compiling": StillCompiling,
}


@dataclass(frozen=True, slots=True)
class Fault:
    """Failure of a candidate, in place of its numbers.

    ``message`` is one line for people, with the input that broke it; ``cause`` is what decisions are made by.
    ``direction`` is the pass of the first call in which it hung or crashed, where that is known.
    """

    kind: FailureKind
    message: str
    cause: Cause | None = None
    direction: Direction | None = None

    @property
    def ended_from_outside(self) -> bool:
        """Return whether another process seems to have ended or stopped the worker: another try may go well."""
        return isinstance(self.cause, Stopped | Ended) or self.cause == Killed(SIGKILL)

    @property
    def from_outside(self) -> bool:
        """Return whether the machine may be to blame: it was too slow, or another process ended the worker."""
        return self.kind == "timeout" or self.ended_from_outside

    def plain(self) -> dict[str, Any]:
        """Return JSON data, for a journal or a table; ``Fault.of`` reads it."""
        document: dict[str, Any] = {"kind": self.kind, "message": self.message}
        if self.cause is not None:
            name = next(name for name, cause in _CAUSES.items() if type(self.cause) is cause)
            document["cause"] = {"is": name, **asdict(self.cause)}
        if self.direction is not None:
            document["direction"] = self.direction
        return document

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> Fault:
        """Return the fault of a document that ``plain`` made, also in a version that knew no causes."""
        cause = dict(document.get("cause") or {})
        made = _CAUSES[cause.pop("is")](**cause) if cause else None
        return cls(document["kind"], document["message"], made, document.get("direction"))


@dataclass(frozen=True, slots=True)
class Checked:
    """Result of one check of a candidate that agrees with float64.

    ``call_ms`` is a warm call, good to plan with but not to compare; ``error`` the relative 2-norm against float64
    on ordinary inputs, the worst of out and the gradients; ``peak_bytes`` what one call holds beyond the inputs;
    ``cold_ms`` the very first call, with whatever had to be loaded, built or compiled for it. ``varies``: two calls
    differed in some bit of the output or the gradients. ``torch_kernel`` is the kernel to which torch dispatches the
    workload, whatever the candidate runs; empty where torch knows no such attention.
    """

    call_ms: float
    error: float
    peak_bytes: int
    cold_ms: float
    host_us: float
    varies: bool = False
    torch_kernel: str = ""


@dataclass(frozen=True, slots=True)
class Proven:
    """Result of a validation at ragged lengths; ``first_call_ms`` is a call at a length never met before."""

    first_call_ms: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition of a candidate in a block; ``ms`` is the time of a call that the search minimises."""

    ms: float
    host_us: float = 0.0


class InterferenceKind(Enum):
    """Kind of interference with a timing, and its text."""

    FOREIGN_LOAD = "other processes used {:.0f} % of the CPUs"
    STEAL = "the hypervisor took {:.0f} % of the CPUs"
    QUOTA = "the CPU quota held the process back for {:.0f} % of the time"
    HARDWARE_SLOWDOWN = "GPU clocks held down: hardware slowdown"
    THERMAL = "GPU clocks held down: thermal limit"
    HARDWARE_THERMAL = "GPU clocks held down: hardware thermal limit"
    POWER_BRAKE = "GPU clocks held down: power brake"
    FOREIGN_PROCESS = "another process started to compute on the GPU"


@dataclass(frozen=True, slots=True)
class Interference:
    """Interference with a timing; ``percent`` is 0 where the kind has no size."""

    kind: InterferenceKind
    percent: float = 0.0

    def __str__(self) -> str:
        return self.kind.value.format(self.percent)


def largest_of_each(found: Iterable[Interference]) -> tuple[Interference, ...]:
    """Return the largest interference of each kind, in the order in which the kinds were met."""
    largest: dict[InterferenceKind, Interference] = {}
    for each in found:
        known = largest.get(each.kind)
        if known is None or each.percent > known.percent:
            largest[each.kind] = each
    return tuple(largest.values())


def told(found: Iterable[Interference | str]) -> str:
    """Return what disturbed timings, in one line for whoever reads them; "" where nothing was seen."""
    listed = ", ".join(map(str, found))
    return f"disturbed while it was timed: {listed}; measure again on a quieter machine" if listed else ""


@dataclass(frozen=True, slots=True)
class Block:
    """One pass over candidates, in the order they were given.

    A candidate that fails ends with a Fault in its place and does not end the block. ``disturbances`` say what
    made the block untrustworthy as a whole; such a block is repeated, never used.
    """

    results: tuple[Sample | Fault, ...]
    disturbances: tuple[Interference, ...] = ()


@runtime_checkable
class KnowsLinks(Protocol):
    """An evaluator of several ranks, which measures the links between them."""

    def links(self) -> LinkSpeed: ...


@runtime_checkable
class CallsAhead(Protocol):
    """An evaluator that makes first calls, which compile, while it does other things."""

    def begin_first_calls(self, calls: Sequence[tuple[Workload, Tunables]]) -> None: ...

    def unfinished_calls(self) -> Sequence[tuple[Workload, Tunables]]:
        """Return the calls that have not ended, begun or not."""
        ...

    def failed_calls(self) -> Mapping[tuple[Workload, Tunables], Fault]: ...

    def wait_for_first_call(self, timeout_s: float) -> None:
        """Wait until one more has ended, at most so long."""
        ...

    def end_first_calls(self, timeout_s: float) -> str:
        """Begin no more, wait for those begun, at most so long, and end them; return what failed."""
        ...


class Evaluator(Protocol):
    """A machine that can check and time plans. Nothing that a candidate does may raise out of these calls."""

    def check(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
    ) -> Checked | Fault:
        """Run the candidate at the cell's own length and compare it with float64.

        A candidate much slower than ``pace_ms`` a call is dropped after fewer calls.
        """
        ...

    def validate(self, cell: Workload, candidate: Tunables, *, timeout_s: float) -> Proven | Fault:
        """Compare the candidate with float64 at random ragged lengths of the cell's bucket."""
        ...

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        """Time each of ``order`` once; one plan may occur twice. ``timeout_s`` is per candidate."""
        ...

    def run_profile(self, cell: Workload, profile_path: str, *, timeout_s: float) -> Tunables | Fault:
        """Return the plan that the runtime takes for the cell from the profile, after running it."""
        ...

    def close(self) -> None:
        """Release the machine."""
        ...
