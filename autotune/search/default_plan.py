"""The plan that everything in a cell is paired against: the default, or what stands in for one that fails."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from autotune.journal.study.cell_study import DEFAULT, CellStudy
from autotune.measure.evaluator import Fault, Sample
from autotune.space.space import Space, distance
from ringattn.workload import Tunables

from .budget import Deadline
from .cell import CellState
from .transfer import parts_of

# Times what another plan is given to answer: it is first to load and compile, and the heuristic's choice. With 4, one
# that hung took 68 of a standard probe's 170 s.
DEFAULT_PATIENCE = 2.0


def settle(state: CellState, study: CellStudy, space: Space, deadline: Deadline) -> Fault | None:
    """Find the plan everything is paired against: the heuristic's, or where that fails any other that is right.

    A kernel that hung in another cell is not waited for again. A default that hangs is given up as soon as another
    plan answers, which says that the machine does. A Fault says that nothing could be run, that no time was left, or
    that another process ended the default's worker, which is no verdict on it.
    """
    fault: Fault | None = None  # of the first that failed
    for plan in _stand_ins(state, space):
        entry = state.entry(plan)
        state.deadline = deadline
        if not entry.is_known and not deadline.allows(state.sample_s()):
            return Fault("timeout", "no time was left to check its default")
        timeout_s = state.timeout_s(plan)
        if plan == space.default:
            timeout_s = min(DEFAULT_PATIENCE * timeout_s, max(timeout_s, deadline.remaining_s()))
        if entry.failure is None and state.check(entry, timeout_s):
            _pair_with(state, study, space.default, plan)
            return None
        assert entry.failure is not None
        fault = fault or entry.failure
        if entry.failure.ended_from_outside and plan == space.default:
            return entry.failure
    return fault


def _pair_with(state: CellState, study: CellStudy, default: Tunables, plan: Tunables) -> None:
    """Pair with ``plan`` from now on, and say why where that is not the default."""
    if plan != default:
        known = state.entry(default).failure
        lost = (why for part, why in sorted(state.transfer.traps.lost.items()) if part in parts_of(default))
        why = f"the default failed ({known.kind}: {known.message})" if known else f"the default's {'; '.join(lost)}"
        state.note = f"{why}; compared with another plan"
    if plan != state.default:
        state.replace_default(plan)
        study.note(DEFAULT, study.parameters.of(plan))


def _stand_ins(state: CellState, space: Space) -> Iterable[Tunables]:
    """Yield the default, then those most unlike it: kernels first that it does not have, math after all others.

    Of those the nearest first; math is right everywhere, and many times slower than what would be paired with it.
    Without kernels that were given up; where all were, the default.
    """
    default = space.default
    mains = [plan for plan in space.kernel_plans if state.is_main(plan) and plan != default]

    def order(plan: Tunables) -> tuple[bool, int, int]:
        shared = len(parts_of(plan) & parts_of(default))
        return "math" in plan.kernels, shared, distance(state.workload, plan, default)

    some = False
    for plan in (state.default, *sorted(mains, key=order)):
        if state.knows(plan) or not state.is_trap(plan):
            some = True
            yield plan
    if not some:
        yield default


def look_again(state: CellState) -> None:
    """Time a call of the default once more: its check ran beside something that is over now.

    While others compiled, a default of 110 ms looked like one of 316: its cell got three times its time, and every
    plan seemed near enough to be tried. A call that fails now is left to the first block.
    """
    entry = state.entry(state.default)
    assert entry.checked is not None
    (result,) = state.evaluator.block(state.workload, [state.default], timeout_s=state.timeout_s()).results
    if isinstance(result, Sample):
        entry.checked = replace(entry.checked, call_ms=result.ms, host_us=result.host_us)
