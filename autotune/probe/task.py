"""One probe: request, effort, environment and observer."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.search.budget import EFFORTS, EffortPreset

from .environment import Environment
from .request import ProbeObserver, ProbeRequest


@dataclass(frozen=True, slots=True)
class Task:
    """Request, effort, environment and observer of one probe."""

    request: ProbeRequest
    preset: EffortPreset
    environment: Environment
    observer: ProbeObserver

    @classmethod
    def of(cls, request: ProbeRequest, observer: ProbeObserver, environment: Environment) -> Task:
        """Make the task of a request, with its environment at the request's effort."""
        preset = EFFORTS[request.effort].with_budget(request.budget_s)
        return cls(request, preset, environment.at_effort(preset), observer)
