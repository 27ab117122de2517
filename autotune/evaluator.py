"""The one seam between search and measurement: what can be asked of a machine, real or replayed.

The search knows this protocol, a clock, and nothing of processes, tensors or tables.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from ringattn.profile import LinkSpeed
from ringattn.workload import Tunables, Workload

FailureKind = Literal["oom", "crash", "timeout", "wrong", "compile", "error"]


class Clock(Protocol):
    """Seconds that only grow. Replay supplies simulated ones."""

    def now(self) -> float: ...


class MonotonicClock:
    """The machine's own."""

    def now(self) -> float:
        return time.monotonic()


@dataclass(frozen=True, slots=True)
class Fault:
    """How a candidate ended that gave no number; ``message`` is one line, with the input that broke it."""

    kind: FailureKind
    message: str

    @property
    def from_outside(self) -> bool:
        """Whether the machine may be to blame: it was too slow to answer, or somebody killed the worker."""
        return self.kind == "timeout" or (self.kind == "crash" and "SIGKILL" in self.message)


@dataclass(frozen=True, slots=True)
class Checked:
    """A candidate that agreed with float64: what one look at it showed.

    ``call_ms`` is a warm call, good to plan with but not to compare; ``error`` the relative 2-norm against float64
    on ordinary inputs, the worst of out and the gradients; ``peak_bytes`` what one call holds beyond the inputs;
    ``cold_ms`` the very first call, with whatever had to be loaded, built or compiled for it.
    """

    call_ms: float
    error: float
    peak_bytes: int
    cold_ms: float
    host_us: float


@dataclass(frozen=True, slots=True)
class Proven:
    """A candidate that is right at ragged lengths too; ``first_call_ms`` is a call at a length never met before."""

    first_call_ms: float


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition of one candidate in one block; ``ms`` is the time of a call that the search minimises."""

    ms: float
    host_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Block:
    """One pass over candidates, in the order they were given.

    A candidate that fails ends with a Fault in its place and does not end the block. ``disturbances`` say what
    made the block untrustworthy as a whole: foreign load, throttling; such a block is repeated, never used.
    """

    results: tuple[Sample | Fault, ...]
    disturbances: tuple[str, ...] = ()


@runtime_checkable
class KnowsLinks(Protocol):
    """An evaluator of several ranks, which can say how fast messages go between them."""

    def links(self) -> LinkSpeed: ...


@runtime_checkable
class CallsAhead(Protocol):
    """An evaluator that can make first calls while it does other things."""

    def begin_first_calls(self, calls: Sequence[tuple[Workload, Tunables]]) -> None: ...

    def end_first_calls(self, timeout_s: float) -> str:
        """Waits for them, at most so long; says what failed."""
        ...


class Evaluator(Protocol):
    """A machine that can check and time plans. Nothing that a candidate does may raise out of these calls."""

    def check(
        self, cell: Workload, candidate: Tunables, *, timeout_s: float, pace_ms: float | None = None
    ) -> Checked | Fault:
        """Run the candidate at the cell's own length and hold it against float64.

        One that turns out much slower than ``pace_ms`` a call is let go with fewer calls.
        """
        ...

    def prove(self, cell: Workload, candidate: Tunables, *, timeout_s: float) -> Proven | Fault:
        """Hold the candidate against float64 at random ragged lengths of the cell's bucket."""
        ...

    def block(self, cell: Workload, order: Sequence[Tunables], *, timeout_s: float) -> Block:
        """Time each of ``order`` once; one plan may occur twice. ``timeout_s`` is per candidate."""
        ...

    def obey(self, cell: Workload, profile_path: str, *, timeout_s: float) -> Tunables | Fault:
        """The plan the runtime takes for the cell when it reads the profile at ``profile_path``, after running it."""
        ...

    def close(self) -> None:
        """Give the machine back."""
        ...
