"""Every cell of a probe, one after the other: the default first, then a search within the cell's share of the time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from autotune.journal.result import CellResult
from autotune.journal.store import Store
from autotune.measure.evaluator import CallsAhead, Evaluator
from autotune.probe.grid import Cell
from autotune.probe.observer import SearchObserver
from autotune.probe.output.earlier_profile import plans_before
from autotune.probe.recorded import call_gflop
from autotune.probe.task import Task
from autotune.search.budget import Budget, CellNeed, Progress, allot, spare_s
from autotune.search.compilers import Compilers
from autotune.search.limits import Limits
from autotune.search.loop import CellSearch
from autotune.search.settings import SearchSettings
from autotune.search.transfer import Transfer
from autotune.space.first_calls import calls_worth_making
from ringattn.errors import PlanError
from ringattn.profile.schema import Profile
from ringattn.workload import Tunables, Workload

from .rows import Rows
from .space import space_or_refusal

# Of the time that no cell needs, for one that noise keeps from an answer: two ranks of a CPU gave up after 15 of 30 s.
# The rest is for proofs that are owed.
UNDECIDED_SHARE = 0.5
UNDECIDED_MORE = 0.3  # of its own share it may have in any case: of eight blocks two are outliers in one cell of 100
HANG_S = {"cpu": 6.0, "nvidia": 25.0}  # cuDNN makes a plan for every shape


def hang_s(vendor: str, budget_s: float) -> float:
    """Seconds before which no call counts as hung that has nothing to compile: in a short probe a tenth of it."""
    return min(HANG_S[vendor], 0.1 * budget_s)


LEAST_OF_BASE = (
    0.4  # of what an answer takes in comfort, two blocks of the default and what is nearest to it take so much
)
KEPT_OF_SETTLING = 0.25
LARGER = "; give a larger --budget"
STILL_COMPILING = "still being compiled when the time was over, and not tried; the next probe has what was finished"


def affordable(needs: Mapping[Workload, CellNeed], available_s: float) -> list[Workload]:
    """Return the cells to share the time: all, in their order, or as many of the cheapest as can have an answer.

    On a busy CPU 60 s, half of them gone into the defaults of 20 cells, were too little for any but three.
    """
    cheapest = sorted(needs, key=lambda workload: needs[workload].base_s)
    spent_s = itertools.accumulate(LEAST_OF_BASE * needs[workload].base_s for workload in cheapest)
    count = max(1, sum(seconds <= available_s for seconds in spent_s))
    return list(needs) if count >= len(cheapest) else cheapest[:count]


def _needs(searches: Mapping[Workload, CellSearch]) -> dict[Workload, CellNeed]:
    return {workload: search.need() for workload, search in searches.items()}


class CellRuns:
    """The searches of one probe. What must survive a kill is in the store, everything else here."""

    def __init__(
        self,
        task: Task,
        cells: Sequence[Cell],
        rows: Rows,
        store: Store,
        evaluator: Evaluator,
        budget: Budget,
        layout_of: Callable[[Workload], str],
        before: Sequence[Profile] = (),
    ) -> None:
        """``layout_of`` says in which layout over several ranks a cell is searched; ``before`` are earlier profiles."""
        self.task = task
        self.cells = tuple(cells)
        self.rows = rows
        self.budget = budget
        ahead = evaluator if isinstance(evaluator, CallsAhead) else None
        self.transfer = Transfer(store, Compilers(task.environment.machine.just_in_time, ahead))
        self.observer = SearchObserver(task.observer, task.environment.clock)
        self.searched: list[CellSearch] = []
        self.results: dict[Workload, CellResult] = {}
        self.recalled: list[CellSearch] = []  # that an earlier run finished
        self._store = store
        self._evaluator = evaluator
        self._layout_of = layout_of
        self._before = tuple(before)
        self._nearby: dict[Workload, tuple[Tunables, ...]] = {}  # plans of earlier profiles
        self._looked_too_early: frozenset[Workload] = frozenset()  # their defaults, beside first calls

    def run(self) -> None:
        """All cells that no earlier run has finished, cheapest first."""
        self.task.observer.plan([cell.workload for cell in self.cells], self.task.preset.budget_s)
        made = [(cell, search) for cell in self.cells if (search := self.new_search(cell)) is not None]
        new = [(cell, search) for cell, search in made if not self.recall(search)]
        # Patterns last: what they compile, 11 s of a first probe of an H100, helpers have compiled until then. And the
        # cheapest first, as on a busy machine there may be no time for all.
        new.sort(key=lambda pair: (not pair[0].workload.pattern.dense, call_gflop(pair[0].workload)))
        standing = [(search.cell, plan) for _, search in new for plan in search.state.standing]
        self.transfer.compilers.begin(calls_worth_making([search.space for _, search in new], standing))
        compiled_beside = self.transfer.compilers.at_work
        searches = self._settle(new)
        self._try_while_compiling(list(searches.values()))
        if compiled_beside:
            self._looked_too_early = frozenset(searches)
        self.observer.expect(Progress(self.budget, _needs(searches)))
        order = sorted(searches, key=lambda w: (w.seq_len, w.mode, not w.pattern.dense, str(w.pattern)))
        while order:
            available_s = self.budget.available_s()
            needs = {other: searches[other].need() for other in order}  # each finished cell shows how noisy it is here
            chosen = affordable(needs, available_s)
            workload = chosen[0]
            order.remove(workload)
            if workload in self._looked_too_early:
                searches[workload].look_again()
                needs[workload] = searches[workload].need()
                available_s = self.budget.available_s()
            shares = allot([needs[other] for other in chosen], available_s)
            unneeded_s = UNDECIDED_SHARE * max(0.0, available_s - sum(shares))
            searches[workload].state.undecided_s = max(unneeded_s, UNDECIDED_MORE * shares[0])
            self.search(searches[workload], shares[0], spare_s(shares, available_s))

    def recall(self, search: CellSearch) -> bool:
        """Return whether an earlier run finished this cell; then its row is that of its study."""
        result = search.recalled()
        if result is None:
            return False
        self.recalled.append(search)
        self.transfer.finished.append(search.beliefs.timed())
        self.rows.finish(result, 0.0)
        return True

    def _try_while_compiling(self, searches: Sequence[CellSearch]) -> None:
        """Try what needs no compiler at work, and wait for those, as long as the cells have what any answer takes."""
        while self._compiling() and (left_s := self._left_beside_answers_s(searches)) > 0:
            deadline = self.budget.deadline(left_s)
            tried = sum(search.try_meanwhile(deadline) for search in searches)  # one block of each
            if not tried:
                self.transfer.compilers.wait(min(left_s, self._left_beside_answers_s(searches)))

    def end_compilers(self) -> None:
        """Let what is being compiled end, as far as the budget goes and a little longer, and say what failed."""
        if kernels := self.transfer.compilers.waited_for():
            self.task.observer.note(f"{STILL_COMPILING}: {', '.join(kernels)}")
        if note := self.transfer.compilers.end(self.budget.available_s()):
            self.task.observer.note(note)

    def _compiling(self) -> bool:
        self.transfer.hear_of_compilers()
        return self.transfer.compilers.at_work

    def _left_beside_answers_s(self, searches: Sequence[CellSearch]) -> float:
        return self.budget.available_s() - sum(search.need().base_s for search in searches)

    def _settle(self, new: Sequence[tuple[Cell, CellSearch]]) -> dict[Workload, CellSearch]:
        """The default of every cell, checked and proven: the yardstick of the budget, and of everything else."""
        searches: dict[Workload, CellSearch] = {}
        worker_started_s = self.budget.elapsed_s()
        kept_s = 0.5 * self.task.preset.budget_s  # half of the time, at most, may go into yardsticks
        for number, (cell, search) in enumerate(new):
            if len(affordable(_needs(searches), self.budget.available_s())) < len(searches):
                self.finish(search.inconclusive(f"no time was left for it{LARGER}"), 0.0)
                continue
            fault = search.settle(self.budget.deadline(max(0.0, self.budget.available_s() - kept_s)))
            if number == 0:  # the worker was started for it, which is nobody's yardstick
                kept_s = min(kept_s, 0.5 * self.budget.available_s())
                worker_started_s = self.budget.elapsed_s()
            if fault is None:
                searches[cell.workload] = search
            elif fault.from_outside:  # no verdict on any plan
                remedy = "; give a larger --budget or a shorter --seq-len" if fault.kind == "timeout" else ""
                self.finish(search.inconclusive(fault.message + remedy), 0.0)
            else:
                refused = search.refused(f"no plan could be run: {fault.message}")
                self.finish(refused, 0.0)
        # The rows are run once more at the end, which takes longer on a busy machine, as the checks did.
        self.budget.keep(KEPT_OF_SETTLING * (self.budget.elapsed_s() - worker_started_s))
        return searches

    def new_search(self, cell: Cell) -> CellSearch | None:
        """None where nothing can run the cell; its row says so then."""
        layout = self._layout_of(cell.workload)
        space = space_or_refusal(cell, self.task.environment, layout)
        if isinstance(space, PlanError):
            self.rows.refuse(cell.workload, space)
            return None
        standing, nearby = plans_before(cell.workload, self._before, self.task.environment, layout)
        self._nearby[cell.workload] = nearby
        return CellSearch(
            space.including((*standing, *nearby)),
            self._evaluator,
            self._store,
            self._settings(),
            self.observer,
            self.task.environment.clock,
            main_dtypes=cell.main_dtypes,
            transfer=self.transfer,
            end=self.budget.deadline(math.inf),
            standing=standing,
        )

    def _settings(self) -> SearchSettings:
        request, preset = self.task.request, self.task.preset
        limit = request.memory_limit_mib
        return SearchSettings(
            preset=preset,
            seed=request.seed,
            limits=Limits(None if limit is None else limit * 2**20, request.max_error),
            prefer=request.prefer,
            asynchronous=self.task.environment.facts.vendor != "cpu",
            launch=request.launch,
            # A graph is of one length, and of no use inside another capture.
            graphs=request.launch == "eager" and not request.varied_lengths,
            hang_s=hang_s(self.task.environment.facts.vendor, preset.budget_s),
            sampler=request.sampler,
        )

    def search(self, search: CellSearch, share_s: float, spare_s: float) -> None:
        """``spare_s`` makes up for what this cell should not pay for alone: crashes, hangs, compilation."""
        state, cell, clock = search.state, search.cell, self.task.environment.clock
        began, lost_before_s = clock.now(), state.lost_s
        self.observer.begin(cell)
        if share_s < search.least_s():
            self.finish(search.inconclusive(f"no time was left for it{LARGER}"), 0.0)
            return
        deadline = self.budget.working_deadline(share_s, lambda: state.lost_s, spare_s)
        result = search.run(deadline, seeds=(*self._nearby[cell], *self.rows.seeds(cell)))
        taken_s = clock.now() - began
        self.observer.end(cell, max(0.0, taken_s - (state.lost_s - lost_before_s)))
        self.transfer.finished.append(search.beliefs.timed())
        if math.isfinite(sigma := state.noise_sigma()):
            self.transfer.sigmas.append(sigma)
        self.searched.append(search)
        self.finish(result, taken_s)

    def finish(self, result: CellResult, taken_s: float) -> None:
        self.results[result.workload] = result
        self.rows.finish(result, taken_s)
        self.observer.time_left()
