"""Settings that hold for every cell of a probe, and who is told of its trials."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from autotune.trial_outcome import TrialOutcome
from ringattn.planning.preference import Launch, Preference
from ringattn.workload import Tunables, Workload

from .budget import EffortPreset
from .limits import Limits


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """Settings of every cell. ``hang_s``: no call is given up before (compilation takes its time).

    ``asynchronous``: the device works while the host goes on, so that either may be waited for, and ``launch`` says
    which time is minimised. ``graphs``: plans may be launched from CUDA graphs of their own. ``sampler`` is auto, tpe,
    gp, random, grid, or ``package.module:Class`` of any Optuna sampler.
    """

    preset: EffortPreset
    seed: int
    limits: Limits = field(default_factory=Limits)
    prefer: Preference = "time"
    hang_s: float = 10.0
    asynchronous: bool = False
    launch: Launch = "eager"
    graphs: bool = False
    sampler: str = "auto"


class Listener(Protocol):
    """Hears of a search's stages and trials."""

    def stage(self, cell: Workload, name: str) -> None: ...

    def trial(self, cell: Workload, tunables: Tunables, outcome: TrialOutcome) -> None: ...


class NoListener:
    """Hears and says nothing."""

    def stage(self, cell: Workload, name: str) -> None: ...

    def trial(self, cell: Workload, tunables: Tunables, outcome: TrialOutcome) -> None: ...
