"""The search for one cell: race the kernels, improve what survives, explore where it is worth it, and re-time.

It sees a Space, an Evaluator, a Store and a Deadline; whether a machine or a table stands behind them is none of
its business. Everything random is drawn from the seed, the cell, the stage and the block, so that a resumed
probe goes on as it would have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import optuna

from ringattn.workload import Tunables, Workload

from . import statistics
from .budget import CellNeed, Deadline, EffortPreset
from .choose import NOISY_SIGMA, Candidate, choose, pareto_front
from .evaluator import Checked, Evaluator, Fault
from .probe import Preference, TrialOutcome
from .race import Arena, DefaultBroken, Disturbed, Ledger, Limits, TrialListener, race
from .space import Assignment, Space, Value, candidate_key, decode, encode, from_key
from .statistics import Interval
from .store import Entry, StageRecord, Store

FINALISTS = 4  # the default among them
FRONT_KEPT = 4
PROMISING = 0.75  # chance of being faster from which a move is tried in combination
WORTH_TRYING = 0.003  # log-ratio: smaller gains are not worth a block
HOPELESS = 0.10  # chance of being faster below which a move is not timed again
BATCH = 4  # plans asked of TPE at a time; one block serves them all
MOVE_GATE = math.log(1.3)  # a single move this much slower than where it came from is dropped after one block
FINAL_PRECISION = 0.008  # half-width of the interval at which the final stops early
WIDE = 0.10  # half-width of the winner's interval from which nothing can be said

CellState = Literal["tuned", "default", "refused", "inconclusive"]


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """What holds for every cell of a probe."""

    preset: EffortPreset
    seed: int
    limits: Limits = Limits()
    prefer: Preference = "time"
    hang_s: float = 10.0  # a call is given up after this, plus many times what the default takes


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan with its numbers, ready for a profile."""

    tunables: Tunables
    checked: Checked
    gain: Interval  # of log(t / t_default)
    median_ms: float
    host_us: float


@dataclass(slots=True)
class CellResult:
    """Everything a cell came to. ``choice`` is None only for a refusal, whose reason is ``note``."""

    workload: Workload
    state: CellState
    choice: Measured | None = None
    default: Measured | None = None
    runners_up: tuple[Measured, ...] = ()
    auto: Measured | None = None
    front: tuple[Measured, ...] = ()
    failures: dict[Tunables, Fault] = field(default_factory=dict)
    rejected: tuple[tuple[str, tuple[str, ...]], ...] = ()
    trials: int = 0
    noise_sigma: float = math.inf
    note: str = ""
    disturbances: tuple[str, ...] = ()


class Listener:
    """What a search tells; the defaults tell nobody."""

    def stage(self, cell: Workload, name: str) -> None: ...

    def trial(self, cell: Workload, tunables: Tunables, outcome: TrialOutcome) -> None: ...

    def note(self, text: str) -> None: ...


def estimate_need(space: Space, default: Checked, preset: EffortPreset, check_overhead_s: float) -> CellNeed:
    """What the cell would take; the default's warm call is the yardstick, and half of the kernels are slower."""
    call_s = default.call_ms / 1e3
    sample_s = max(preset.sample_target_ms / 1e3, call_s)
    check_s = check_overhead_s + 6 * call_s
    kernels = len(space.kernel_plans)
    plans = space.all_plans(preset.brute_force_plans)
    if plans is not None:
        base = len(plans) * (check_s + 3 * sample_s) + preset.race_blocks * 4 * sample_s
        improve = 0.0
    else:
        base = kernels * (check_s + 2 * sample_s) + preset.race_blocks * (preset.survivors + 3) * sample_s
        moves = sum(len(values) - 1 for values in space.knobs.values())
        improve = preset.survivors * (moves * (check_s + 4 * sample_s) + 8 * preset.race_blocks * sample_s)
    prove = 2 * preset.ragged_lengths * (check_overhead_s + 4 * call_s)
    final = (FINALISTS + 1) * preset.final_min_blocks * sample_s
    explore = preset.explore_plans * (check_s + 3 * sample_s) if plans is None else 0.0
    return CellNeed(base + prove + final, improve, explore)


