"""One probe as it was asked for."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.search.budget import EFFORTS, EffortPreset

from .environment import Environment
from .request import ProbeObserver, ProbeRequest


@dataclass(frozen=True, slots=True)
class Task:
    """What is asked, how hard to look, at which machine, and who listens."""

    request: ProbeRequest
    preset: EffortPreset
    environment: Environment
    observer: ProbeObserver

    @classmethod
    def of(cls, request: ProbeRequest, observer: ProbeObserver, environment: Environment) -> Task:
        """``environment`` is looked at as the request's effort does."""
        preset = EFFORTS[request.effort].with_budget(request.budget_s)
        return cls(request, preset, environment.at_effort(preset), observer)
