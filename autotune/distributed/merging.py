"""Merges the answers of all ranks: the slowest rank's time counts, and a failure anywhere fails all.

Pure; ``Answers`` are by rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import TypeVar

from autotune.measure.evaluator import Checked, Ended, Fault, PeerFailed, Proven, Sample
from ringattn.hardware.facts import HardwareFacts
from ringattn.workload import Tunables, describe

Numbers = TypeVar("Numbers", Checked, Proven, Sample)

_MEMORY_TOLERANCE = 0.02  # of one kind of card, drivers reserve more or less


def largest(parts: Sequence[Numbers]) -> Numbers:
    """Return the answer of the whole: every number is that of the rank that needs most."""
    kind = type(parts[0])
    return kind(**{f.name: max(getattr(part, f.name) for part in parts) for f in fields(kind)})


def first_cause(faults: Sequence[tuple[int, Fault]]) -> Fault:
    """Return the fault to record, with the ranks that met it, out of (rank, fault) in the order they came."""
    _, cause = min(faults, key=lambda pair: _remoteness(pair[1]))  # the first of the nearest
    ranks = sorted({rank for rank, fault in faults if fault == cause})
    return replace(cause, message=f"{ranks_text(ranks)}: {cause.message}")


def _remoteness(fault: Fault) -> int:
    """Return 0 for a rank's own failure, 1 where its worker was gone, 2 where another rank failed first."""
    return 2 if isinstance(fault.cause, PeerFailed) else int(isinstance(fault.cause, Ended))


def ranks_text(ranks: Sequence[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2``."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def agreed_plan(plans: Mapping[int, Tunables]) -> Tunables | Fault:
    """Return the plan that all ranks took, or a fault where they differ."""
    first = plans[0]
    for rank, plan in sorted(plans.items()):
        if plan != first:
            return Fault("error", f"rank 0 plans {describe(first)}, rank {rank} {describe(plan)}")
    return first


def samples_of(parts: Sequence[Sequence[Sample | Fault]]) -> list[Sample]:
    """Return the samples that every rank has, from a block's first plan on; a rank's list ends where it failed."""
    samples = []
    for timed in zip(*parts, strict=False):
        good = [sample for sample in timed if isinstance(sample, Sample)]
        if len(good) < len(timed):
            break
        samples.append(largest(good))
    return samples


def disagreement(facts: Sequence[HardwareFacts]) -> str:
    """Return the first fact in which the ranks differ and must not, in one line; empty where they agree."""
    names = ("vendor", "arch", "sku", "sm_count", "l2_mib", "mig", "isa", "threads")
    for rank, there in enumerate(facts):
        here = facts[0]
        for name in names:
            if getattr(there, name) != getattr(here, name):
                return _differs(name, getattr(here, name), rank, getattr(there, name), "use machines of one kind")
        if abs(here.memory_mib - there.memory_mib) > _MEMORY_TOLERANCE * here.memory_mib:
            return _differs("memory_mib", here.memory_mib, rank, there.memory_mib, "use machines of one kind")
        mine, theirs = dict(here.software), dict(there.software)
        for package in sorted(mine.keys() | theirs.keys()):
            if mine.get(package) != theirs.get(package):
                versions = mine.get(package, "absent"), theirs.get(package, "absent")
                return _differs(package, versions[0], rank, versions[1], "install the same versions everywhere")
    return ""


def _differs(name: str, mine: object, rank: int, theirs: object, remedy: str) -> str:
    return f"{name} is {mine} on rank 0 and {theirs} on rank {rank}; ranks that are tuned as one are alike: {remedy}"
