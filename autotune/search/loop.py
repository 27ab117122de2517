"""The search for one cell: ask for plans, check them, time them in a paired block, tell; then re-time and validate.

It sees a Space, an Evaluator, a Store and a Clock; whether a machine or a table stands behind them is none of its
business. Everything random is drawn from the seed, the cell and what is known, so that a resumed probe goes on as it
would have.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune.journal.store import Store
from autotune.journal.study.cell_study import RESULT, CellStudy
from autotune.journal.study.entry import Entry
from autotune.journal.study.result import CellResult
from autotune.measure.evaluator import Clock, Evaluator, Fault
from autotune.search.deciding.choose import gain_margin
from autotune.search.deciding.contenders import contenders
from autotune.search.deciding.decision import Final
from autotune.search.deciding.reserve import MOST_RESERVED, reserve_s
from autotune.search.proposing.beliefs import Beliefs
from autotune.search.proposing.design import Design
from autotune.search.proposing.proposals import Proposals
from autotune.search.proposing.queued_plans import (
    compiled_plans,
    first_plans,
    graph_of_default,
    graph_plans,
    lean_plans,
    plainer_plans,
    torch_plan,
)
from autotune.search.proposing.sampler import SurrogateSampler
from autotune.search.proposing.samplers import sampler_of
from autotune.search.proposing.surrogate import Coder
from autotune.space.space import Space, Value
from ringattn.profile.plain_data import to_plain
from ringattn.tunable_rules import LAUNCHES
from ringattn.workload import Tunables, Workload

from .budget import CellNeed, Deadline
from .cell import CellState, DefaultBroken
from .default_plan import look_again, settle
from .pruner import RacePruner
from .settings import Listener, SearchSettings
from .transfer import Transfer, parts_of, without, without_inert
from .trials import Trials

LEAN_AT, PLAINER_AT = 0.6, 0.85  # of a cell's time, what it adds beside the sampler's plans
EARLY_SHARE = 0.2  # of the time that is left a validation in the midst of the search may take


class CellSearch:
    """One cell from its default plan to its result, in two steps: ``settle``, then ``run``."""

    def __init__(
        self,
        space: Space,
        evaluator: Evaluator,
        store: Store,
        settings: SearchSettings,
        listener: Listener,
        clock: Clock,
        *,
        main_dtypes: Sequence[str],
        transfer: Transfer | None = None,
        end: Deadline | None = None,
        standing: Sequence[Tunables] = (),
    ) -> None:
        """``main_dtypes`` are the compute dtypes that may win; others compete for ``auto`` only.

        ``transfer`` is what the other cells of the probe taught. ``end`` is the probe's: a cell may run into the time
        of others, but nothing it starts goes beyond that. ``standing`` is what served the cell before: it is tried
        first, and timed to the end.
        """
        space = without_inert(space)
        self.cell: Workload = space.workload
        self.settings = settings
        self.listener = listener
        self.transfer = transfer if transfer is not None else Transfer()
        self.end = end if end is not None else Deadline(clock, math.inf)
        own: dict[str, tuple[Value, ...]] = {}  # knobs that the loop turns itself
        if settings.preset.compile_finalists:
            own["compile"] = (False, True)
        if settings.graphs:
            own["launch"] = LAUNCHES
        self._unasked: set[tuple[str, Value]] = {
            (name, value) for name, values in own.items() for value in values if value not in space.knobs[name]
        }
        self._whole_space = space = replace(space, knobs={**space.knobs, **own})
        study = store.study(space.workload, pruner=RacePruner(lambda: self.state.sigma()))
        self.study = CellStudy(study, space.workload, space.knobs, store.sync)
        seed = zlib.crc32(f"{settings.seed}|{space.workload}|{len(study.get_trials(deepcopy=False))}".encode())
        sampler = sampler_of(
            settings.sampler,
            seed,
            self.study.parameters.distributions,
            lambda: SurrogateSampler(
                lambda: self.beliefs.known(),
                self.study.parameters.of,
                self.study.parameters.distributions,
                Design(space),
                seed,
            ),
        )
        self.state = CellState(
            space.workload,
            space.default,
            evaluator,
            settings,
            lambda plan, outcome: listener.trial(space.workload, plan, outcome),
            self.end,
            record=self.study,
            main_dtypes=main_dtypes,
            transfer=self.transfer,
        )
        self.state.standing = [plan for plan in dict.fromkeys(standing) if space.holds(plan)]
        default = self.study.noted_default() or space.default
        self.state.recall(self.study.recalled.values(), self.study.blocks, default, self.study.noted_under_load())
        self.beliefs = Beliefs(self.state, Coder(space.workload, space.knobs), lambda: self.space)
        self.trials = Trials(self.state, self.study)
        self.proposals = Proposals(self.trials, lambda: self.space, sampler)

    @property
    def space(self) -> Space:
        """Return the plans worth trying: without kernels that were given up, or were hopeless at a length nearby."""
        parts = self.transfer.traps.lost.keys() | self.transfer.hopeless(self._whole_space)
        condemned = self.state.validations.condemned() | self.state.checks.condemned()
        parts |= {part for part in condemned if part[0] in ("forward", "backward")}
        key = frozenset(parts | self._unasked)
        if key != self._space_key or self._space_now is None:
            self._space_key, self._space_now = key, without(self._whole_space, key)
        return self._space_now

    _space_key: frozenset[tuple[str, Value]] = frozenset()
    _space_now: Space | None = None

    # --- the default ------------------------------------------------------------------------------------------------

    def settle(self, deadline: Deadline) -> Fault | None:
        """Find the plan everything is paired against, see ``default_plan.settle``."""
        self.listener.stage(self.cell, "default")
        return settle(self.state, self.study, self._whole_space, deadline)

    def look_again(self) -> None:
        """Time a call of the default once more, see ``default_plan.look_again``."""
        look_again(self.state)

    # --- time -------------------------------------------------------------------------------------------------------

    def need(self) -> CellNeed:
        """Estimate what the cell would take; the default's warm call is the yardstick, most kernels are slower.

        The surrogate needs about two plans for each value of a knob; what more buys less and less.
        """
        values = sum(len(values) - 1 for values in self._whole_space.knobs.values()) - len(self._unasked)
        plan_s = self.proposals.check_s() + self.state.block_s([self.state.default])
        base_s = self._first_plans() * plan_s + reserve_s(self.state)
        return CellNeed(base_s, values * plan_s, 2 * values * plan_s)

    def _first_plans(self) -> int:
        return 4 + sum(len(parts_of(p) - parts_of(self.state.default)) <= 1 for p in self._whole_space.kernel_plans)

    def least_s(self) -> float:
        """Return seconds under which there is no answer: the default twice beside a few others, in two blocks."""
        return 2 * 5 * self.state.sample_s()

    # --- the whole --------------------------------------------------------------------------------------------------

    def recalled(self) -> CellResult | None:
        """Return the result that an earlier run came to."""
        record = self.study.noted_result()
        if record is None:
            return None
        return CellResult.of(self.cell, record, self.study.plan_of, self.state.failures())

    def run(self, deadline: Deadline, *, seeds: Sequence[Tunables] = ()) -> CellResult:
        """Return the cell's result; never raises for what a candidate or the machine did.

        ``seeds`` are plans worth trying first: winners of neighbouring cells. KeyboardInterrupt passes with the record
        intact.
        """
        done = self.recalled()
        if done is not None:
            return done
        self.state.seeds = [plan for plan in dict.fromkeys(seeds) if self.space.holds(plan)]
        return self._keep(self._run(deadline))

    def with_leanest(self, result: CellResult, deadline: Deadline) -> CellResult | None:
        """Return the cell's ``result`` with a leaner plan than it has; None without one, or without a measurement."""
        if result.state not in ("tuned", "default"):
            return None
        self.state.deadline = deadline
        try:
            leaner = self._final(deadline).with_leanest(result)
        except DefaultBroken:  # its times stand, and no plan can be paired with it now
            return None
        return None if leaner is None else self._keep(leaner)

    def _keep(self, result: CellResult) -> CellResult:
        self.trials.end_all()
        result.validation_pending = self.state.owes_validation
        self.study.note(RESULT, to_plain(result.record(self.study.number_of)))
        return result

    def _run(self, deadline: Deadline) -> CellResult:
        state = self.state
        state.deadline = deadline
        state.be_patient(deadline.remaining_s())
        fault: Fault | None = None
        for _ in range(2):
            try:
                self._search(deadline)
                return self.final(deadline)
            except DefaultBroken as broken:
                fault = broken.fault
                state.fail(state.entry(state.default), fault, "time")
                if fault.ended_from_outside or self.settle(deadline) is not None:
                    break
        assert fault is not None
        final = self._final(deadline)
        if fault.from_outside:
            return final.inconclusive(f"the default did not end in time: {fault.message}")
        return final.result("refused", f"the default fails: {fault.kind}, {fault.message}")

    def _final(self, deadline: Deadline) -> Final:
        self.state.torch = torch_plan(self._whole_space, self.state)  # a recalled cell has not been searched here
        return Final(self.state, self.beliefs, self.study, self.space, deadline)

    def final(self, deadline: Deadline) -> CellResult:
        """Re-time, choose and validate."""
        self.listener.stage(self.cell, "final")
        return self._final(deadline).run()

    def inconclusive(self, why: str) -> CellResult:
        """Return a result without a search: what served before stays, if it is right, or the default, unmeasured."""
        for plan in self.state.standing[:1]:
            if self.end.allows(self.proposals.check_s()):
                self.state.check(self.state.entry(plan))
        self.trials.end_all()
        return self._final(self.end).inconclusive(why)

    def refused(self, why: str) -> CellResult:
        """Return a result without a plan."""
        return self._final(self.end).result("refused", why)

    def validate_default(self) -> Fault | None:
        """Validate the default, which it stayed without; a Fault says that it may not."""
        self.state.owes_validation = False
        fault = self.state.validate(self.state.default)
        self.trials.end_all()
        record = self.study.noted_result()
        if fault is None and record is not None:
            self.study.note(RESULT, to_plain(replace(record, validation_pending=False)))
        return fault

    def run_without_default(self, deadline: Deadline) -> CellResult:
        """Return the result when the default failed its validation after all; another right plan stands in for it."""
        self.state.undecided_s = 0.0
        self.state.deadline = deadline
        return self._keep(self.final(deadline))

    def try_meanwhile(self, deadline: Deadline) -> bool:
        """Time the next of the plans to try first that need no compiler at work; return whether there was one.

        A default that fails in it is met again, and replaced, when the cell is searched.
        """
        self.state.deadline = deadline
        known = len(self.state.entries)
        ready = (plan for plan in self._enqueued() if not self.transfer.waits_for_compiler(self.cell, plan))
        self.proposals.queue = list(ready)
        fresh = self.proposals.next(deadline, sampled=False)
        if fresh and deadline.allows(self.state.block_s(entry.tunables for entry in fresh)):
            with contextlib.suppress(DefaultBroken):
                self.state.block(fresh)
        return len(self.state.entries) > known

    def _enqueued(self) -> list[Tunables]:
        """Return the plans to try first; last of them those that compile for seconds, or for the rest if they hang."""
        self.state.torch = torch_plan(self._whole_space, self.state)
        torch = [] if self.state.torch is None else [self.state.torch]
        graphs = self._graphs_of_default()
        plans = [*self.state.standing, *torch, *graphs, *first_plans(self.space, self.state, self.state.seeds)]

        def turn(plan: Tunables) -> bool:
            return plan not in self.state.standing and self.transfer.compilers.compiles_here(self.cell, plan)

        return sorted(plans, key=turn)

    def _graphs_of_default(self) -> list[Tunables]:
        """Return the default launched as a graph where that may pay: then any plan may be launched so."""
        plan = graph_of_default(self._whole_space, self.state)
        if plan is None:
            return []
        self._unasked -= {part for part in self._unasked if part[0] == "launch"}
        return [plan]

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _search(self, deadline: Deadline) -> None:
        self.listener.stage(self.cell, "search")
        self.proposals.queue = self._enqueued()
        most_s = MOST_RESERVED * deadline.remaining_s()
        began_s = deadline.remaining_s()
        lean_left = True
        offered: set[Tunables] = set()
        disturbed: list[Entry] = []
        while True:
            searching = deadline.earlier_by(min(most_s, reserve_s(self.state, deadline)))
            if searching.passed():
                return
            self.state.deadline = deadline
            elapsed = 1 - searching.remaining_s() / began_s
            if lean_left and elapsed > LEAN_AT:
                lean_left = False
                self.proposals.queue += lean_plans(self.space, self.state, self.beliefs)
                self.proposals.queue += graph_plans(self.space, self.state, self.beliefs)
            elif elapsed > PLAINER_AT and not self.proposals.queue:
                self.proposals.queue += plainer_plans(self.space, self.state, self.beliefs)
            before = len(self.state.entries)
            fresh = disturbed or self.proposals.next(searching)
            wanted = [e for e in (*contenders(self.state, self.beliefs, fresh), *fresh) if e.failure is None]
            if not wanted and len(self.state.entries) == before:
                now = self.space, self.state, self.beliefs
                wishes = (*lean_plans(*now), *graph_plans(*now), *plainer_plans(*now))
                more = [plan for plan in wishes if plan not in offered]
                if not more:
                    more = [plan for plan in compiled_plans(*now) if plan not in offered]
                if not more and self.proposals.waits_for_compiler():
                    self.transfer.compilers.wait(searching.remaining_s())
                    continue
                if not more:
                    return
                offered.update(more)
                self.proposals.queue = [*more, *self.proposals.queue]
            elif wanted and not searching.allows(self.state.block_s(entry.tunables for entry in wanted)):
                return
            elif wanted and self.state.block(wanted):
                disturbed = []
                self._drop(wanted)
                self._validate_early(searching)
            else:
                disturbed = fresh  # what was checked is timed, also where its block was thrown away

    def _drop(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.open and entry.tunables != self.state.default and self.study.should_prune(entry):
                self.trials.end(entry, "surely behind the best")

    def _validate_early(self, deadline: Deadline) -> None:
        """Validate the fastest plan where that costs little: what it fails for is then known while there is time.

        That may be one of which another's failure makes it doubtful that it passes: until it fails, too, whatever is
        like it is asked for.
        """
        state, believed = self.state, self.beliefs.believed()
        plan = min(believed, key=lambda known: believed[known][0], default=state.default)
        entry = state.entry(plan)
        mean, deviation = believed.get(plan, (0.0, 0.0))
        surely = mean + 2 * deviation < gain_margin(noisy=True) or not state.may_be_chosen(state.entry(state.default))
        known = entry.validated is not None or parts_of(plan) <= state.validations.passed
        if plan == state.default or known or not surely:
            return
        if state.validation_s(plan) <= EARLY_SHARE * deadline.remaining_s():
            state.validate(plan)
