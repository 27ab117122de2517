"""Checks once each kernel of a plan that nobody validated on this machine.

A probe validates what it measures, so the evidence of a profile that matches this machine exactly counts, for the
combinations it is about. Anything else (a named backend, the heuristic, a profile made with other software, other
heads) is checked when a program is made for it, never in a call that follows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from ringattn.errors import RingAttentionError
from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import Combination, KernelFault
from ringattn.planning.validation.accuracy_check import check_all
from ringattn.planning.validation.validation_memory import key_of, user_memory
from ringattn.profile.resolve import Resolution
from ringattn.profile.schema import Profile

from .module_setup import ModuleSetup, say_once
from .plan import Plan, combinations, rejection_reasons


def asked_of_kernels(plan: Plan, facts: HardwareFacts) -> tuple[Combination, ...]:
    """Return what must be validated for a plan to run."""
    return combinations(plan.workload, plan.tunables, facts, conditions=plan.conditions)


def faults_of(
    asked: Sequence[Combination], facts: HardwareFacts, device: torch.device, resolution: Resolution | None
) -> list[KernelFault]:
    """Return those of ``asked`` that are wrong on this machine, after every check that was still to be made.

    ``resolution`` is what the module's profile was resolved to. RingAttentionError where a check is needed and a CUDA
    graph is being captured.
    """
    keys = {combination: key_of(combination, facts) for combination in asked}
    memory = user_memory()
    known = memory.verdicts()
    unknown = [c for c in asked if keys[c] not in known and c not in _validated_by(resolution, facts, c.head_dim)]
    if unknown:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RingAttentionError(
                f"{unknown[0]}: was not checked on this machine yet, and cannot be while a CUDA graph is captured; "
                "call warmup() at this length, dtype and mode before the capture"
            )
        verdicts = check_all(unknown, device)
        memory.remember({keys[c]: verdict for c, verdict in verdicts.items()})
        known = memory.verdicts()
    return [KernelFault(c, known[keys[c]].reason) for c in asked if keys[c] in known and not known[keys[c]].passes]


def faults_among(
    asked: Iterable[Combination], validated: set[Combination], setup: ModuleSetup, device: torch.device
) -> list[KernelFault]:
    """Return the same for a module; where there is none, ``asked`` are added to what it has ``validated``."""
    asked = tuple(asked)
    if validated.issuperset(asked):
        return []
    faults = faults_of(asked, setup.facts, device, setup.resolution)
    if note := user_memory().note:
        say_once(logging.WARNING, note)
    if not faults:
        validated.update(asked)
    return faults


def _validated_by(resolution: Resolution | None, facts: HardwareFacts, head_dim: int) -> frozenset[Combination]:
    if resolution is None or resolution.tier != "exact" or resolution.profile is None:
        return frozenset()
    return _evidence(resolution.profile, facts, head_dim)


@lru_cache(maxsize=64)
def _evidence(profile: Profile, facts: HardwareFacts, head_dim: int) -> frozenset[Combination]:
    """Return what the plans of a profile that were measured, and so held against float64 before, asked of kernels."""
    found: set[Combination] = set()
    for entry in profile.plans:
        for choice in entry.measured if entry.workload.head_dim == head_dim else ():
            if not rejection_reasons(entry.workload, choice.tunables, facts):
                found.update(combinations(entry.workload, choice.tunables, facts))
    return frozenset(found)