class CellSearch:
    """One cell from its default plan to its result."""

    def __init__(
        self,
        space: Space,
        evaluator: Evaluator,
        store: Store,
        settings: SearchSettings,
        deadline: Deadline,
        listener: Listener,
        *,
        main_dtypes: Sequence[str],
        seeds: Sequence[Tunables] = (),
    ) -> None:
        """``main_dtypes`` are the compute dtypes that may win; others compete for ``auto`` only.

        ``seeds`` are plans worth trying first: winners of neighbouring cells and of the nearest profile.
        """
        self.space = space
        self.cell = space.workload
        self.evaluator = evaluator
        self.store = store
        self.settings = settings
        self.preset = settings.preset
        self.deadline = deadline
        self.listener = listener
        self.main_dtypes = frozenset(main_dtypes)
        self.seeds = [plan for plan in seeds if space.valid(plan)]
        self.default = space.default
        self.ledger = Ledger()
        self.estimates: dict[Tunables, Interval] = {}  # best known log-ratio of every timed plan
        self.trials = 0
        self.note = ""

    # --- the whole ----------------------------------------------------------------------------------------------

    def run(self) -> CellResult:
        """Never raises for what a candidate or the machine did; KeyboardInterrupt passes with the record intact."""
        fault = self._settle_default()
        if fault is not None:
            return self._result("refused", note=f"no plan could be run and proven: {fault.message}")
        try:
            for attempt in range(2):
                try:
                    return self._search()
                except DefaultBroken as broken:
                    self._fail_default(broken.fault)
                    if attempt or self._settle_default() is not None:
                        return self._result("refused", note=f"the default stopped working: {broken.fault.message}")
            raise AssertionError("unreachable")
        except Disturbed as disturbed:
            return self._inconclusive(f"the machine was disturbed throughout: {disturbed}")

    def _search(self) -> CellResult:
        final_s = self._final_s()
        searching = self.deadline.earlier_by(final_s)
        plans = self.space.all_plans(self.preset.brute_force_plans)
        if plans is not None:
            self._race_stage("brute", plans, keep=FINALISTS, deadline=searching)
        else:
            leaders = self._race_stage("race", self._race_plans(), keep=self.preset.survivors, deadline=searching.part(0.5))
            for index, leader in enumerate(leaders[: self.preset.survivors]):
                if searching.passed():
                    break
                self._improve(leader, index, searching.part(1.0 / (self.preset.survivors - index + 0.5)))
            if self.preset.explore_plans and not searching.passed():
                self._explore(searching)
        return self._final()

    # --- the default --------------------------------------------------------------------------------------------

    def _timeout_s(self) -> float:
        known = self.ledger.checked.get(self.default)
        call_s = known.call_ms / 1e3 if isinstance(known, Checked) else 0.0
        return self.settings.hang_s + 40 * call_s

    def _settle_default(self) -> Fault | None:
        """Find the plan everything is paired against: the heuristic's, or plain math where that fails its gate."""
        self.listener.stage(self.cell, "default")
        fault = Fault("error", "there is no candidate")
        record = self._record("default", {})
        for plan in self._default_candidates():
            arena = self._arena("default", record, plan)
            admitted = arena.admit([plan], self.deadline.part(1.0))
            if not admitted:
                known = self.ledger.checked.get(plan)
                fault = known if isinstance(known, Fault) else Fault("timeout", "no time was left to check it")
                continue
            unproven = self._prove(plan)
            if unproven is None:
                if plan != self.default:
                    self.note = f"the default failed its own check ({fault.message}); compared with {plan.branches[0].forward}"
                self.default = plan
                return None
            fault = unproven
        return fault

    def _default_candidates(self) -> Iterable[Tunables]:
        if not self._has_failed(self.space.default):
            yield self.space.default
        plain = [p for p in self.space.kernel_plans if all(b.forward == "math" for b in p.branches)]
        yield from (p for p in plain if p != self.space.default and not self._has_failed(p))

    def _has_failed(self, plan: Tunables) -> bool:
        return isinstance(self.ledger.checked.get(plan), Fault) or self.ledger.proven.get(plan) is not None

    def _fail_default(self, fault: Fault) -> None:
        self.ledger.checked[self.default] = fault
        self.estimates.clear()  # every ratio was against a plan that is gone

    def _prove(self, plan: Tunables) -> Fault | None:
        if plan not in self.ledger.proven:
            recalled = self.store.recall(f"proven | {self.cell} | {candidate_key(plan)}")
            if recalled is None:
                fault = self.evaluator.prove(self.cell, plan, timeout_s=self._timeout_s())
                recalled = [] if fault is None else [fault.kind, fault.message]
                self.store.remember(f"proven | {self.cell} | {candidate_key(plan)}", recalled)
            self.ledger.proven[plan] = Fault(*recalled) if recalled else None
            fault = self.ledger.proven[plan]
            if fault is not None:
                self._told(plan, TrialOutcome(fault.kind, "prove", message=fault.message))
        return self.ledger.proven[plan]

    # --- stages -------------------------------------------------------------------------------------------------

    def _record(self, stage: str, knobs: Mapping[str, tuple[Value, ...]]) -> StageRecord:
        sampler: optuna.samplers.BaseSampler | None = None
        if stage == "explore":
            sampler = optuna.samplers.TPESampler(seed=self.settings.seed, n_startup_trials=8)
        return self.store.stage(self.cell, stage, knobs, sampler)

    def _arena(self, stage: str, record: StageRecord, default: Tunables | None = None) -> Arena:
        return Arena(
            cell=self.cell,
            stage=stage,
            evaluator=self.evaluator,
            record=record,
            ledger=self.ledger,
            default=default or self.default,
            limits=self.settings.limits,
            seed=self.settings.seed,
            timeout_s=self._timeout_s(),
            sample_s=self.preset.sample_target_ms / 1e3,
            listener=self._told,
        )

    def _told(self, plan: Tunables, outcome: TrialOutcome) -> None:
        self.trials += 1
        self.listener.trial(self.cell, plan, outcome)

    def _learn(self, arena: Arena, entries: Iterable[Entry]) -> None:
        """Keep the estimate that most repetitions stand behind."""
        for entry in entries:
            if entry.log_ratios and entry.fault is None:
                interval = arena.interval(entry)
                known = self.estimates.get(entry.tunables)
                if known is None or known.count <= interval.count:
                    self.estimates[entry.tunables] = interval

    def _race_plans(self) -> list[Tunables]:
        return list(dict.fromkeys([self.default, *self.seeds, *self.space.kernel_plans]))

    def _race_stage(self, stage: str, plans: Sequence[Tunables], *, keep: int, deadline: Deadline) -> list[Tunables]:
        """Stage 1: successive elimination of whole plans; the main and the narrower dtypes race side by side."""
        self.listener.stage(self.cell, stage)
        record = self._record(stage, self.space.knobs)
        arena = self._arena(stage, record)
        standing = record.noted("standing")
        if standing is None:
            entries = arena.admit(plans, deadline)
            mains = [entry for entry in entries if self._main(entry.tunables)]
            narrow = [entry for entry in entries if not self._main(entry.tunables)]
            racing = race_groups(
                arena, [mains, narrow], keeps=[keep, 1], max_blocks=self.preset.race_blocks, deadline=deadline
            )
            for entry in racing:
                arena.leave(entry, "stood to the end")
            standing = [candidate_key(entry.tunables) for entry in racing]
            record.note("standing", standing)
        self._learn(arena, record.entries())
        self._recall_checks(record)
        return [plan for plan in map(from_key, standing) if self._main(plan)]

    def _recall_checks(self, record: StageRecord) -> None:
        """A stage that an earlier run finished is not entered again; what it found still counts."""
        for entry in record.entries():
            result = entry.fault or entry.checked
            if result is not None:
                self.ledger.checked.setdefault(entry.tunables, result)

    def _main(self, plan: Tunables) -> bool:
        return plan.dtype in self.main_dtypes

    def _improve(self, start: Tunables, number: int, deadline: Deadline) -> Tunables:
        """Stage 2: every single move away from the incumbent is screened, the good ones are combined, repeat."""
        incumbent = start
        tried = {start}
        for step in range(8):
            if deadline.passed():
                break
            moves = [m for m in self.space.neighbours(incumbent) if m.tunables not in tried and self._main(m.tunables)]
            moves = [move for move in moves if move.knob != "dtype"]
            if not moves:
                break
            tried.update(move.tunables for move in moves)
            stage = f"improve {number}.{step}"
            self.listener.stage(self.cell, stage)
            better = self._screen(stage, incumbent, {move.tunables: move.knob for move in moves}, deadline)
            if better == incumbent:
                break
            incumbent = better
            tried.add(incumbent)
        return incumbent

    def _screen(
        self, stage: str, incumbent: Tunables, moves: Mapping[Tunables, str], deadline: Deadline
    ) -> Tunables:
        record = self._record(stage, self.space.knobs)
        arena = self._arena(stage, record)
        recalled = record.noted("best")
        if recalled is None:
            entries = arena.admit([incumbent, *moves], deadline)
            if not entries or entries[0].tunables != incumbent:
                return incumbent
            good = screen(arena, entries[0], entries[1:], self.preset.race_blocks, deadline)
            best = self._combine(arena, entries[0], good, moves, deadline)
            for entry in record.entries():
                arena.leave(entry, "screened")
            recalled = candidate_key(best)
            record.note("best", recalled)
        self._learn(arena, record.entries())
        self._recall_checks(record)
        return from_key(recalled)

    def _combine(
        self,
        arena: Arena,
        incumbent: Entry,
        good: Sequence[Entry],
        moves: Mapping[Tunables, str],
        deadline: Deadline,
    ) -> Tunables:
        """Good moves taken together: all of them, the better half, and the best alone race the incumbent."""
        if not good:
            return incumbent.tunables
        base = encode(self.cell, incumbent.tunables)
        changes: dict[str, dict[str, Value]] = {}
        for entry in good:  # best first, so the first of a knob is its best value
            turned = {k: v for k, v in encode(self.cell, entry.tunables).items() if base.get(k) != v}
            changes.setdefault(moves[entry.tunables], turned)
        ordered = list(changes.values())
        plans = []
        for count in sorted({len(ordered), -(-len(ordered) // 2), min(2, len(ordered))}, reverse=True):
            merged: dict[str, Value] = {}
            for turned in reversed(ordered[:count]):
                merged |= turned
            plan = self.space.combine(incumbent.tunables, merged)
            if plan is not None and count > 1:
                plans.append(plan)
        singles = [entry for entry in good[:2] if not entry.finished]
        combined = [e for e in arena.admit(dict.fromkeys(plans), deadline) if e not in singles]
        rivals = [incumbent, *singles, *combined]
        left = max(4, self.preset.race_blocks // 2)
        start = {id(entry): len(entry.log_ratios) for entry in rivals}
        while all(len(entry.log_ratios) - start[id(entry)] < left for entry in rivals if entry.fault is None):
            if not deadline.allows(arena.estimate_s(rivals)) or not any(e.fault is None for e in rivals[1:]):
                break
            arena.block([entry for entry in rivals if entry.fault is None])
        alive = [e for e in rivals[1:] if e.fault is None and len(arena.difference(e, incumbent)) >= 2]
        ranked = sorted(alive, key=lambda e: float(np.median(arena.difference(e, incumbent))))
        if ranked and arena.chance_faster(ranked[0], incumbent, by=WORTH_TRYING / 2) >= PROMISING:
            return ranked[0].tunables
        return incumbent.tunables

    def _explore(self, deadline: Deadline) -> None:
        """Stage 3: TPE over the whole valid space, told everything known, a few plans per block."""
        self.listener.stage(self.cell, "explore")
        record = self._record("explore", self.space.knobs)
        arena = self._arena("explore", record)
        if not record.entries():
            for plan, interval in self.estimates.items():
                checked = self.ledger.checked.get(plan)
                constraints = self.settings.limits.constraints(checked) if isinstance(checked, Checked) else {}
                record.learn(plan, interval.median, constraints)
            for plan in self.ledger.failures():
                record.learn(plan, None, {})
        best = self._best_plan()
        incumbent = record.find(best) or record.open(best)
        if not arena.enter(incumbent):
            return
        asked = sum(1 for entry in record.entries() if entry.finished)
        while asked < self.preset.explore_plans and not deadline.passed():
            fresh, used = self._ask_batch(arena, record, deadline)
            asked += used
            if not fresh:
                if not used:
                    break
                continue
            good = screen(arena, incumbent, fresh, self.preset.race_blocks, deadline)
            for entry in fresh:
                if entry not in good[:1]:
                    arena.leave(entry, "explored")
            if good and arena.chance_faster(good[0], incumbent, by=WORTH_TRYING / 2) >= PROMISING:
                arena.leave(incumbent, "overtaken")
                incumbent = good[0]
            elif good:
                arena.leave(good[0], "explored")
        arena.leave(incumbent, "stood to the end")
        self._learn(arena, record.entries())

    def _ask_batch(self, arena: Arena, record: StageRecord, deadline: Deadline) -> tuple[list[Entry], int]:
        """Up to BATCH new plans of the sampler that can run, and how many asks that took."""
        fresh: list[Entry] = []
        asks = 0
        while len(fresh) < BATCH and asks < 8 * BATCH and deadline.allows(arena.sample_s):
            trial, assignment = record.ask()
            asks += 1
            plan = decode(self.cell, assignment)
            reasons = self.space.machine.reasons(self.cell, plan)
            if reasons:
                record.reject(trial, reasons)
            elif record.find(plan) is not None or plan in self.estimates:
                record.repeat(trial, self._known_value(record, plan))
            else:
                entry = record.adopt(trial, plan)
                if arena.enter(entry):
                    fresh.append(entry)
        return fresh, asks

    def _known_value(self, record: StageRecord, plan: Tunables) -> float:
        if plan in self.estimates:
            return self.estimates[plan].median
        entry = record.find(plan)
        ratios = list(entry.log_ratios.values()) if entry is not None else []
        return float(np.median(ratios)) if ratios else math.log(2.0)

    def _ranked(self, plans: Iterable[Tunables]) -> list[Tunables]:
        """By a cautious estimate: few repetitions must not look better than many."""
        sigma = self.ledger.noise_sigma()
        sigma = sigma if math.isfinite(sigma) else 0.05

        def cautious(plan: Tunables) -> float:
            interval = self.estimates[plan]
            return interval.median + sigma * 0.5 / math.sqrt(interval.count)

        return sorted((p for p in plans if p in self.estimates and not self._has_failed(p)), key=cautious)

    def _keeps(self, plan: Tunables) -> bool:
        checked = self.ledger.checked.get(plan)
        return isinstance(checked, Checked) and self.settings.limits.keeps(checked)

    def _best_plan(self) -> Tunables:
        ranked = self._ranked(p for p in self.estimates if self._main(p) and self._keeps(p))
        return ranked[0] if ranked else self.default

    # --- the end ------------------------------------------------------------------------------------------------

    def _final_s(self) -> float:
        """What the final needs: re-timing, and proving what will be written."""
        checked = self.ledger.checked[self.default]
        assert isinstance(checked, Checked)
        call_s = checked.call_ms / 1e3
        sample_s = max(self.preset.sample_target_ms / 1e3, call_s)
        return (FINALISTS + 1) * self.preset.final_min_blocks * sample_s + self.preset.ragged_lengths * 4 * call_s

    def _finalists(self) -> list[Tunables]:
        """At most FINALISTS - 1 beside the default, proven: the fastest, the leanest if asked for, the best narrow."""
        mains = self._ranked(p for p in self.estimates if self._main(p) and p != self.default)
        allowed = [plan for plan in mains if self._keeps(plan)]
        if self.settings.prefer != "time":
            allowed = self._preferred_first(allowed)
        narrow = self._ranked(p for p in self.estimates if not self._main(p))[:1]
        wanted = FINALISTS - 1 - len(narrow)
        chosen: list[Tunables] = []
        for plan in allowed:
            if len(chosen) == wanted:
                break
            if self._prove(plan) is None:
                chosen.append(plan)
        return chosen + [plan for plan in narrow if self._prove(plan) is None]

    def _preferred_first(self, plans: Sequence[Tunables]) -> list[Tunables]:
        """The order in which a leaner or balanced plan would be wanted."""
        candidates = [self._candidate(plan, self.estimates[plan]) for plan in plans]
        default = self._candidate(self.default, Interval(0.0, 0.0, 0.0, 2))
        order = []
        while candidates:
            best = choose(self.cell, default, candidates, sigma=0.0, prefer=self.settings.prefer)
            if best is default:
                break
            order.append(best.tunables)
            candidates.remove(best)
        return order + [plan for plan in plans if plan not in order]

    def _candidate(self, plan: Tunables, gain: Interval) -> Candidate:
        checked = self.ledger.checked[plan]
        assert isinstance(checked, Checked)
        return Candidate(plan, gain, checked.peak_bytes, self.settings.limits.keeps(checked))

    def _final(self) -> CellResult:
        """Re-time the finalists with the default among them; only these numbers decide and are written."""
        self.listener.stage(self.cell, "final")
        finalists = self._finalists()
        record = self._record("final", self.space.knobs)
        arena = self._arena("final", record)
        entries = arena.admit([self.default, *finalists], self.deadline)
        standing = final_race(arena, entries, self.preset, self.deadline)
        for entry in entries:
            arena.leave(entry, "final")
        self._learn(arena, entries)
        final = {e.tunables: arena.interval(e) for e in standing if len(e.log_ratios) >= 2}
        self.final_ms = {e.tunables: arena.median_ms(e) for e in entries if e.log_ratios}
        sigma = self.ledger.noise_sigma()
        default = self._candidate(self.default, Interval(0.0, 0.0, 0.0, len(record.default_ms)))
        others = [
            self._candidate(plan, gain) for plan, gain in final.items() if plan != self.default and self._main(plan)
        ]
        try:
            winner = choose(self.cell, default, others, sigma=sigma, prefer=self.settings.prefer)
        except ValueError as nothing:
            return self._result("refused", note=f"{nothing}: {self._nearest_to_limits()}")
        if len(record.default_ms) < 2:
            return self._inconclusive("no time was left to time the default twice")
        state: CellState = "default" if winner.tunables == self.default else "tuned"
        result = self._result(state, winner=winner, finals=[default, *others], narrow=self._narrow(final, winner))
        widest = max((c.gain.half_width for c in others), default=0.0)
        if widest > WIDE and state == "default":
            result.state = "inconclusive"
            result.note = f"the noise was too high to tell plans apart (half-width {100 * widest:.0f} %)"
        elif sigma > NOISY_SIGMA:
            result.note = "; ".join(filter(None, (result.note, f"noisy machine ({100 * sigma:.1f} % a pair)")))
        return result

    def _narrow(self, final: Mapping[Tunables, Interval], winner: Candidate) -> Candidate | None:
        """The best plan with a narrower dtype, where it is surely faster than the winner."""
        narrow = [self._candidate(plan, gain) for plan, gain in final.items() if not self._main(plan)]
        narrow = [c for c in narrow if c.allowed and c.gain.high < winner.gain.median - 0.01]
        return min(narrow, key=lambda c: c.gain.median, default=None)

    def _nearest_to_limits(self) -> str:
        checked = [c for c in self.ledger.checked.values() if isinstance(c, Checked)]
        least = min(c.peak_bytes for c in checked) / 2**20
        error = min(c.error for c in checked)
        return f"the leanest of {len(checked)} plans holds {least:.0f} MiB, the most exact errs by {error:.1e}"

    def _measured(self, candidate: Candidate) -> Measured:
        checked = self.ledger.checked[candidate.tunables]
        assert isinstance(checked, Checked)
        ms = self.final_ms.get(candidate.tunables)
        if ms is None:
            ms = self.final_ms[self.default] * candidate.gain.ratio
        return Measured(candidate.tunables, checked, candidate.gain, ms, checked.host_us)

    def _front(self, finals: Sequence[Candidate]) -> tuple[Candidate, ...]:
        """Time against memory over everything timed, proven where time allows; unproven plans are left out."""
        known = {candidate.tunables: candidate for candidate in finals}
        for plan, gain in self.estimates.items():
            if plan not in known and self._main(plan) and gain.count >= 2 and self._keeps(plan):
                known[plan] = self._candidate(plan, gain)
        kept: list[Candidate] = []
        for candidate in pareto_front(list(known.values())):
            plan = candidate.tunables
            if plan not in self.ledger.proven and self.deadline.passed():
                continue
            if self._prove(plan) is None:
                kept.append(candidate)
            if len(kept) == FRONT_KEPT:
                break
        return tuple(kept)

    def _result(
        self,
        state: CellState,
        *,
        winner: Candidate | None = None,
        finals: Sequence[Candidate] = (),
        narrow: Candidate | None = None,
        note: str = "",
    ) -> CellResult:
        result = CellResult(
            self.cell,
            state,
            rejected=self.space.rejected,
            trials=self.trials,
            noise_sigma=self.ledger.noise_sigma(),
            note="; ".join(filter(None, (self.note, note))),
            disturbances=tuple(dict.fromkeys(self.ledger.disturbances)),
        )
        if winner is not None:
            rest = sorted((c for c in finals if c is not winner and c.allowed), key=lambda c: c.gain.median)
            result.choice = self._measured(winner)
            result.default = self._measured(finals[0])
            result.runners_up = tuple(self._measured(c) for c in rest[:2])
            result.auto = self._measured(narrow) if narrow is not None else None
            result.front = tuple(self._measured(c) for c in self._front(finals))
        result.failures = self.ledger.failures()
        return result

    def _inconclusive(self, reason: str) -> CellResult:
        """No number can be believed: the default stays, without evidence that it deserves to."""
        result = self._result("inconclusive", note=reason)
        checked = self.ledger.checked.get(self.default)
        if isinstance(checked, Checked):
            result.default = Measured(self.default, checked, Interval(0.0, 0.0, 0.0, 0), checked.call_ms, checked.host_us)
            result.choice = result.default
        return result


# --- races with their own rules --------------------------------------------------------------------------------------


def race_groups(
    arena: Arena,
    groups: Sequence[Sequence[Entry]],
    *,
    keeps: Sequence[int],
    max_blocks: int,
    deadline: Deadline,
) -> list[Entry]:
    """Race every group to its own leader; small groups ride in the blocks they would need anyway."""
    standing: list[Entry] = []
    for group, keep in zip(groups, keeps, strict=True):
        if group:
            standing.extend(race(arena, group, keep=keep, max_blocks=max_blocks, deadline=deadline))
    return standing


def screen(
    arena: Arena, incumbent: Entry, moves: Sequence[Entry], max_blocks: int, deadline: Deadline
) -> list[Entry]:
    """Those moves that are probably faster than the incumbent, best first.

    Everything is timed in the same blocks as the incumbent; what is clearly slower or hopeless drops out early.
    """
    alive = [entry for entry in moves if entry.fault is None and not entry.finished]
    rounds = 0
    while alive and rounds < max_blocks:
        if not deadline.allows(arena.estimate_s([incumbent, *alive])) and rounds > 0:
            break
        if not arena.block([incumbent, *alive]):
            if deadline.passed() or incumbent.fault is not None:
                break
            continue
        rounds += 1
        alive = [entry for entry in alive if entry.fault is None and _still_hopeful(arena, entry, incumbent)]
    met = [entry for entry in alive if len(arena.difference(entry, incumbent)) >= 2]
    good = [entry for entry in met if arena.chance_faster(entry, incumbent, by=WORTH_TRYING) >= PROMISING]
    return sorted(good, key=lambda entry: float(np.median(arena.difference(entry, incumbent))))


def _still_hopeful(arena: Arena, entry: Entry, incumbent: Entry) -> bool:
    differences = arena.difference(entry, incumbent)
    if not differences:
        return True
    if float(np.median(differences)) > MOVE_GATE:
        return False
    if len(differences) < 4:
        return True
    return arena.chance_faster(entry, incumbent, by=WORTH_TRYING) > HOPELESS


def final_race(arena: Arena, entries: Sequence[Entry], preset: EffortPreset, deadline: Deadline) -> list[Entry]:
    """Blocks until every interval is narrow, or the best is decided beyond doubt, or time or the maximum is up."""
    alive = [entry for entry in entries if entry.fault is None and not entry.finished]
    while alive:
        done = min(len(entry.log_ratios) for entry in alive)
        if done >= preset.final_max_blocks:
            break
        if done >= preset.final_min_blocks and _decided(arena, alive):
            break
        if done >= 2 and not deadline.allows(arena.estimate_s(alive)):
            break
        arena.block(alive)
        alive = [entry for entry in alive if entry.fault is None]
    return [entry for entry in entries if entry.fault is None]


def _decided(arena: Arena, entries: Sequence[Entry]) -> bool:
    rivals = [entry for entry in entries if entry.tunables != arena.default]
    return all(arena.interval(entry).half_width < FINAL_PRECISION for entry in rivals)
