"""Equal plans are one candidate: which values of a plan change nothing, by the rules in the table of tunables. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from ringattn.tunable_rules import Case
from ringattn.tunables import TABLE, Tunable, Tunables
from ringattn.workload import Workload

from .ring import travelling_branches

_CHOICES = [entry for entry in TABLE.values() if not entry.required]
_OF_A_BRANCH = [entry for entry in _CHOICES if entry.per_branch]
_OF_THE_PLAN = [entry for entry in _CHOICES if not entry.per_branch]


def case_of(workload: Workload, tunables: Tunables) -> Case:
    """Return what the rules of the table are asked about for these tunables."""
    branches = workload.pattern.resolved(workload.seq_len)
    case = Case(
        train=workload.train,
        dense=workload.pattern.dense,
        seq_len=workload.seq_len,
        input_dtype=workload.dtype,
        kv_heads=workload.kv_heads,
        world=workload.world,
        segments=tuple(branch.segment for branch in branches),
        rates=tuple(branch.rate for branch in branches),
        tunables=tunables,
        packed=workload.packed,
        decode=workload.decode,
    )
    if workload.world == 1:
        return case
    degree = tunables.exchange_degree(workload.world)
    return replace(case, degree=degree, travelling=travelling_branches(workload, tunables))


def void_reasons(workload: Workload, tunables: Tunables) -> list[str]:
    """Return why values of these tunables change nothing for the workload; empty where each counts."""
    return [why for _, _, why in _void(workload, tunables)]


def plainest(workload: Workload, tunables: Tunables) -> Tunables:
    """Return the tunables with the plain value in place of every one that changes nothing for the workload."""
    while found := next(_void(workload, tunables), None):
        entry, branch, _ = found
        tunables = _with_plain(tunables, entry, branch)
    return tunables


def _void(workload: Workload, tunables: Tunables) -> Iterator[tuple[Tunable, int, str]]:
    """Yield the entries whose value changes nothing, with the branch and the reason."""
    branches = enumerate(tunables.branches)
    chosen = [(e, n) for n, branch in branches for e in _OF_A_BRANCH if getattr(branch, e.name) != e.plain]
    chosen += [(entry, 0) for entry in _OF_THE_PLAN if getattr(tunables, entry.name) != entry.plain]
    case = case_of(workload, tunables) if chosen else None
    for entry, branch in chosen:
        assert case is not None
        why = entry.void_reason(replace(case, branch=branch) if branch else case)
        if why:
            yield entry, branch, why


def _with_plain(tunables: Tunables, entry: Tunable, branch: int) -> Tunables:
    plain: dict[str, Any] = {entry.name: entry.plain}
    if not entry.per_branch:
        return replace(tunables, **plain)
    of_branches = enumerate(tunables.branches)
    return replace(tunables, branches=tuple(replace(b, **plain) if n == branch else b for n, b in of_branches))
