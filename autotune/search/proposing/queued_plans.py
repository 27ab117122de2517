"""Plans that are enqueued beside the sampler's: what is tried first, and what is made of the best at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.search.cell import CellState
from autotune.search.transfer import parts_of
from autotune.space.space import Space, distance
from ringattn.planning.preference import TIE
from ringattn.workload import Tunables

from .beliefs import Beliefs

HINTS = 3  # best plans of a neighbouring length that are tried first
LEAN_KNOBS = ("checkpoint", "window_tokens")  # their turns of the best plan give a front of time and memory


def first_plans(space: Space, state: CellState, preferred: Sequence[Tunables]) -> list[Tunables]:
    """The winners nearby, then every kernel in one direction, then alone; other dtypes with the default's kernels.

    A plan with one new kernel says which it was that hung.
    """
    default = state.default
    own = parts_of(default)
    plans = [plan for plan in space.kernel_plans if plan != default]
    one_new = [p for p in plans if p.dtype == default.dtype and len(parts_of(p) - own) <= 1]
    alone = [p for p in plans if p.dtype == default.dtype and len(p.kernels) == 1 and p not in one_new]
    others = [replace(default, dtype=dtype) for dtype in dict.fromkeys(p.dtype for p in plans)]
    others = [plan for plan in others if plan.dtype != default.dtype and plan in plans]
    hints = state.transfer.hints(space, HINTS)
    # A kernel that is slow on rows in place may be the fastest on copies.
    gathers = {name: "copy" for name, values in space.knobs.items() if name.startswith("gather.") and len(values) > 1}
    copied = [space.combine(plan, gathers) for plan in [default, *alone, *one_new] if len(plan.kernels) == 1]
    first = [*preferred, *hints, *one_new, *others, *alone, *(plan for plan in copied if plan is not None)]
    if not state.keeps_limits(state.entry(default)):
        first += plans  # whatever keeps the limits is wanted
    return [plan for plan in dict.fromkeys(first) if not state.knows(plan)]


def lean_plans(space: Space, state: CellState, beliefs: Beliefs) -> list[Tunables]:
    """The turns of the best plan that may need less memory: a front of time and memory is wanted, too."""
    best = replace(beliefs.best(), compile=False)
    moves = [m.tunables for m in space.neighbours(best) if m.knob in LEAN_KNOBS]
    return [plan for plan in moves if not state.knows(plan) and space.valid(plan)]


def compiled_plans(space: Space, state: CellState, beliefs: Beliefs) -> list[Tunables]:
    """The best plan compiled, once: it costs seconds a plan."""
    compiled = replace(beliefs.best(), compile=True)
    tried = any(plan.compile for plan in state.entries)
    wanted = state.settings.preset.compile_finalists and not tried and space.valid(compiled)
    return [compiled] if wanted else []


def plainer_plans(space: Space, state: CellState, beliefs: Beliefs) -> list[Tunables]:
    """The best plan without what does nothing: two probes must not end in two plans that differ in frills."""
    believed = beliefs.believed()
    ahead = beliefs.best_value()
    equal = [plan for plan, (mean, _) in believed.items() if mean <= ahead + TIE]
    if not equal:
        return []
    plainest = min(equal, key=lambda plan: distance(state.workload, plan, state.default))
    plain = beliefs.plainer(plainest)
    return [plain] if plain is not None and not state.knows(plain) else []
