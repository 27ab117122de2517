"""The end of one cell's search: the choice with its evidence, and everything that a profile and a report say of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from autotune.journal.attributes import LARGEST_LOG
from autotune.measure.evaluator import Checked, Fault, Interference
from autotune.statistics import Interval
from ringattn.errors import FieldError
from ringattn.workload import Tunables, Workload

CellState = Literal["tuned", "default", "refused", "inconclusive"]
AT_PAR = Interval(0.0, 0.0, 0.0, 2)


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan with its numbers, ready for a profile."""

    tunables: Tunables
    checked: Checked
    gain: Interval  # of log(t / t_default); a count of 0 says it was never timed
    median_ms: float  # of the device
    host_us: float
    first_call_ms: float  # at a length never met before

    def record(self, number_of: Callable[[Tunables], int]) -> MeasuredRecord:
        """Return it for a study; the plan is the number of its trial there."""
        gain = self.gain
        bounds = [bound if math.isfinite(bound) else None for bound in (gain.low, gain.high)]
        return MeasuredRecord(
            number_of(self.tunables), gain.median, gain.count, self.median_ms, self.host_us, self.first_call_ms, *bounds
        )


@dataclass(frozen=True, slots=True)
class MeasuredRecord:
    """A plan with its numbers in a study: ``trial`` is the plan's; a bound that is None is infinite."""

    trial: int
    log_ratio: float
    blocks: int
    median_ms: float
    host_us: float
    first_call_ms: float
    log_ratio_low: float | None = None
    log_ratio_high: float | None = None

    def __post_init__(self) -> None:
        for name in ("log_ratio", "log_ratio_low", "log_ratio_high"):
            if abs(getattr(self, name) or 0.0) > LARGEST_LOG:
                raise FieldError(
                    f"is {getattr(self, name)}; it must be from -{LARGEST_LOG} to {LARGEST_LOG}", field=name
                )
        for name in ("trial", "blocks", "median_ms", "host_us", "first_call_ms"):
            if getattr(self, name) < 0:
                raise FieldError(f"is {getattr(self, name)}; it must be >= 0", field=name)

    def measured(self, plan_of: Callable[[int], tuple[Tunables, Checked]]) -> Measured:
        """Return the inverse of ``Measured.record``; ``plan_of`` finds a plan by the number of its trial."""
        tunables, checked = plan_of(self.trial)
        low = -math.inf if self.log_ratio_low is None else self.log_ratio_low
        high = math.inf if self.log_ratio_high is None else self.log_ratio_high
        gain = Interval(low, self.log_ratio, high, self.blocks)
        return Measured(tunables, checked, gain, self.median_ms, self.host_us, self.first_call_ms)


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """The end of a cell in a study, which holds the plans and their failures itself."""

    state: CellState
    note: str = ""
    trials: int = 0
    noise_sigma: float | None = None  # None: unknown
    validation_pending: bool = False
    choice: MeasuredRecord | None = None
    captured: MeasuredRecord | None = None
    default: MeasuredRecord | None = None
    torch: MeasuredRecord | None = None
    auto: MeasuredRecord | None = None
    runners_up: tuple[MeasuredRecord, ...] = ()
    front: tuple[MeasuredRecord, ...] = ()
    singles: tuple[MeasuredRecord, ...] = ()
    under_load: bool = False

    def __post_init__(self) -> None:
        if self.choice is None and self.state in ("tuned", "default"):
            raise FieldError(f"is missing in a cell that is {self.state}", field="choice")
        if self.noise_sigma is not None and self.noise_sigma < 0:
            raise FieldError(f"is {self.noise_sigma}; it must be >= 0", field="noise_sigma")


@dataclass(slots=True)
class CellResult:
    """Everything a cell came to. ``choice`` is None only for a refusal, whose reason is ``note``."""

    workload: Workload
    state: CellState
    choice: Measured | None = None
    captured: Measured | None = None  # of least device time, where that is another plan; its gain is the device's
    default: Measured | None = None
    torch: Measured | None = None  # the kernel to which torch dispatches the workload
    runners_up: tuple[Measured, ...] = ()
    auto: Measured | None = None
    front: tuple[Measured, ...] = ()
    singles: tuple[Measured, ...] = ()  # of each kernel used alone in both directions, its fastest plan
    failures: dict[Tunables, Fault] = field(default_factory=dict)
    trials: int = 0
    noise_sigma: float = math.inf
    note: str = ""
    disturbances: tuple[Interference, ...] = ()
    validation_pending: bool = False  # of the default, which stays, at other lengths
    under_load: bool = False  # foreign load did not end while it was timed

    def record(self, number_of: Callable[[Tunables], int]) -> ResultRecord:
        """Return it for a study; ``number_of`` finds the number of a plan's trial there."""

        def one(measured: Measured | None) -> MeasuredRecord | None:
            return None if measured is None else measured.record(number_of)

        return ResultRecord(
            self.state,
            self.note,
            self.trials,
            self.noise_sigma if math.isfinite(self.noise_sigma) else None,
            self.validation_pending,
            **{name: one(getattr(self, name)) for name in _ONE},  # type: ignore[arg-type]
            **{name: tuple(map(one, getattr(self, name))) for name in _SEVERAL},  # type: ignore[arg-type]
            under_load=self.under_load,
        )

    @classmethod
    def of(
        cls,
        workload: Workload,
        record: ResultRecord,
        plan_of: Callable[[int], tuple[Tunables, Checked]],
        failures: Mapping[Tunables, Fault],
    ) -> CellResult:
        """Return the inverse of ``record``; ``plan_of`` finds a plan by the number of its trial."""

        def one(kept: MeasuredRecord | None) -> Measured | None:
            return None if kept is None else kept.measured(plan_of)

        return cls(
            workload,
            record.state,
            **{name: one(getattr(record, name)) for name in _ONE},  # type: ignore[arg-type]
            **{name: tuple(map(one, getattr(record, name))) for name in _SEVERAL},  # type: ignore[arg-type]
            failures=dict(failures),
            trials=record.trials,
            noise_sigma=math.inf if record.noise_sigma is None else record.noise_sigma,
            note=record.note,
            validation_pending=record.validation_pending,
            under_load=record.under_load,
        )


_ONE = ("choice", "captured", "default", "torch", "auto")
_SEVERAL = ("runners_up", "front", "singles")
assert {*_ONE, *_SEVERAL} < {f.name for f in dataclasses.fields(CellResult)}
