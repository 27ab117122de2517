"""Plans that are timed again beside new ones: what may be the best, and what a front or a profile tells of."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from autotune.journal.study.entry import Entry
from autotune.search.cell import CellState
from autotune.search.proposing.beliefs import Beliefs
from ringattn.workload import Tunables

CONTENDERS = 2  # plans that are timed again beside the best and the new ones
DECIDED = 6  # readings after which a plan is a contender no more: the final times it properly
LEAN_BLOCKS = 3  # readings of a slower plan that needs less memory


def contenders(state: CellState, beliefs: Beliefs, fresh: Sequence[Entry]) -> list[Entry]:
    """Return the best plan, and those that may be as good, or need less memory, and were hardly timed."""
    believed = beliefs.believed()
    if not believed:
        return []
    best, (ahead, doubt) = next(iter(believed.items()))
    taken = {state.default, best, *(entry.tunables for entry in fresh)}
    again = [
        state.entry(plan)
        for plan, (mean, deviation) in believed.items()
        if plan not in taken
        and len(state.entry(plan).log_ratios) < DECIDED
        and mean - math.hypot(deviation, doubt) < ahead
    ]
    surprising = [entry for entry in beliefs.surprising() if entry.tunables not in taken]
    again = list(dict.fromkeys([*surprising, *again]))
    kept = [*_front(state, believed), *_alone(state)]
    lean = [e for e in dict.fromkeys(kept) if e.tunables not in taken and e not in again[:CONTENDERS]]
    wanted = [*again[:CONTENDERS], *lean[:CONTENDERS]]
    first = state.entry(best)
    if best == state.default or (not fresh and not wanted and len(first.log_ratios) >= DECIDED):
        return wanted
    return [first, *wanted] if first not in fresh else wanted


def _alone(state: CellState) -> list[Entry]:
    """Return the fastest plan of each kernel that is used alone, where it was timed once: a profile tells of it."""
    best: dict[str, Entry] = {}
    for entry in sorted(state.timed(), key=state.median):
        if len(entry.tunables.kernels) == 1 and state.may_be_chosen(entry):
            best.setdefault(min(entry.tunables.kernels), entry)
    return [entry for entry in best.values() if len(entry.log_ratios) < 2]


def _front(state: CellState, plans: Iterable[Tunables]) -> list[Entry]:
    """Return plans that need less memory than everything faster and were hardly timed."""
    found: list[Entry] = []
    least = math.inf
    for entry in sorted(map(state.entry, plans), key=state.median):
        assert entry.checked is not None
        if entry.checked.peak_bytes < 0.95 * least:
            least = entry.checked.peak_bytes
            if 0 < len(entry.log_ratios) < LEAN_BLOCKS:
                found.append(entry)
    return found
