"""The search for one cell: ask for plans, check them, time them in a paired block, tell; then re-time and validate.

It sees a Space, an Evaluator, a Store and a Clock; whether a machine or a table stands behind them is none of its
business. Everything random is drawn from the seed, the cell and what is known, so that a resumed probe goes on as it
would have.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autotune.journal.cell_study import QUEUE, SAMPLER, CellStudy
from autotune.journal.entry import Entry
from autotune.journal.result import CellResult
from autotune.journal.store import Store
from autotune.measure.evaluator import Clock, Evaluator, Fault, Sample
from autotune.outcome import TrialOutcome
from autotune.search.deciding.choose import gain_margin
from autotune.search.deciding.contenders import contenders
from autotune.search.deciding.decision import MOST_RESERVED, Final, reserve_s
from autotune.search.proposing.beliefs import FAILED, Beliefs
from autotune.search.proposing.design import Design
from autotune.search.proposing.queued_plans import compiled_plans, first_plans, lean_plans, plainer_plans
from autotune.search.proposing.sampler import SurrogateSampler
from autotune.search.proposing.samplers import sampler_of
from autotune.space.space import Space, distance
from ringattn.workload import Tunables, Workload

from .budget import CellNeed, Deadline
from .cell import CellState, DefaultBroken
from .pruner import RacePruner
from .settings import Listener, SearchSettings
from .transfer import Transfer, parts_of, without, without_inert

BATCH = 4  # new plans in one block: it holds the default twice, whatever else is in it
DISMISSED = math.log(3.0)  # a plan whose check already took so many times the best's is not timed at all
FAR_BEHIND = math.log(1.5)  # a queued plan of which the surrogate is sure that it is so far behind is not tried
LEAN_AT, PLAINER_AT = 0.6, 0.85  # of a cell's time, what it adds beside the sampler's plans
EARLY_SHARE = 0.2  # of the time that is left a validation in the midst of the search may take
# Times what another plan is given to answer: it is first to load and compile, and the heuristic's choice. With 4, one
# that hung took 68 of a standard probe's 170 s.
DEFAULT_PATIENCE = 2.0
ASKS = 8  # of a foreign sampler for each plan it brings; then the cell is searched through


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
    ) -> None:
        """``main_dtypes`` are the compute dtypes that may win; others compete for ``auto`` only.

        ``transfer`` is what the other cells of the probe taught. ``end`` is the probe's: a cell may run into the time
        of others, but nothing it starts goes beyond that.
        """
        self._whole_space = space = without_inert(space)
        self.cell: Workload = space.workload
        self.settings = settings
        self.listener = listener
        self.transfer = transfer if transfer is not None else Transfer()
        self.end = end if end is not None else Deadline(clock, math.inf)
        self._queue: list[Tunables] = []
        knobs = dict(space.knobs)
        if settings.preset.compile_finalists:
            knobs["compile"] = (False, True)
        study = store.study(space.workload, pruner=RacePruner(lambda: self.state.sigma()))
        self.study = CellStudy(study, space.workload, knobs, store.sync)
        seed = zlib.crc32(f"{settings.seed}|{space.workload}|{len(study.get_trials(deepcopy=False))}".encode())
        self._sampler = sampler_of(
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
        study.sampler = self._sampler
        self._stopped, self._ask_s = False, 0.0  # by the sampler; what it took to ask it last
        study.stop = self._stop  # type: ignore[method-assign]  # Optuna's is for ``optimize`` alone
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
        self.state.recall(self.study.recalled.values(), self.study.blocks)
        self.beliefs = Beliefs(self.state, lambda: self.space, space)
        default = self.study.noted("default")
        if default is not None:
            self.state.default = self.study.parameters.plan(default)

    def _stop(self) -> None:
        """Ask the sampler for no more plans."""
        self._stopped = True

    @property
    def space(self) -> Space:
        """Return the plans worth trying: without kernels that were given up, or were hopeless at a length nearby."""
        parts = self.transfer.traps.lost.keys() | self.transfer.hopeless(self._whole_space)
        condemned = self.state.validations.condemned() | self.state.checks.condemned()
        key = frozenset(parts | {part for part in condemned if part[0] in ("forward", "backward")})
        if key != self._space_key or self._space_now is None:
            self._space_key, self._space_now = key, without(self._whole_space, key)
        return self._space_now

    _space_key: frozenset[tuple[str, str]] = frozenset()
    _space_now: Space | None = None

    # --- the default ------------------------------------------------------------------------------------------------

    def settle(self, deadline: Deadline) -> Fault | None:
        """Find the plan everything is paired against: the heuristic's, or where that fails any other that is right.

        A kernel that hung in another cell is not waited for again. A default that hangs is given up as soon as another
        plan answers, which says that the machine does. A Fault says that nothing could be run, that no time was left,
        or that another process ended the default's worker, which is no verdict on it.
        """
        self.listener.stage(self.cell, "default")
        state, own = self.state, self._whole_space.default
        fault: Fault | None = None  # of the first that failed
        for plan in self._stand_ins():
            entry = state.entry(plan)
            state.deadline = deadline
            if not entry.is_known and not deadline.allows(state.sample_s()):
                return Fault("timeout", "no time was left to check its default")
            timeout_s = state.timeout_s()
            if plan == own:
                timeout_s = min(DEFAULT_PATIENCE * timeout_s, max(timeout_s, deadline.remaining_s()))
            if entry.failure is None and state.check(entry, timeout_s):
                self._stand_in(plan)
                return None
            assert entry.failure is not None
            fault = fault or entry.failure
            if entry.failure.ended_from_outside and plan == own:
                return entry.failure
        return fault

    def _stand_in(self, plan: Tunables) -> None:
        """Pair with ``plan`` from now on, and say why where that is not the default."""
        own = self._whole_space.default
        if plan != own:
            known = self.state.entry(own).failure
            lost = (why for part, why in sorted(self.transfer.traps.lost.items()) if part in parts_of(own))
            why = f"the default failed ({known.kind}: {known.message})" if known else f"the default's {'; '.join(lost)}"
            self.state.note = f"{why}; compared with another plan"
        if plan != self.state.default:
            self.state.replace_default(plan)
            self.study.note("default", self.study.parameters.of(plan))

    def _stand_ins(self) -> Iterable[Tunables]:
        """The default, then those most unlike it: kernels first that it does not have, math after all others.

        Of those the nearest first; math is right everywhere, and many times slower than what would be paired with it.
        Without kernels that were given up; where all were, the default.
        """
        space, own = self._whole_space, self._whole_space.default
        mains = [plan for plan in space.kernel_plans if self.state.is_main(plan) and plan != own]

        def order(plan: Tunables) -> tuple[bool, int, int]:
            return "math" in plan.kernels, len(parts_of(plan) & parts_of(own)), distance(self.cell, plan, own)

        some = False
        for plan in (self.state.default, *sorted(mains, key=order)):
            if self.state.knows(plan) or not self.state.is_trap(plan):
                some = True
                yield plan
        if not some:
            yield own

    def look_again(self) -> None:
        """Time a call of the default once more: its check ran beside something that is over now.

        While others compiled, a default of 110 ms looked like one of 316: its cell got three times its time, and every
        plan seemed near enough to be tried. A call that fails now is left to the first block.
        """
        state = self.state
        entry = state.entry(state.default)
        assert entry.checked is not None
        (result,) = state.evaluator.block(self.cell, [state.default], timeout_s=state.timeout_s()).results
        if isinstance(result, Sample):
            entry.checked = replace(entry.checked, call_ms=result.ms, host_us=result.host_us)

    # --- time -------------------------------------------------------------------------------------------------------

    def need(self) -> CellNeed:
        """Estimate what the cell would take; the default's warm call is the yardstick, most kernels are slower.

        The surrogate needs about two plans for each value of a knob; what more buys less and less.
        """
        values = sum(len(values) - 1 for values in self._whole_space.knobs.values())
        plan_s = self._check_s() + self.state.block_s([self.state.default])
        base_s = self._first_plans() * plan_s + reserve_s(self.state)
        return CellNeed(base_s, values * plan_s, 2 * values * plan_s)

    def _first_plans(self) -> int:
        return 4 + sum(len(parts_of(p) - parts_of(self.state.default)) <= 1 for p in self._whole_space.kernel_plans)

    def _check_s(self) -> float:
        return 0.05 + 5 * self.state.waited_s()

    def least_s(self) -> float:
        """Seconds under which there is no answer: the default twice beside a few others, in two blocks."""
        return 2 * 5 * self.state.sample_s()

    # --- the whole --------------------------------------------------------------------------------------------------

    def recalled(self) -> CellResult | None:
        """The result that an earlier run came to."""
        document = self.study.noted("result")
        if document is None:
            return None
        return CellResult.of(self.cell, document, self.study.plan_of, self.state.failures())

    def run(self, deadline: Deadline, *, seeds: Sequence[Tunables] = ()) -> CellResult:
        """The cell's result; never raises for what a candidate or the machine did.

        ``seeds`` are plans worth trying first: winners of neighbouring cells. KeyboardInterrupt passes with the record
        intact.
        """
        done = self.recalled()
        if done is not None:
            return done
        self.state.seeds = [plan for plan in dict.fromkeys(seeds) if self.space.holds(plan)]
        return self._keep(self._run(deadline))

    def _end_trials(self) -> None:
        for entry in list(self.state.entries.values()):
            if entry.open:
                self.leave(entry, "stood to the end")

    def _keep(self, result: CellResult) -> CellResult:
        self._end_trials()
        result.validation_pending = self.state.owes_validation
        self.study.note("result", result.plain(self.study.number_of))
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
        return Final(self.state, self.beliefs, self.study, self.space, deadline)

    def final(self, deadline: Deadline) -> CellResult:
        """Re-time, choose and validate."""
        self.listener.stage(self.cell, "final")
        return self._final(deadline).run()

    def inconclusive(self, why: str) -> CellResult:
        """A result without a search: the default stays, unmeasured."""
        self._end_trials()
        return self._final(self.end).inconclusive(why)

    def refused(self, why: str) -> CellResult:
        """A result without a plan."""
        return self._final(self.end).result("refused", why)

    def validate_default(self) -> Fault | None:
        """Validate the default, which it stayed without; a Fault says that it may not."""
        self.state.owes_validation = False
        fault = self.state.validate(self.state.default)
        self._end_trials()
        document = self.study.noted("result")
        if fault is None and document is not None:
            self.study.note("result", {**document, "validation_pending": False})
        return fault

    def run_without_default(self, deadline: Deadline) -> CellResult:
        """The cell's result when its default failed its validation after all; another right plan stands in for it."""
        self.state.undecided_s = 0.0
        self.state.deadline = deadline
        return self._keep(self.final(deadline))

    # --- the loop ---------------------------------------------------------------------------------------------------

    def _search(self, deadline: Deadline) -> None:
        self.listener.stage(self.cell, "search")
        self._queue = first_plans(self.space, self.state, self.state.seeds)
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
                self._queue += lean_plans(self.space, self.state, self.beliefs)
            elif elapsed > PLAINER_AT and not self._queue:
                self._queue += plainer_plans(self.space, self.state, self.beliefs)
            before = len(self.state.entries)
            fresh = disturbed or self._ask(searching)
            wanted = [e for e in (*contenders(self.state, self.beliefs, fresh), *fresh) if e.failure is None]
            if not wanted and len(self.state.entries) == before:
                now = self.space, self.state, self.beliefs
                more = [plan for plan in (*lean_plans(*now), *plainer_plans(*now)) if plan not in offered]
                if not more:
                    more = compiled_plans(*now)
                if not more:
                    return
                offered.update(more)
                self._queue = more
            elif wanted and not searching.allows(self.state.block_s(entry.tunables for entry in wanted)):
                return
            elif wanted and self.state.block(wanted):
                disturbed = []
                self._drop(wanted)
                self._validate_early(searching)
            else:
                disturbed = fresh  # what was checked is timed, also where its block was thrown away

    def _ask(self, deadline: Deadline) -> list[Entry]:
        """Up to BATCH new plans that may be timed."""
        fresh: list[Entry] = []
        before = len(self.state.entries)
        while (asked := len(self.state.entries) - before) < BATCH and deadline.allows(self._check_s()):
            if self._queue:
                plan = self._queue.pop(0)
                if self.state.knows(plan) or self.state.is_trap(plan) or self._is_far_behind(plan):
                    continue
                entry = self.state.entry(plan)
                self.study.open(entry, QUEUE)
            else:
                found = self._ask_sampler(BATCH - asked, deadline)
                if found is None:
                    break
                entry = found
            if self.state.check(entry) and self._may_be_timed(entry):
                fresh.append(entry)
        self.state.measured += 1
        return fresh

    def _ask_sampler(self, count: int, deadline: Deadline) -> Entry | None:
        """The entry of a plan nobody tried; None where the sampler brings no more, or took the time for it."""
        if isinstance(self._sampler, SurrogateSampler):
            if not self._sampler.ahead and not self._sampler.look_ahead(count):
                return None
            entry = self.state.entry(self.study.propose(self._sampler))
            self.study.open(entry, SAMPLER)
            return entry
        for _ in range(ASKS * BATCH):
            if self._stopped or not deadline.allows(self._ask_s + self._check_s()):
                return None
            began_s = deadline.clock.now()
            trial, plan = self.study.ask()
            self._ask_s = deadline.clock.now() - began_s
            reasons = self.space.machine.reasons(self.cell, plan)
            if reasons or self.state.is_trap(plan):
                self.study.reject(trial, "; ".join(reasons) or "a kernel of it was given up")
            elif self.state.knows(plan):
                known = self.state.entry(plan)
                value = self._value(known)
                self.study.repeat(trial, FAILED if value is None else value, paired=self._is_paired(known))
            else:
                entry = self.state.entry(plan)
                self.study.adopt(trial, entry)
                return entry
        return None

    def _is_far_behind(self, plan: Tunables) -> bool:
        """Return whether a queued plan is surely far behind the best, by the surrogate; copies are another question."""
        if any(
            branch.gather != own.gather for branch, own in zip(plan.branches, self.state.default.branches, strict=True)
        ):
            return False
        if len(self.state.entries) < 2 * BATCH or plan in self.state.seeds:
            return False
        surrogate = self.beliefs.surrogate()
        mean, deviation = surrogate.predict(self.beliefs.coder.row(plan)[None])
        return float(mean[0] - 2 * deviation[0]) > self.beliefs.best_value() + FAR_BEHIND

    def _may_be_timed(self, entry: Entry) -> bool:
        """Return whether it keeps the limits and its check was not far slower than the best's; else it is told so."""
        look = self.state.first_look(entry)
        if not self.state.keeps_limits(entry):
            self.leave(entry, "breaks a limit, not timed in pairs")
        elif look is not None and look > self._best_look(entry) + DISMISSED:
            self.leave(entry, "far slower at its first look, not timed in pairs")
        else:
            return True
        return False

    def _best_look(self, entry: Entry) -> float:
        looks = [
            look
            for other in self.state.entries.values()
            if other is not entry and self.state.may_be_chosen(other) and (look := self.state.first_look(other))
        ]
        return min(looks, default=0.0)

    def _value(self, entry: Entry) -> float | None:
        """Return the median log-ratio of a plan, before its first block that of its check; None without either."""
        value = self.state.median(entry)
        return value if math.isfinite(value) else self.state.first_look(entry)

    def _is_paired(self, entry: Entry) -> bool:
        return entry.tunables == self.state.default or (bool(entry.log_ratios) and entry.fault is None)

    def leave(self, entry: Entry, reason: str) -> None:
        """Tell what an open entry came to: its median, or what its check said."""
        state = self.state
        if entry.fault is not None:
            return
        value = 0.0 if entry.tunables == state.default and not entry.log_ratios else self._value(entry)
        if value is None:
            self.study.abandon(entry, reason)
            return
        checked = entry.checked
        assert checked is not None
        constraints = self.settings.limits.constraints(checked)
        told_before = entry.told
        over = next((name for name, value in constraints.items() if value > 0), None)
        self.study.complete(entry, value, constraints, reason, paired=over is not None or self._is_paired(entry))
        if told_before:  # these are further readings of it
            return
        state.tell(
            entry,
            TrialOutcome(
                "over-memory" if over == "memory" else "over-error" if over == "error" else "ok",
                "search",
                median_ms=state.median_ms(entry) if entry.log_ratios else checked.call_ms,
                default_ratio=math.exp(value),
                error=checked.error,
                peak_bytes=checked.peak_bytes,
                message=reason,
            ),
        )

    def _drop(self, entries: Iterable[Entry]) -> None:
        for entry in entries:
            if entry.open and entry.tunables != self.state.default and self.study.should_prune(entry):
                self.leave(entry, "surely behind the best")

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
