"""Sequence layout of a probe over several ranks whose rows join those of an earlier profile."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

from autotune.exit_codes import ProbeFailure
from ringattn.geometry.layout import resolve_layout
from ringattn.planning.matching import entries_for
from ringattn.profile.schema import Profile
from ringattn.wording import plural
from ringattn.workload import Workload


def joined_layout(cell: Workload, asked: str, old: Profile | None, new: Collection[Workload], path: Path) -> str:
    """Return the layout to search ``cell`` in: ``asked``, or for auto that of the rows it joins.

    A module takes one layout for all its rows, that of most of them. With another one a new row would never be run.
    ``new`` are the cells that this probe measures, whose rows in ``old``, the profile at ``path``, are replaced.
    ProbeFailure where ``asked`` is not theirs.
    """
    if old is None or cell.world == 1:
        return asked
    module = (cell.heads, cell.kv_heads)
    covered = {(w.mode, w.dtype) for w in new if (w.heads, w.kv_heads) == module}
    kept = [
        entry
        for entry in old.plans
        if entry.workload not in new
        and (
            (entry.workload.mode, entry.workload.dtype) not in covered
            or (entry.workload.heads, entry.workload.kv_heads) == module
        )
    ]
    beside, _ = entries_for(replace(old, plans=tuple(kept)), cell)
    layouts = [e.choice.tunables.layout for e in beside if e.choice is not None and e.choice.tunables.layout]
    if not layouts:
        return asked
    theirs = resolve_layout("auto", cell.pattern, cell.causal, layouts)
    if asked not in ("auto", theirs):
        raise ProbeFailure(
            f"{path}: {plural(len(layouts), 'row')} for the same module in {theirs} layout, which it would take; "
            f"give --layout {theirs}, or another --output"
        )
    return theirs
