"""Plans that are enqueued beside the sampler's: what is tried first, and what is made of the best at the end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autotune.measure.launch_overhead import is_nearly_launch_bound
from autotune.search.cell import CellState
from autotune.search.transfer import parts_of
from autotune.space.space import Space, distance
from ringattn.planning.preference import TIE
from ringattn.workload import BranchTunables, Tunables

from .beliefs import Beliefs

HINTS = 3  # best plans of a neighbouring length that are tried first
LEAN_KNOBS = ("checkpoint", "window_tokens")  # their turns of the best plan give a front of time and memory


def first_plans(space: Space, state: CellState, preferred: Sequence[Tunables]) -> list[Tunables]:
    """Return winners nearby, every kernel in one direction, then alone; other dtypes with the default's kernels.

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
    """Return the turns of the best plan that may need less memory: a front of time and memory is wanted, too."""
    best = replace(beliefs.best(), compile=False)
    moves = [m.tunables for m in space.neighbours(best) if m.knob in LEAN_KNOBS]
    return [plan for plan in moves if not state.knows(plan) and space.valid(plan)]


def torch_plan(space: Space, state: CellState) -> Tunables | None:
    """Return the plan of the kernel to which torch dispatches, where the space has it."""
    known = state.checked_default()
    if known is None or not known.torch_kernel:
        return None
    kernel, cell = known.torch_kernel, space.workload
    plan = Tunables(cell.dtype, (BranchTunables(kernel, kernel if cell.train else ""),))
    return plan if space.holds(plan) else None


def graphed(plan: Tunables) -> Tunables:
    """Return the plan launched as a CUDA graph, which keeps what checkpoint selective keeps."""
    return replace(plan, launch="graph", checkpoint="selective")


def graph_of_default(space: Space, state: CellState) -> Tunables | None:
    """Return the default launched as a graph where its host is the slower one, or nearly.

    What a graph launches is over when the device is, so that such a cell is searched by the device's time.
    """
    known, plan = state.checked_default(), graphed(state.default)
    if not state.settings.graphs or known is None or not is_nearly_launch_bound(known.call_ms, known.host_us):
        return None
    return plan if plan != state.default and space.valid(plan) else None


def graph_plans(space: Space, state: CellState, beliefs: Beliefs) -> list[Tunables]:
    """Return the best plan, and that of the device's time, launched as CUDA graphs, where the space has such plans."""
    if len(space.knobs.get("launch", ())) < 2:
        return []
    device = state.under("captured")
    timed = [entry for entry in device.timed() if device.may_be_chosen(entry)]
    fastest = min(timed, key=device.median, default=state.entry(state.default))
    plans = dict.fromkeys(graphed(plan) for plan in (fastest.tunables, beliefs.best()))
    return [plan for plan in plans if not state.knows(plan) and space.valid(plan)]


def compiled_plans(space: Space, state: CellState, beliefs: Beliefs) -> list[Tunables]:
    """Return the best plan compiled, once: it costs seconds a plan."""
    compiled = replace(beliefs.best(), compile=True)
    tried = any(plan.compile for plan in state.entries)
    wanted = state.settings.preset.compile_finalists and not tried and space.valid(compiled)
    return [compiled] if wanted else []


def plainer_plans(space: Space, state: CellState, beliefs: Beliefs) -> list[Tunables]:
    """Return the best plan without what does nothing: two probes must not end in two plans that differ in frills."""
    believed = beliefs.believed()
    ahead = beliefs.best_value()
    equal = [plan for plan, (mean, _) in believed.items() if mean <= ahead + TIE]
    if not equal:
        return []
    plainest = min(equal, key=lambda plan: distance(state.workload, plan, state.default))
    plain = beliefs.plainer(plainest)
    return [plain] if plain is not None and not state.knows(plain) else []
