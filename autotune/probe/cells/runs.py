"""Cells of a probe, each with its space, its search and, once it has a result, its row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autotune.exit_codes import NothingMeasured
from autotune.journal.store import Store
from autotune.journal.study.cell_study import LEFT
from autotune.journal.study.result import CellResult
from autotune.measure.evaluator import CallsAhead, Evaluator
from autotune.probe.observer import SearchObserver
from autotune.probe.output.earlier_profile import plans_before
from autotune.probe.probe_context import ProbeContext
from autotune.probe.workloads.grid import Cell
from autotune.search.budget import RESERVE_S
from autotune.search.compilers import Compilers
from autotune.search.limits import Limits
from autotune.search.loop import CellSearch
from autotune.search.settings import SearchSettings
from autotune.search.transfer import Transfer
from autotune.space.space import Space
from ringattn.errors import PlanError
from ringattn.profile.plain_data import to_plain
from ringattn.profile.schema import Profile
from ringattn.workload import Tunables, Workload

from .rows import Rows
from .sharing import SharedBudget, SharedCells

AGAIN = 1.5  # of a budget that was too small: of 20 s, 26 and 28 that were named after it were again, on two busy cores

HANG_S = {"cpu": 6.0, "nvidia": 25.0}  # cuDNN makes a plan for every shape

SpaceOf = Callable[[Cell, str], Space | PlanError]  # plans for a cell in a layout over several ranks


def hang_s(vendor: str, budget_s: float) -> float:
    """Return seconds before which no call hangs that has nothing to compile: in a short probe a tenth of it."""
    return min(HANG_S[vendor], 0.1 * budget_s)


LARGER = "; give a larger --budget"


class CellRuns:
    """The searches of one probe. What must survive a kill, and what other workers need, is in the store."""

    def __init__(
        self,
        context: ProbeContext,
        cells: Sequence[Cell],
        rows: Rows,
        store: Store,
        evaluator: Evaluator,
        budget: SharedBudget,
        layout_of: Callable[[Workload], str],
        space_of: SpaceOf,
        before: Sequence[Profile] = (),
    ) -> None:
        """``layout_of`` says in which layout over several ranks a cell is searched; ``before`` are earlier profiles."""
        self.context = context
        self.cells = tuple(cells)
        self.rows = rows
        self.budget = budget
        self.shared = SharedCells(store, budget)
        ahead = evaluator if isinstance(evaluator, CallsAhead) else None
        self.transfer = Transfer(store, Compilers(context.environment.machine.just_in_time, ahead))
        self.observer = SearchObserver(context.observer, context.environment.clock)
        self.teaches = True  # False: every kernel is tried in every cell
        self.searched: list[CellSearch] = []
        self.results: dict[Workload, CellResult] = {}
        self.recalled: list[CellSearch] = []  # that an earlier run finished, or another worker
        self.enough_s: list[float] = []  # for each cell left for want of time here, a budget that had measured it
        self.store = store
        self._evaluator = evaluator
        self._layout_of, self._space_of = layout_of, space_of
        self._before = tuple(before)
        self._spaces: dict[Workload, Space | None] = {}
        self._nearby: dict[Workload, tuple[Tunables, ...]] = {}  # plans of earlier profiles

    # --- one cell ---------------------------------------------------------------------------------------------------

    def space(self, cell: Cell) -> Space | None:
        """Return the plans of a cell; None where nothing can run it, and its row says so then."""
        workload = cell.workload
        if workload not in self._spaces:
            space = self._space_of(cell, self._layout_of(workload))
            if isinstance(space, PlanError):
                self.rows.refuse(workload, space)
            self._spaces[workload] = None if isinstance(space, PlanError) else space
        return self._spaces[workload]

    def known_space(self, cell: Cell) -> Space:
        """Return the plans of a cell that something can run."""
        space = self.space(cell)
        assert space is not None, f"nothing can run {cell.workload}"
        return space

    def plans_before(self, workload: Workload) -> tuple[tuple[Tunables, ...], tuple[Tunables, ...]]:
        """Return the plans of earlier profiles for a workload, and for the nearest length."""
        return plans_before(workload, self._before, self.context.environment, self._layout_of(workload))

    def new_search(self, cell: Cell) -> CellSearch:
        """Return the search of a cell that can be run, whose lease is held, with all that its study knows."""
        status = self.shared.meet(cell.workload, lambda: self.plans_before(cell.workload))
        self._nearby[cell.workload] = status.nearby
        return CellSearch(
            self.known_space(cell).including((*status.standing, *status.nearby)),
            self._evaluator,
            self.store,
            self._settings(),
            self.observer,
            self.context.environment.clock,
            main_dtypes=cell.main_dtypes,
            transfer=self.transfer,
            end=self.budget.deadline(math.inf),
            standing=status.standing,
        )

    def _settings(self) -> SearchSettings:
        request, preset = self.context.request, self.context.preset
        limit = request.memory_limit_mib
        return SearchSettings(
            preset=preset,
            seed=request.seed,
            limits=Limits(None if limit is None else limit * 2**20, request.max_error),
            prefer=request.prefer,
            asynchronous=self.context.environment.facts.vendor != "cpu",
            launch=request.launch,
            # A graph is of one length, and of no use inside another capture.
            graphs=request.launch == "eager" and not request.varied_lengths,
            hang_s=hang_s(self.context.environment.facts.vendor, preset.budget_s),
            sampler=request.sampler,
        )

    def settle(self, search: CellSearch, most_s: float) -> bool:
        """Settle the default of a cell, and say what its search would take; else it is left with the reason."""
        fault = search.settle(self.budget.deadline(max(0.0, most_s)))
        if fault is None:
            self.shared.settle(search.cell, search.need())
            return True
        if fault.from_outside:  # no verdict on any plan
            if fault.kind == "timeout":
                self.leave_for_time(search, fault.message, f"{LARGER} or a shorter --seq-len")
            else:
                self.leave(search, search.inconclusive(fault.message))
        else:
            self.leave(search, search.refused(f"no plan could be run: {fault.message}"))
        return False

    def search(self, search: CellSearch, share_s: float, spare_s: float) -> None:
        """Search a cell; ``spare_s`` makes up for what it should not pay for alone: crashes, hangs, compilation."""
        state, cell, clock = search.state, search.cell, self.context.environment.clock
        began, lost_before_s = clock.now(), state.lost_s
        self.observer.begin(cell)
        if share_s < search.least_s():
            self.leave_for_time(search)
            return
        deadline = self.budget.working_deadline(share_s, lambda: state.lost_s, spare_s)
        result = search.run(deadline, seeds=(*self._nearby[cell], *self.rows.seeds(cell)))
        taken_s = clock.now() - began
        self.observer.end(cell, max(0.0, taken_s - (state.lost_s - lost_before_s)))
        self._teach(search)
        if math.isfinite(sigma := state.noise_sigma()):
            self.transfer.sigmas.append(sigma)
        if result.state == "inconclusive" and not math.isfinite(result.noise_sigma):  # fewer than two blocks
            self._note_enough(search)
        self.searched.append(search)
        self.shared.finish(cell)
        self.finish(result, taken_s)

    def nothing_measured(self, stays: str, why: Sequence[str]) -> NothingMeasured:
        """Return the error of a run whose cells are all inconclusive: ``why``, and a budget that would have done."""
        least = ""
        if self.enough_s:  # what was too little is not enough on a machine that is slower than it seemed
            would_do_s = max(min(self.enough_s), AGAIN * self.budget.total_s)
            least = f"; --budget {math.ceil(would_do_s)} would do for the first"
        return NothingMeasured(f"no cell could be measured, so {stays}{least}: {'; '.join(why)}")

    # --- its result -------------------------------------------------------------------------------------------------

    def finish(self, result: CellResult, taken_s: float) -> None:
        """Make the row of a cell that this worker has searched."""
        self.results[result.workload] = result
        self.rows.finish(result, taken_s)
        self.observer.time_left()

    def recall(self, search: CellSearch, *, left_too: bool = False) -> bool:
        """Return whether this cell has a result; then its row is that of its study.

        ``left_too``: also what stands for a result where the cell was left without one.
        """
        result = search.recalled()
        if result is None and left_too and (record := search.study.noted_left()) is not None:
            result = CellResult.of(search.cell, record, search.study.plan_of, search.state.failures())
        elif result is None:
            return False
        else:
            self.shared.finish(search.cell)
        assert result is not None
        self.recalled = [other for other in self.recalled if other.cell != search.cell] + [search]
        self._teach(search)
        self.rows.finish(result, 0.0)
        return True

    def _teach(self, search: CellSearch) -> None:
        """Let the cells of other lengths know how far behind each plan was, and so leave hopeless kernels out."""
        if self.teaches:
            self.transfer.finished = [timed for timed in self.transfer.finished if timed.cell != search.cell]
            self.transfer.finished.append(search.beliefs.timed())

    def leave_for_time(self, search: CellSearch, why: str = "no time was left for it", remedy: str = LARGER) -> None:
        """Give a cell up for this run that a larger budget would measure; see ``leave``."""
        self._note_enough(search)
        self.leave(search, search.inconclusive(f"{why}{remedy}"))

    def _note_enough(self, search: CellSearch) -> None:
        """Note how many seconds would have done for a cell: apart from its note, since equal notes are told once.

        Twice what it needs for an answer, since the defaults of other cells may take as much.
        """
        reserve_s = max(RESERVE_S, self.budget.reserve_s)
        self.enough_s.append(self.budget.elapsed_s() + 2 * search.need().base_s + reserve_s)

    def leave(self, search: CellSearch, result: CellResult) -> None:
        """Give a cell up for this run: other workers take this for its result, the next run tries anew."""
        search.study.note(LEFT, to_plain(result.record(search.study.number_of)))
        self.shared.leave(search.cell)
        self.finish(result, 0.0)
