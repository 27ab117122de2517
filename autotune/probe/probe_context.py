"""One probe: request, effort, environment and observer."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.probe.machine.environment import Environment
from autotune.search.budget import EFFORTS, EffortPreset

from .request import ProbeObserver, ProbeRequest


@dataclass(frozen=True, slots=True)
class ProbeContext:
    """Request, effort, environment and observer of one probe."""

    request: ProbeRequest
    preset: EffortPreset
    environment: Environment
    observer: ProbeObserver

    @classmethod
    def of(cls, request: ProbeRequest, observer: ProbeObserver, environment: Environment) -> ProbeContext:
        """Make the context of a request, with its environment at the request's effort."""
        preset = EFFORTS[request.effort].with_budget(request.budget_s)
        return cls(request, preset, environment.at_effort(preset), observer)
