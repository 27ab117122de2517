"""The end of one cell's search: the choice with its evidence, and everything that a profile and a report say of it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from autotune.measure.evaluator import Checked, Fault, Interference
from autotune.statistics import Interval
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

    def plain(self, number_of: Callable[[Tunables], int]) -> dict[str, Any]:
        """JSON data for a study; the plan is the number of its trial there."""
        gain = [self.gain.low, self.gain.median, self.gain.high, self.gain.count]
        return {
            "trial": number_of(self.tunables),
            "log_ratio": gain,
            "median_ms": self.median_ms,
            "host_us": self.host_us,
            "first_call_ms": self.first_call_ms,
        }


@dataclass(slots=True)
class CellResult:
    """Everything a cell came to. ``choice`` is None only for a refusal, whose reason is ``note``."""

    workload: Workload
    state: CellState
    choice: Measured | None = None
    captured: Measured | None = None  # of least device time, where that is another plan; its gain is the device's
    default: Measured | None = None
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

    def plain(self, number_of: Callable[[Tunables], int]) -> dict[str, Any]:
        """JSON data for a study, which holds the plans and their failures itself."""

        def one(measured: Measured | None) -> dict[str, Any] | None:
            return None if measured is None else measured.plain(number_of)

        return {
            "state": self.state,
            "note": self.note,
            "validation_pending": self.validation_pending,
            "trials": self.trials,
            "noise_sigma": self.noise_sigma if math.isfinite(self.noise_sigma) else None,
            **{name: one(getattr(self, name)) for name in _ONE},
            **{name: [one(measured) for measured in getattr(self, name)] for name in _SEVERAL},
        }

    @classmethod
    def of(
        cls,
        workload: Workload,
        document: Mapping[str, Any],
        plan_of: Callable[[int], tuple[Tunables, Checked]],
        failures: Mapping[Tunables, Fault],
    ) -> CellResult:
        """The inverse of ``plain``; ``plan_of`` finds a plan by the number of its trial."""

        def one(plain: Mapping[str, Any] | None) -> Measured | None:
            if plain is None:
                return None
            tunables, checked = plan_of(plain["trial"])
            low, median, high, count = plain["log_ratio"]
            gain = Interval(float(low), median, float(high), count)
            times = plain["median_ms"], plain["host_us"], plain["first_call_ms"]
            return Measured(tunables, checked, gain, *times)

        def several(plain: Sequence[Mapping[str, Any]]) -> tuple[Measured, ...]:
            return tuple(found for each in plain if (found := one(each)) is not None)

        sigma = document["noise_sigma"]
        return cls(
            workload,
            document["state"],
            choice=one(document["choice"]),
            captured=one(document["captured"]),
            default=one(document["default"]),
            runners_up=several(document["runners_up"]),
            auto=one(document["auto"]),
            front=several(document["front"]),
            singles=several(document["singles"]),
            failures=dict(failures),
            trials=document["trials"],
            noise_sigma=math.inf if sigma is None else sigma,
            note=document["note"],
            validation_pending=document["validation_pending"],
        )


_ONE = ("choice", "captured", "default", "auto")
_SEVERAL = ("runners_up", "front", "singles")
assert {*_ONE, *_SEVERAL} < {f.name for f in dataclasses.fields(CellResult)}
