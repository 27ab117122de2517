"""Stage 2: from the best known plan uphill, a few plans in one block, always those that the cell's model promises most.

The best plan so far is in every block, and so are its rivals: plans that may well be as good and were hardly timed.
The climb ends when the model promises nothing more that is worth a block, and every rival is decided.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from autotune.journal.stage_record import Entry
from autotune.space.space import candidate_key, encode, from_key
from autotune.statistics import median, settled
from ringattn.planning.preference import TIE
from ringattn.workload import Tunables

from .arena import Arena
from .budget import Deadline
from .cell import CellContext
from .choose import distance
from .model import CellModel, Scales
from .propose import Walker
from .race import LEAN_BLOCKS, WORTH_TRYING

BATCH = 4  # new plans in one block: checking one costs as much as timing eight
STARTS = 3  # best plans from which walks over the model begin
RIVALS = 2  # timed again in one block
DECIDED = 6  # repetitions after which a plan is a rival no more: the final times it properly
CLIMBING = 0.9  # of the time; the rest is for what is as good and plainer
LEAN_KNOBS = ("checkpoint", "window_tokens")
# Turned one by one first, and left alone where that gains nothing until nothing else promises anything: of 25 plans
# that a cell had time for, a third changed one of these, which moved an H100's time by under 1 %, its host's by half.
HOUSEKEEPING = ("pattern_cache", "pool_threshold_mib", "pool_strategy")
IDLE = 16  # blocks in a row without a better plan, after which the time is worth more elsewhere
SCALED = 1.2  # times as many plans, before the model asks again how regular the machine is
DOUBT = 1.0  # standard errors that a rival may be behind the best


@dataclass(slots=True)
class Climb:
    """One ascent, up to ``deadline``. ``entries`` are the plans it looked at."""

    context: CellContext
    arena: Arena
    deadline: Deadline
    incumbent: Entry
    entries: dict[Tunables, Entry] = field(default_factory=dict)
    _timed: dict[Tunables, tuple[float, int]] = field(default_factory=dict)
    _ranked: list[Tunables] = field(default_factory=list)
    _scales: tuple[int, Scales] | None = None  # and from how many plans they are

    def run(self) -> Tunables:
        self.entries[self.incumbent.tunables] = self.incumbent
        searching = self.deadline.part(CLIMBING)
        housekeeping = self._housekeeping()
        first = [*self._gathered_otherwise(), *self._moves(LEAN_KNOBS), *housekeeping]
        self._block([self.incumbent, *self._check(first)], searching)
        if housekeeping and not self._may_gain(housekeeping):
            self._until(searching, self._kernels_and_rivals)
        self._until(searching, self._fresh_and_rivals)
        self._until(self.deadline, self._plainer_and_rivals)
        return self.incumbent.tunables

    def _until(self, deadline: Deadline, wanted: Callable[[CellModel], list[Entry]]) -> None:
        """Blocks of the best plan and what is wanted beside it, until nothing is, or time is up."""
        best, idle = math.inf, 0
        while self.incumbent.fault is None and not deadline.passed() and idle <= IDLE:
            model = self._model()
            self._take_best()
            idle = 0 if self._best(model) < best - WORTH_TRYING else idle + 1
            best = min(best, self._best(model))
            beside = wanted(model)
            if not beside and self._repetitions(self.incumbent.tunables) >= DECIDED:
                break
            if not self._block([self.incumbent, *beside], deadline):
                break

    def _block(self, entries: Sequence[Entry], deadline: Deadline) -> bool:
        """One block of these, made again where it was disturbed: what was checked for it is not proposed twice."""
        while deadline.allows(self.arena.estimate_s(entries)):
            if self.arena.block(entries) or self.incumbent.fault is not None:
                return True
            entries = [entry for entry in entries if entry.fault is None]
        return False

    # --- what is known ------------------------------------------------------------------------------------------

    def _model(self) -> CellModel:
        """Of everything timed up to now, in this stage and before."""
        context = self.context
        timed = {plan: (interval.median, interval.count) for plan, interval in context.estimates.items()}
        for entry, ratios in self.arena.polished().items():
            first_look = context.ledger.first_look(entry.tunables, context.default)
            before, mine = timed.get(entry.tunables), (settled(ratios, context.sigma(), first_look), len(ratios))
            timed[entry.tunables] = mine if before is None else _pooled(before, mine)
        self._timed = {plan: reading for plan, reading in timed.items() if not context.has_failed(plan)}
        known = self._timed or {context.default: (0.0, 1)}
        kept = self._scales if self._scales is not None and len(known) < SCALED * self._scales[0] else None
        model = CellModel(
            context.cell,
            context.space.knobs,
            known,
            sigma=context.sigma(),
            failed=context.ledger.failures(),
            scales=kept[1] if kept is not None else None,
        )
        self._scales = kept or (len(known), model.process.scales)
        usable = (plan for plan in self._timed if context.is_main(plan) and context.keeps_limits(plan))
        self._ranked = sorted(usable, key=model.believed)
        return model

    def _repetitions(self, plan: Tunables) -> int:
        return self._timed.get(plan, (0.0, 0))[1]

    def _best(self, model: CellModel) -> float:
        return model.believed(self.incumbent.tunables) if self.incumbent.tunables in self._timed else 0.0

    # --- what is done -------------------------------------------------------------------------------------------

    def _take_best(self) -> None:
        if self._ranked and self._ranked[0] != self.incumbent.tunables:
            best = self._entry(self._ranked[0])
            if best is not None:
                self.incumbent = best

    def _entry(self, plan: Tunables) -> Entry | None:
        if plan not in self.entries:
            admitted = self.arena.admit([plan], self.deadline)
            if not admitted:
                return None
            self.entries[plan] = admitted[0]
        entry = self.entries[plan]
        return None if entry.fault is not None or entry.finished else entry

    def _kernels_and_rivals(self, model: CellModel) -> list[Entry]:
        return [*self._check(self._proposals(model, fixed=HOUSEKEEPING)), *self._rivals(model)]

    def _fresh_and_rivals(self, model: CellModel) -> list[Entry]:
        return [*self._check(self._proposals(model)), *self._rivals(model)]

    def _plainer_and_rivals(self, model: CellModel) -> list[Entry]:
        equal = self._plainest_equal(model)
        fresh = self._check(self._plainer(equal, model))
        doubtful = [equal] if self._repetitions(equal) < DECIDED and equal != self.incumbent.tunables else []
        return list(dict.fromkeys([*fresh, *self._check(doubtful), *self._rivals(model)]))

    def _gathered_otherwise(self) -> list[Tunables]:
        """The best plan with the rows of all branches copied, and with all of them read in place.

        Copies change many knobs at once and may be worth a fifth; no kernel of the race said anything of them.
        """
        cell, space = self.context.cell, self.context.space
        names = [name for name in encode(cell, self.incumbent.tunables) if name.startswith("gather.")]
        plans = [space.combine(self.incumbent.tunables, dict.fromkeys(names, value)) for value in ("view", "copy")]
        known = self.context.ledger.checked
        return [plan for plan in plans if plan is not None and plan not in known]

    def _moves(self, knobs: Collection[str]) -> list[Tunables]:
        """The turns of these knobs of the best plan: some may need less memory, and a front of both is wanted, too."""
        known = self.context.ledger.checked
        return [
            move.tunables
            for move in self.context.space.neighbours(self.incumbent.tunables)
            if move.knob in knobs and move.tunables not in known
        ]

    def _housekeeping(self) -> list[Tunables]:
        """One turn of each such knob that the best plan has; the sizes of a pool are much alike."""
        turns = {move.knob: move.tunables for move in self.context.space.neighbours(self.incumbent.tunables)}
        return [plan for knob, plan in turns.items() if knob in HOUSEKEEPING]

    def _may_gain(self, plans: Collection[Tunables]) -> bool:
        """Whether one of them was faster than what it is a turn of, or could run and was not timed beside it."""
        runs = [plan for plan in plans if not self.context.has_failed(plan)]
        timed = [self.arena.difference(self.entries[plan], self.incumbent) for plan in runs if plan in self.entries]
        gains = [-median(differences) for differences in timed if differences]
        luck = 2 * self.context.sigma()
        return len(gains) < len(runs) or any(gain > max(WORTH_TRYING, luck) for gain in gains)

    def _proposals(self, model: CellModel, fixed: Collection[str] = ()) -> list[Tunables]:
        context = self.context
        tried = {context.space.identity(plan) for plan in context.ledger.checked}
        silent = context.silent_kernels()

        def wanted(plan: Tunables) -> bool:
            return context.is_main(plan) and silent.isdisjoint(plan.kernels)

        walker = Walker(context.space, model, tried, wanted, fixed)
        starts = list(dict.fromkeys([self.incumbent.tunables, *self._ranked[:STARTS]]))
        return walker.propose(starts, BATCH, self._best(model) - WORTH_TRYING)

    def _plainest_equal(self, model: CellModel) -> Tunables:
        """Of the plans that cannot be told from the best the one nearest to the default."""
        best, sigma = self._best(model), self.context.sigma()
        equal = [
            plan
            for plan in self._ranked
            if model.believed(plan) <= best + max(TIE, sigma * math.sqrt(1 / self._timed[plan][1] + 1 / DECIDED))
        ]
        return min(
            [self.incumbent.tunables, *equal], key=lambda p: distance(self.context.cell, p, self.context.default)
        )

    def _plainer(self, plan: Tunables, model: CellModel) -> list[Tunables]:
        """The plan with some of its turns undone, first those that seem to do least: all of them, half, a quarter, one.

        Two probes must not end in two plans that differ in frills.
        """
        cell, space = self.context.cell, self.context.space
        default, here = encode(cell, self.context.default), encode(cell, plan)
        undone: dict[str, float] = {}
        for name in here.keys() | default.keys():
            if here.get(name) != default.get(name):
                plainer = space.combine(plan, {name: default.get(name)})
                if plainer is not None and distance(cell, plainer, self.context.default) < distance(
                    cell, plan, self.context.default
                ):
                    undone[name] = model.predict(plainer)[0]
        names = sorted(undone, key=lambda name: (undone[name], name))
        for count in dict.fromkeys([len(names), (len(names) + 1) // 2, (len(names) + 3) // 4, 1] if names else []):
            plainer = space.combine(plan, {name: default.get(name) for name in names[:count]})
            if plainer is not None and plainer not in self.context.ledger.checked:
                return [plainer]
        return []

    def _check(self, plans: Sequence[Tunables]) -> list[Entry]:
        found = [self._entry(plan) for plan in plans if not self.deadline.passed()]
        return [entry for entry in found if entry is not None]

    def _rivals(self, model: CellModel) -> list[Entry]:
        """Timed plans that were hardly timed and may be as good as the best, or lean enough for the front."""
        timed, ranked, best = self._timed, self._ranked, self._best(model)
        doubt = DOUBT * self.context.sigma()
        doubtful = [
            plan
            for plan in ranked
            if (count := timed[plan][1]) < DECIDED and model.believed(plan) < best + doubt / math.sqrt(count)
        ]
        lean = [plan for plan in ranked if timed[plan][1] < LEAN_BLOCKS and self._on_front(plan, ranked)]
        entries = [self._entry(plan) for plan in dict.fromkeys([*doubtful[: RIVALS + 1], *lean[:RIVALS]])]
        return [entry for entry in entries if entry is not None and entry is not self.incumbent]

    def _on_front(self, plan: Tunables, ranked: Sequence[Tunables]) -> bool:
        """Whether it needs less memory than everything faster."""
        peak = self.context.checked(plan).peak_bytes
        faster = ranked[: ranked.index(plan)]
        return all(peak < 0.95 * self.context.checked(other).peak_bytes for other in faster)


def _pooled(one: tuple[float, int], other: tuple[float, int]) -> tuple[float, int]:
    """Two medians as one, by their repetitions."""
    count = one[1] + other[1]
    return (one[0] * one[1] + other[0] * other[1]) / count, count


def climb(context: CellContext, start: Tunables, deadline: Deadline) -> Tunables:
    """The plan at the end of an ascent from ``start``; everything timed on the way is in the record."""
    stage = "improve"
    context.listener.stage(context.cell, stage)
    record = context.record(stage)
    arena = context.arena(stage, record)
    top = record.noted("top")
    if top is None:
        entries = arena.admit([start], deadline)
        reached = Climb(context, arena, deadline, entries[0]).run() if entries else start
        for entry in record.entries():
            arena.leave(entry, "climbed past")
        record.abandon_open("not timed: the stage was over")
        top = candidate_key(reached)
        record.note("top", top)
    context.learn(arena, record.entries())
    return from_key(top)
