"""Cost of first calls, beyond warm ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from ringattn.workload import Tunables

from .tables import Table

ONE_OFF_S = 1.0  # a first call that took longer loaded or compiled something: cuDNN's plan for a new shape takes 0.1 s

Part = tuple[str, str]  # a kernel, and "forward" or "backward"


@dataclass(frozen=True, slots=True)
class FirstCalls:
    """Cost of first calls beyond warm ones, by kernel and direction.

    ``one_off_s`` is paid once a worker, by whichever plan comes first: loading and compiling. ``new_length_s`` is paid
    by every branch at every length that was not met before.
    """

    one_off_s: Mapping[Part, float] = field(default_factory=dict)
    new_length_s: Mapping[Part, float] = field(default_factory=dict)


def parts_of(plan: Tunables) -> tuple[Part, ...]:
    """Return what runs in each branch, repeated where several branches run the same."""
    forward = [(branch.forward, "forward") for branch in plan.branches]
    return tuple(forward + [(branch.backward, "backward") for branch in plan.branches if branch.backward])


def first_calls_of(tables: Iterable[Table]) -> FirstCalls:
    """Read off recorded checks: in the order of a table, the first row with a new part paid for it.

    Of several tables the median counts for a new length, and the most for what is paid once.
    """
    one_off: dict[Part, float] = {}
    new_length: dict[Part, list[float]] = {}
    for table in tables:
        seen: set[Part] = set()
        for row in table.rows.values():
            new = [part for part in parts_of(row.tunables) if part not in seen]
            if row.checked is None or not new:
                continue
            seen.update(new)
            each_s = max(0.0, row.checked.cold_ms - row.checked.call_ms) / 1e3 / len(new)
            for part in dict.fromkeys(new):
                if each_s * len(new) > ONE_OFF_S:
                    one_off[part] = max(one_off.get(part, 0.0), each_s * new.count(part))
                else:
                    new_length.setdefault(part, []).append(each_s)
    return FirstCalls(one_off, {part: float(np.median(seconds)) for part, seconds in new_length.items()})
