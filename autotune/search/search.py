"""The search for one cell: race the kernels, improve what survives, explore where it is worth it, and re-time.

It sees a Space, an Evaluator, a Store and a Clock; whether a machine or a table stands behind them is none of its
business. Everything random is drawn from the seed, the cell, the stage and the block, so that a resumed probe
goes on as it would have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune.measure.evaluator import Fault, Sample
from ringattn.workload import Tunables

from .arena import DefaultBroken
from .budget import CellNeed, Deadline
from .cell import CellContext, CellResult
from .choose import distance
from .climb import DECIDED, HOUSEKEEPING, LEAN_KNOBS, RIVALS, climb
from .final import FINALISTS, final, reserve_s
from .nearby import Nearby
from .race import SURE_BLOCKS
from .stages import explore, race_plans

# A forward and a backward kernel together take about what each adds alone, so most pairs need no look: in a race
# those near to the best by their parts, which a climb can still leave; more where everything else is decided.
RACE_REACH, BRUTE_REACH = 1.25, 1.6
PAIRS_TRIED = 0.35  # of the plans with two changes or more, on two H100s, a race of kernels checked
LARGE = 5000  # spellings from which a space is explored by the sampler: the climb has seen through smaller ones
FINAL_SHARE = 0.6  # of what is left, at most, is kept for the final and its proof
RACE_SHARE = 0.5  # of the time for searching that stage 1 may take
DEFAULT_PATIENCE = 4.0  # times what another plan is given to answer: a cell without its default is lost


class CellSearch:
    """One cell from its default plan to its result, in two steps: ``settle``, then ``run``."""

    def __init__(self, context: CellContext) -> None:
        self.context = context

    # --- the default --------------------------------------------------------------------------------------------

    def settle(self, deadline: Deadline) -> Fault | None:
        """Find the plan everything is paired against: the heuristic's, or math where that fails its check.

        A Fault says that nothing could be run, or that no time was left.
        """
        context = self.context
        context.listener.stage(context.cell, "default")
        nothing = Fault("error", "there is no plan to try")
        fault = context.ledger.failures().get(context.space.default, nothing)  # where it failed since it was settled
        record = context.record("default", {})
        for plan in self._default_candidates():
            patience_s = min(DEFAULT_PATIENCE * context.timeout_s(), max(context.timeout_s(), deadline.remaining_s()))
            arena = context.arena("default", record, plan, timeout_s=patience_s)
            entries = arena.admit([plan], deadline)
            if entries:
                arena.record.complete(entries[0], 0.0, context.settings.limits.constraints(context.checked(plan)))
                if plan != context.space.default:
                    context.note = f"the default failed ({fault.kind}: {fault.message}); compared with math"
                    context.compared_with = " against math"
                context.default = plan
                return None
            known = context.ledger.failures().get(plan)
            if known is None:
                return Fault("timeout", "no time was left to check its default")
            fault = known
            if fault.from_outside:  # no verdict on the plan: math would be far worse
                return fault
        return fault

    def _default_candidates(self) -> Iterable[Tunables]:
        context = self.context
        plain = [
            plan
            for plan in context.space.kernel_plans
            if context.is_main(plan) and all({b.forward, b.backward} <= {"math", ""} for b in plan.branches)
        ]
        yield from (plan for plan in dict.fromkeys([context.space.default, *plain]) if not context.has_failed(plan))

    def look_again(self) -> None:
        """Time a call of the default once more: its check ran beside something that is over now.

        While others compiled, a default of 110 ms looked like one of 316: its cell got three times its time, and every
        plan seemed near enough to be tried. A call that fails now is left to the first block.
        """
        context = self.context
        checked = context.checked(context.default)
        (result,) = context.evaluator.block(context.cell, [context.default], timeout_s=context.timeout_s()).results
        if isinstance(result, Sample):
            context.ledger.checked[context.default] = replace(checked, call_ms=result.ms, host_us=result.host_us)

    # --- the whole ----------------------------------------------------------------------------------------------

    def need(self) -> CellNeed:
        """What the cell would take; the default's warm call is the yardstick, and most other kernels are slower."""
        context, preset = self.context, self.context.preset
        sample_s = context.sample_s()
        check_s = 0.05 + 5 * context.waited_s()
        plans = context.space.all_plans(preset.brute_force_plans)
        raced = context.space.kernel_plans if plans is None else plans
        likely = self._within_reach(raced)
        base = likely * (check_s + 2 * sample_s) + SURE_BLOCKS * FINALISTS * sample_s
        # What most cells do without, and no cell should miss where there is time.
        more_s = (len(raced) - likely) * (check_s + 2 * sample_s) + preset.race_blocks * FINALISTS * sample_s
        if plans is not None:
            return CellNeed(base + reserve_s(context), 0.0, more_s)
        turns, promising = sum(len(values) - 1 for values in context.space.knobs.values()), self._promising_turns()
        # A climb ends by itself once nothing is promised any more; until then each knob is turned some twice.
        turn_s = 2 * (check_s + 2 * sample_s)
        improve_s = promising * turn_s + DECIDED * (1 + RIVALS) * sample_s
        more_s += max(0, turns - promising) * turn_s + preset.explore_plans * (check_s + 3 * sample_s)
        return CellNeed(base + reserve_s(context), improve_s, more_s)

    def _within_reach(self, plans: Sequence[Tunables]) -> float:
        """About how many of these will be checked: most with two changes are far off by what each alone costs."""
        context = self.context
        changed = [distance(context.cell, plan, context.default) for plan in plans]
        pairs = sum(changes > 1 for changes in changed)
        return len(changed) - (1 - PAIRS_TRIED) * pairs

    def _promising_turns(self) -> int:
        """How many turns of a knob may make a plan faster: of a dense one's kernels the race has seen all pairs."""
        context = self.context
        seen = {*HOUSEKEEPING, *LEAN_KNOBS, "dtype"}
        if context.cell.pattern.dense:
            seen |= {"forward.0", "backward.0"}
        return 1 + sum(len(values) - 1 for name, values in context.space.knobs.items() if name not in seen)

    def least_s(self) -> float:
        """Seconds under which there is no answer: the default twice beside the rest, in two blocks."""
        return 2 * (FINALISTS + 1) * self.context.sample_s()

    def run(self, deadline: Deadline, *, seeds: Sequence[Tunables] = (), nearby: Nearby | None = None) -> CellResult:
        """The cell's result; never raises for what a candidate or the machine did.

        ``seeds`` are plans worth trying first: winners of neighbouring cells. ``nearby`` is what the nearest of them
        says of everything else. KeyboardInterrupt passes with the record intact.
        """
        context = self.context
        context.nearby = nearby
        context.seeds = [plan for plan in seeds if context.space.holds(plan)]
        return self._run(deadline)

    def pay(self) -> Fault | None:
        """Prove the default, which owes it; a Fault says that it may not stay."""
        self.context.owes_proof = False
        return self.context.prove(self.context.default)

    def run_without_default(self, fault: Fault, deadline: Deadline) -> CellResult:
        """The cell's result when its default failed like this after all."""
        self.context.undecided_s = 0.0  # what nobody needed then is what owed proofs are paid from now
        return self._run(deadline, fault)

    def _run(self, deadline: Deadline, fault: Fault | None = None) -> CellResult:
        """``fault`` is how the default failed already."""
        context = self.context
        context.ledger.be_patient(deadline.remaining_s())
        for attempt in range(2):
            try:
                if fault is not None and not attempt:
                    raise DefaultBroken(fault)
                return self._search(deadline)
            except DefaultBroken as broken:
                context.ledger.checked[context.default] = broken.fault
                context.forget_times()  # every ratio was against a plan that is gone
                fault = broken.fault
                if attempt or self.settle(deadline) is not None:
                    break
        assert fault is not None
        if fault.from_outside:
            return context.inconclusive(f"the default did not end in time: {fault.message}")
        return context.result("refused", f"the default fails: {fault.kind}, {fault.message}")

    def _until_final(self, deadline: Deadline) -> Deadline:
        return deadline.earlier_by(min(reserve_s(self.context, deadline), FINAL_SHARE * deadline.remaining_s()))

    def _worth_trying(self, plans: Iterable[Tunables]) -> list[Tunables]:
        context, plans = self.context, list(plans)
        left_out = context.nearby.left_out(plans, context.space.default) if context.nearby is not None else {}
        return [plan for plan in plans if plan not in left_out]

    def _search(self, deadline: Deadline) -> CellResult:
        context, preset = self.context, self.context.preset
        searching = self._until_final(deadline)
        everything = context.space.all_plans(preset.brute_force_plans)
        if everything is not None:
            wanted = self._worth_trying(everything)
            race_plans(context, "brute", wanted, keep=FINALISTS, deadline=searching, reach=BRUTE_REACH)
            return final(context, deadline)
        kernels = self._worth_trying(context.space.kernel_plans)
        plans = list(dict.fromkeys([context.default, *context.seeds, *kernels]))
        leaders = race_plans(
            context,
            "race",
            plans,
            keep=preset.survivors,
            deadline=searching.part(RACE_SHARE),
            reach=RACE_REACH,
            max_blocks=SURE_BLOCKS,  # the climb goes on timing whatever may be the best
        )
        searching = self._until_final(deadline)  # the race has shown how noisy this cell is
        climb(context, leaders[0] if leaders else context.default, searching)
        if preset.explore_plans and math.prod(map(len, context.space.knobs.values())) > LARGE:
            explore(context, searching)
        if preset.compile_finalists:
            best = context.best_plan()
            compiled = replace(best, compile=True)
            if context.space.valid(compiled):
                race_plans(context, "compile", [best, compiled], keep=2, deadline=searching, reach=BRUTE_REACH)
        return final(context, deadline)
