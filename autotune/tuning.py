"""A probe from the request to the profile that the runtime obeys, and the verification of a profile.

Facts are read here, at the edge, and the order of things is decided; measuring, searching and writing are others'.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import hashlib
import itertools
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ringattn import __version__
from ringattn.errors import DeviceError, PlanError, ProfileError
from ringattn.hardware import HardwareFacts, fingerprint_name
from ringattn.profile import LinkSpeed, PlanEntry, Policy, Profile
from ringattn.profile_io import dump_profile, load_profile, parse_profile, save_profile
from ringattn.profile_paths import collect, home_folder, user_folder
from ringattn.resolve import resolve
from ringattn.wording import plural
from ringattn.workload import Tunables, Workload, describe

from .budget import EFFORTS, Budget, EffortPreset, Progress, allot, spare_s
from .emit import build_profile, check_obeyed, entry_of, merged, merged_speeds, report_of, same_machine
from .evaluator import Clock, Evaluator, Fault, KnowsLinks, MonotonicClock
from .exit_codes import DeviceBusy, Inconclusive, NoDevice, ProbeFailure
from .grid import Cell, between, cells_for
from .probe import (
    CellReport,
    DryCell,
    DryRun,
    ProbeObserver,
    ProbeRequest,
    ProbeResult,
    TrialOutcome,
    VerifyResult,
)
from .space import Machine, Space, build_space, machine_of

if TYPE_CHECKING:
    from .bench import BenchSettings
    from .cell import CellContext, CellResult, SearchSettings
    from .lessons import Lessons
    from .search import CellSearch
    from .store import Store

OWED = "its default stayed and was right at its own length, but no time was left to prove it at others"
RESERVE_S = 4.0  # for writing, reloading and running every cell once
HANG_S = {"cpu": 6.0, "nvidia": 25.0}  # a GPU kernel may have to be compiled first

EvaluatorFactory = Callable[[HardwareFacts, ProbeRequest, EffortPreset], Evaluator]


@dataclass(frozen=True, slots=True)
class Edge:
    """Everything a probe takes from the world outside; tests put a recorded machine there."""

    facts: HardwareFacts
    machine: Machine
    policy: Policy
    evaluator: EvaluatorFactory
    clock: Clock
    environ: Mapping[str, str]
    home: Path
    today: datetime.date


def real_edge(request: ProbeRequest) -> Edge:
    """This machine; raises NoDevice for one that is absent or that nobody has measured."""
    from ringattn.hardware import detect

    try:
        return edge_of(detect(request.device), _worker_evaluator)
    except DeviceError as error:
        raise NoDevice(str(error)) from None


def edge_of(facts: HardwareFacts, evaluator: EvaluatorFactory) -> Edge:
    """This user's surroundings of a machine with these facts."""
    located, _ = collect(heuristics_only=True)
    policy = resolve(located, facts).heuristic.policy
    assert policy is not None
    return Edge(
        facts=facts,
        machine=machine_of(facts),
        policy=policy,
        evaluator=evaluator,
        clock=MonotonicClock(),
        environ=os.environ,
        home=home_folder(),
        today=datetime.datetime.now(tz=datetime.UTC).date(),
    )


def _device_name(request: ProbeRequest, facts: HardwareFacts) -> str:
    if request.device is not None:
        return request.device
    return "cpu" if facts.vendor == "cpu" else "cuda"


def _worker_evaluator(facts: HardwareFacts, request: ProbeRequest, preset: EffortPreset) -> Evaluator:
    from .trial import WorkerEvaluator

    return WorkerEvaluator(bench_settings(facts, request, preset), reference_timeout_s=preset.budget_s)


def bench_settings(facts: HardwareFacts, request: ProbeRequest, preset: EffortPreset) -> BenchSettings:
    """What the bench of a worker has to know of a probe."""
    from .bench import BenchSettings

    return BenchSettings(
        device=_device_name(request, facts),
        facts=facts,
        seed=request.seed,
        sample_target_ms=preset.sample_target_ms,
        ragged_lengths=preset.ragged_lengths,
        train_too=not request.modes or "train" in request.modes,
        varied_lengths=request.varied_lengths,
    )


# --- the entry points ------------------------------------------------------------------------------------------------


def probe(request: ProbeRequest, observer: ProbeObserver, edge: Edge | None = None) -> ProbeResult:
    """See ``autotune.probe.run_probe``."""
    if request.dry_run:
        edge = edge or real_edge(request)
        return _dry_run(request, observer, edge, cells_for(request, edge.facts))
    with _surroundings(request, edge) as edge:
        path = request.output or default_profile_path(edge, request.ranks)
        cells = cells_for(request, edge.facts)
        with _device_lock(request, edge):
            return _Probe(request, observer, edge, path, cells).run()


def verify(path: Path, request: ProbeRequest, observer: ProbeObserver, edge: Edge | None = None) -> VerifyResult:
    """See ``autotune.probe.verify_profile``."""
    from .verifying import check_same_silicon, entries_over, verify_cells

    profile = load_profile(path)
    if profile.source != "measured" or not profile.plans:
        raise ProbeFailure(f"{path}: holds no measured plans, so there is nothing to verify; run: ringtune probe")
    entries = entries_over(profile, request.ranks, path)
    if left_out := len(profile.plans) - len(entries):
        observer.note(f"{path.name}: {plural(left_out, 'row')} for other numbers of ranks left out")
    preset = EFFORTS[request.effort].with_budget(request.budget_s)
    with _surroundings(request, edge) as edge:
        check_same_silicon(profile, edge.facts, path)
        with _device_lock(request, edge):
            return verify_cells(profile, entries, request, preset, observer, edge)


def default_profile_path(edge: Edge, ranks: int = 1) -> Path:
    """Where the runtime of this user looks first, under a name that tells machines and numbers of ranks apart."""
    over = f"-x{ranks}" if ranks > 1 else ""
    return user_folder(edge.environ, edge.home) / f"{fingerprint_name(edge.facts)}{over}.yaml"


@contextlib.contextmanager
def _surroundings(request: ProbeRequest, edge: Edge | None) -> Iterator[Edge]:
    """``edge`` if given, else this machine, or all ranks of the request: they are there until the block is left."""
    if edge is not None:
        yield edge
    elif request.ranks == 1:
        yield real_edge(request)
    else:
        from .ranks.surroundings import edge_of_ranks

        with edge_of_ranks(request) as found:
            yield found


# --- preparation -----------------------------------------------------------------------------------------------------


def space_for(cell: Cell, edge: Edge, layout: str = "auto") -> Space:
    """The space around the default plan; raises PlanError when nothing can run the workload.

    ``layout`` is that of a sequence over several ranks; auto is what the module takes by rule.
    """
    from ringattn.plan import Conditions, heuristic_tunables

    conditions = Conditions(layout="" if layout == "auto" else layout)
    default = heuristic_tunables(cell.workload, edge.policy, edge.facts, conditions=conditions)
    reasons = edge.machine.reasons(cell.workload, default)
    if reasons:
        raise PlanError(f"cannot run {cell.workload}", {describe(default): reasons})
    dtypes = tuple(dict.fromkeys((*cell.main_dtypes, default.dtype, *cell.narrow_dtypes)))
    return build_space(cell.workload, edge.machine, default, dtypes)


def _edge_for(edge: Edge, preset: EffortPreset) -> Edge:
    """The edge as an effort looks at it: each tile shape costs 1 to 3 s of compilation and buys a few percent, so that
    only the full one tries them; trying flash-attn-4's took 30 of a standard probe's 170 s on an H100."""
    if preset.name == "full":
        return edge
    plain = dataclasses.replace(edge.machine, params=lambda workload, kernel, dtype: {}, fuses=lambda dtype: False)
    return dataclasses.replace(edge, machine=plain)


def _dry_run(request: ProbeRequest, observer: ProbeObserver, edge: Edge, cells: Sequence[Cell]) -> ProbeResult:
    """What a probe would do. The time of a call is unknown without measuring, so the estimate is the budget's split."""
    preset = EFFORTS[request.effort].with_budget(request.budget_s)
    edge = _edge_for(edge, preset)
    rows, knobs = [], dict[str, dict[str, None]]()
    spaces = [(cell, _space_or_refusal(cell, edge, request.layout)) for cell in cells]
    sizes = [space.size() if isinstance(space, Space) else 0 for _, space in spaces]
    share = max(0.0, preset.budget_s - RESERVE_S) / max(1, sum(size > 0 for size in sizes))
    for (cell, space), size in zip(spaces, sizes, strict=True):
        if isinstance(space, PlanError):
            rows.append(DryCell(cell.workload, (), 0, 0.0, tuple(space.rejected.items())))
            continue
        names = tuple(dict.fromkeys(_kernel_names(plan) for plan in space.kernel_plans))
        rows.append(DryCell(cell.workload, names, size, share, space.rejected))
        for name, values in space.searched():
            knobs.setdefault(name, {}).update(dict.fromkeys(values))
    tunables = tuple((name, tuple(values)) for name, values in knobs.items())
    dry = DryRun(tuple(rows), preset.budget_s, tunables)
    observer.plan([cell.workload for cell in cells], preset.budget_s)
    result = ProbeResult(None, None, (), 0.0, dry_run=dry)
    observer.finished(result)
    return result


def _space_or_refusal(cell: Cell, edge: Edge, layout: str) -> Space | PlanError:
    try:
        return space_for(cell, edge, layout)
    except PlanError as error:
        return error


def _kernel_names(plan: Tunables) -> str:
    branch = plan.branches[0]
    return f"{branch.forward}/{branch.backward}" if branch.backward else branch.forward


@contextlib.contextmanager
def _device_lock(request: ProbeRequest, edge: Edge) -> Iterator[None]:
    """One probe per device and user: two would spoil each other's numbers. Dies with the process."""
    base = edge.environ.get("XDG_STATE_HOME") or str(edge.home / ".local" / "state")
    folder = Path(base) / "ringtune"
    folder.mkdir(parents=True, exist_ok=True)
    name = _device_name(request, edge.facts).replace(":", "-")
    with (folder / f"{name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeviceBusy(f"{name}: another probe is measuring it; wait, or choose another --device") from None
        yield


# --- the probe -------------------------------------------------------------------------------------------------------


class _Telling:
    """A search's listener that passes on to the observer, with the time left."""

    def __init__(self, observer: ProbeObserver, tell_time: Callable[[], None]) -> None:
        self._observer = observer
        self._tell_time = tell_time

    def stage(self, cell: Workload, name: str) -> None:
        self._observer.stage(cell, name)
        self._tell_time()

    def trial(self, cell: Workload, tunables: Tunables, outcome: TrialOutcome) -> None:
        self._observer.trial(cell, describe(tunables), outcome)
        self._tell_time()


class _Probe:
    """One run. State that must survive a kill is in the store, everything else here."""

    def __init__(
        self, request: ProbeRequest, observer: ProbeObserver, edge: Edge, path: Path, cells: Sequence[Cell]
    ) -> None:
        self.request = request
        self.observer = observer
        self.preset = EFFORTS[request.effort].with_budget(request.budget_s)
        self.edge = _edge_for(edge, self.preset)
        self.path = path
        self.cells = tuple(cells)
        self.entries: dict[Workload, PlanEntry] = {}
        self.reports: dict[Workload, CellReport] = {}
        self.finished: dict[Workload, CellContext] = {}
        self.searched: list[CellSearch] = []
        self.winners: dict[Workload, Tunables] = {}
        self.notes: list[str] = []
        self._current: tuple[Workload, float] | None = None
        self.link_speed: LinkSpeed | None = None
        self._old: Profile | None = None
        self.lessons: Lessons  # of the journal, once that is open

    def run(self) -> ProbeResult:
        began = self.edge.clock.now()
        old = self._old = self._old_profile()
        if old is not None:
            verified = self._verify(old) if self.request.resume else None
            if verified is not None:
                return verified
        from .lessons import Lessons
        from .store import Store, journal_path

        journal = journal_path(self.path, self.edge.environ, self.edge.home)
        with Store(journal, identity=self._identity(), fresh=not self.request.resume) as store:
            if store.recall("finished"):  # of an earlier probe that came to its end: nothing to go on with
                store.start_over()
            for note in store.notes:
                self.observer.note(note)
            self.lessons = Lessons(store)
            evaluator = self.edge.evaluator(self.edge.facts, self.request, self.preset)
            try:
                spent_s = self.edge.clock.now() - began
                self._look_at_links(store, evaluator)  # starts the ranks' workers, which the budget does not pay for
                budget = Budget(self.preset.budget_s, self.edge.clock, reserve_s=RESERVE_S, spent_s=spent_s)
                self._measure(store, evaluator, budget)
                result = self._emit(store, evaluator, budget, old)
            finally:
                evaluator.close()
        self.observer.finished(result)
        return result

    def _identity(self) -> str:
        """What a journal belongs to: machine, software, request and the version of the tool."""
        asked = dataclasses.asdict(dataclasses.replace(self.request, output=None, resume=True, dry_run=False))
        facts = dataclasses.asdict(self.edge.facts)
        text = json.dumps([__version__, asked, facts], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()

    def _look_at_links(self, store: Store, evaluator: Evaluator) -> None:
        """How fast the ranks can exchange messages, once a probe; an interrupted one has it in its journal."""
        if not isinstance(evaluator, KnowsLinks):
            return
        kept = store.recall("links")
        if kept is None:
            kept = dataclasses.asdict(evaluator.links())
            store.remember("links", kept)
        self.link_speed = LinkSpeed(**kept)

    # --- what is there already ------------------------------------------------------------------------------------

    def _old_profile(self) -> Profile | None:
        """A profile of this very machine and software at the output path, whose other rows stay; others are replaced.

        A broken file is replaced by ``--fresh`` alone: nobody's file is overwritten unseen.
        """
        if not self.path.exists():
            return None
        try:
            profile = load_profile(self.path)
        except ProfileError as error:
            if self.request.resume:
                raise
            self.observer.note(f"{error}; it will be replaced")
            return None
        if profile.source != "measured" or not same_machine(profile, self.edge.facts):
            self.observer.note(f"{self.path.name}: of another machine or other software; it will be replaced")
            return None
        return profile

    def _verify(self, old: Profile) -> ProbeResult | None:
        """Re-time what is recorded instead of searching again; None when the request asks for more than that."""
        from .verifying import verify_cells

        wanted = {cell.workload for cell in self.cells}
        recorded = [
            entry
            for entry in old.plans
            if entry.workload in wanted and entry.choice is not None and entry.choice.evidence is not None
        ]
        if len(recorded) < len(wanted):
            return None
        self.observer.note(f"{self.path.name}: of this machine already; verifying instead of searching")
        outcome = verify_cells(old, recorded, self.request, self.preset, self.observer, self.edge, tell_end=False)
        stale = {cell.workload for cell in outcome.cells if cell.stale}
        if stale:
            for line in outcome.stale:
                self.observer.note(f"stale, searching again: {line}")
            self.cells = tuple(cell for cell in self.cells if cell.workload in stale)
            return None
        reports = tuple(
            CellReport(
                workload=cell.workload,
                status="resumed",
                chosen=cell.recorded,
                note=cell.note or "still the winner",
            )
            for cell in outcome.cells
        )
        result = ProbeResult(self.path, old, reports, outcome.elapsed_s, outcome.inconclusive, verified=True)
        self.observer.finished(result)
        return result

    # --- measuring ------------------------------------------------------------------------------------------------

    def _measure(self, store: Store, evaluator: Evaluator, budget: Budget) -> None:
        self.observer.plan([cell.workload for cell in self.cells], self.preset.budget_s)
        todo = [cell for cell in self.cells if not self._recalled(store, cell)]
        searches = self._settle(store, evaluator, budget, todo)
        needs = {workload: search.need() for workload, search in searches.items()}
        self.progress = Progress(budget, needs)
        self._tell_time()
        order = sorted(searches, key=lambda w: (w.seq_len, w.mode, not w.pattern.dense, str(w.pattern)))
        for index, workload in enumerate(order):
            ahead = [needs[w] for w in order[index:]]
            shares = allot(ahead, budget.available_s())
            self._search(store, searches[workload], budget, shares[0], spare_s(shares, budget.available_s()))
        if self.preset.refine_anchors:
            self._refine(store, evaluator, budget)
        self._prove_defaults(store, evaluator, budget)

    def _prove_defaults(self, store: Store, evaluator: Evaluator, budget: Budget) -> None:
        """Defaults that stayed without a proof at other lengths get it out of the time that is left, cheapest first.

        They are what the runtime takes there in any case; one that fails makes room for another plan.
        """
        owing = [search for search in self.searched if search.context.owes_proof]
        owing += self._owing_of_earlier_run(store, evaluator, budget)
        broken: list[tuple[CellSearch, Fault]] = []
        for search in sorted(owing, key=lambda search: search.context.prove_s()):
            if budget.available_s() < search.context.prove_s():
                continue
            fault = search.pay()
            if fault is None:
                self._settle_debt(store, search.context.cell)
            else:
                broken.append((search, fault))
        for index, (search, fault) in enumerate(broken):
            share_s = budget.available_s() / (len(broken) - index)
            result = search.run_without_default(fault, budget.deadline(share_s))
            self._conclude(store, search.context, result, self.reports[result.workload].elapsed_s)

    def _owing_of_earlier_run(self, store: Store, evaluator: Evaluator, budget: Budget) -> list[CellSearch]:
        """Cells that an interrupted probe finished and left owing, where their default is still found to be that."""
        searched = {search.context.cell for search in self.searched}
        owing = []
        for cell in self.cells:
            if cell.workload in searched or OWED not in self.reports[cell.workload].note:
                continue
            choice = self.entries[cell.workload].choice
            search = self._new_search(store, evaluator, cell)
            if search is None or choice is None or search.settle(budget.deadline(budget.available_s())) is not None:
                continue
            if search.context.default == choice.tunables:
                owing.append(search)
        return owing

    def _settle_debt(self, store: Store, cell: Workload) -> None:
        report = self.reports[cell]
        note = "; ".join(part for part in report.note.split("; ") if part != OWED)
        self._keep(store, self.entries[cell], dataclasses.replace(report, note=note))

    def _recalled(self, store: Store, cell: Cell) -> bool:
        """Whether an earlier run finished this cell; then its row is taken from the journal."""
        kept = store.recall(f"cell | {cell.workload}")
        if kept is None:
            return False
        entry = parse_profile(kept["profile"], "journal").plans[0]
        self.entries[cell.workload] = entry
        report = dict(kept["report"])
        self.reports[cell.workload] = CellReport(
            workload=cell.workload,
            chosen=entry.choice.tunables if entry.choice else None,
            default=entry.default.tunables if entry.default else None,
            **report,
        )
        if entry.choice is not None:
            self.winners[cell.workload] = entry.choice.tunables
        return True

    def _settle(
        self, store: Store, evaluator: Evaluator, budget: Budget, cells: Sequence[Cell]
    ) -> dict[Workload, CellSearch]:
        """The default of every cell, checked and proven: the yardstick of the budget, and of everything else."""
        searches: dict[Workload, CellSearch] = {}
        kept_s = 0.5 * self.preset.budget_s  # half of the time, at most, may go into yardsticks
        for cell in cells:
            search = self._new_search(store, evaluator, cell)
            if search is None:
                continue
            fault = search.settle(budget.deadline(max(0.0, budget.available_s() - kept_s)))
            if cell is cells[0]:  # the worker was started for it, which is nobody's yardstick
                kept_s = min(kept_s, 0.5 * budget.available_s())
            if fault is None:
                searches[cell.workload] = search
            elif fault.from_outside:  # no verdict on any plan
                self._finish(store, search.context.inconclusive(fault.message), 0.0)
            else:
                refused = search.context.result("refused", f"no plan could be run and proven: {fault.message}")
                self._finish(store, refused, 0.0)
        return searches

    def _new_search(self, store: Store, evaluator: Evaluator, cell: Cell) -> CellSearch | None:
        from .cell import CellContext
        from .search import CellSearch

        space = _space_or_refusal(cell, self.edge, self.request.layout)
        if isinstance(space, PlanError):
            self.entries[cell.workload] = PlanEntry(cell.workload, refusal=str(space))
            self.reports[cell.workload] = CellReport(cell.workload, "refused", note=str(space))
            return None
        context = CellContext(
            space,
            evaluator,
            store,
            self._settings(),
            _Telling(self.observer, self._tell_time),
            self.edge.clock,
            main_dtypes=cell.main_dtypes,
            lessons=self.lessons,
        )
        return CellSearch(context)

    def _settings(self) -> SearchSettings:
        from .cell import SearchSettings
        from .race import Limits

        limit = self.request.memory_limit_mib
        return SearchSettings(
            preset=self.preset,
            seed=self.request.seed,
            limits=Limits(None if limit is None else limit * 2**20, self.request.max_error),
            prefer=self.request.prefer,
            hang_s=min(HANG_S[self.edge.facts.vendor], 0.1 * self.preset.budget_s),
        )

    def _search(self, store: Store, search: CellSearch, budget: Budget, share_s: float, spare_s: float) -> None:
        """``spare_s`` makes up for what this cell should not pay for alone: crashes, hangs, compilation."""
        from .nearby import Nearby

        context = search.context
        cell = context.cell
        began, lost_before_s = self.edge.clock.now(), context.evaluator.lost_s
        self._current = (cell, began)
        if share_s < search.least_s():
            self._finish(store, context.inconclusive("no time was left for it; give a larger --budget"), 0.0)
            return
        result = search.run(
            budget.working_deadline(share_s, lambda: context.evaluator.lost_s, spare_s),
            seeds=self._seeds(cell),
            nearby=Nearby((other.cell, other.estimates) for other in self._alike(cell)),
        )
        taken = self.edge.clock.now() - began
        self._current = None
        self.progress.finish(cell, max(0.0, taken - (context.evaluator.lost_s - lost_before_s)))
        self.finished[cell] = context
        self.searched.append(search)
        self._conclude(store, context, result, taken)

    def _conclude(self, store: Store, context: CellContext, result: CellResult, taken_s: float) -> None:
        """A searched cell's row, with what only its search knows."""
        if result.choice is not None and result.default is not None:
            result.singles = context.singles(result.default.median_ms)
        if context.owes_proof:
            result.note = "; ".join(filter(None, (result.note, OWED)))
        self._finish(store, result, taken_s)

    def _finish(self, store: Store, result: CellResult, taken_s: float) -> None:
        self._keep(store, entry_of(result), report_of(result, taken_s))
        self.notes.extend(result.disturbances)

    def _keep(self, store: Store, entry: PlanEntry, report: CellReport) -> None:
        """A row as it stands, here and in the journal."""
        cell = entry.workload
        self.entries[cell], self.reports[cell] = entry, report
        if entry.choice is not None:
            self.winners[cell] = entry.choice.tunables
        fields = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
        kept = {name: value for name, value in fields.items() if name not in ("workload", "chosen", "default")}
        text = dump_profile(self._profile({cell: entry}, 0.0))
        store.remember(f"cell | {cell}", {"profile": text, "report": kept})
        self._tell_time()

    def _alike(self, cell: Workload) -> list[CellContext]:
        """The finished cells that differ in length only, nearest first."""
        alike = [done for done in self.finished if done.at(cell.seq_len) == cell]
        return [self.finished[done] for done in sorted(alike, key=lambda done: abs(done.seq_len - cell.seq_len))]

    def _seeds(self, cell: Workload) -> tuple[Tunables, ...]:
        """Winners at other lengths of the same question, nearest first."""
        alike = [done for done in self.winners if done.at(cell.seq_len) == cell and done != cell]
        alike.sort(key=lambda done: abs(done.seq_len - cell.seq_len))
        return tuple(dict.fromkeys(self.winners[done] for done in alike[:2]))

    def _refine(self, store: Store, evaluator: Evaluator, budget: Budget) -> None:
        """While time remains, a new anchor between neighbouring lengths whose winners differ."""
        for middle in self._disagreements():
            if budget.available_s() < self._typical_cell_s():
                return
            if self._recalled(store, middle):
                continue
            search = self._new_search(store, evaluator, middle)
            if search is None or search.settle(budget.deadline(budget.available_s())) is not None:
                continue
            need = search.need()
            self.progress.add(middle.workload, need)
            share_s = min(need.total_s, budget.available_s())
            self._search(store, search, budget, share_s, budget.available_s() - share_s)

    def _disagreements(self) -> list[Cell]:
        found = []
        by_question: dict[Workload, list[Cell]] = {}
        for cell in self.cells:
            if self.reports[cell.workload].status in ("tuned", "default"):
                by_question.setdefault(cell.workload.at(1), []).append(cell)
        for group in by_question.values():
            group.sort(key=lambda cell: cell.workload.seq_len)
            for shorter, longer in itertools.pairwise(group):
                middle = between(shorter, longer)
                if middle is not None and not self._agree(shorter.workload, longer.workload):
                    found.append(middle)
        return found

    def _agree(self, one: Workload, other: Workload) -> bool:
        """Whether the same kernels and schedule won; lesser knobs are not worth another anchor."""
        first, second = self.winners[one], self.winners[other]
        return all(getattr(first, name) == getattr(second, name) for name in ("dtype", "branches", "schedule"))

    def _typical_cell_s(self) -> float:
        taken = sorted(report.elapsed_s for report in self.reports.values() if report.elapsed_s > 0)
        return taken[len(taken) // 2] if taken else 0.0

    def _tell_time(self) -> None:
        progress: Progress | None = getattr(self, "progress", None)
        if progress is None:
            return
        current, taken = None, 0.0
        if self._current is not None:
            current, began = self._current
            taken = self.edge.clock.now() - began
        self.observer.eta(progress.fraction(current, taken), progress.remaining_s(current, taken))

    # --- the end --------------------------------------------------------------------------------------------------

    def _profile(self, entries: Mapping[Workload, PlanEntry], elapsed_s: float) -> Profile:
        return build_profile(
            self.edge.facts,
            entries,
            self.request,
            budget_s=self.preset.budget_s,
            elapsed_s=elapsed_s,
            notes=tuple(dict.fromkeys(self.notes)),
            today=self.edge.today,
            link_speeds=merged_speeds(self._old, self.link_speed),
        )

    def _emit(self, store: Store, evaluator: Evaluator, budget: Budget, old: Profile | None) -> ProbeResult:
        """Let the runtime read the profile, run every new row once and compare; only then does it replace the old."""
        inconclusive = tuple(
            f"{report.workload}: {report.note}" for report in self.reports.values() if report.status == "inconclusive"
        )
        if len(inconclusive) == len(self.reports):
            store.remember("finished", True)  # the next run must measure anew, not read the same numbers again
            raise Inconclusive(f"no cell could be measured; {inconclusive[0]}")
        self.notes.extend(getattr(evaluator, "blind_spots", ()))
        owing = sum(OWED in report.note for report in self.reports.values())
        if owing:
            self.notes.append(f"{owing} cell{'s' * (owing > 1)}: {OWED}")
        self.notes.extend(f"not tried any further: {why}" for why in self.lessons.lost.values())
        # A row without a plan makes the runtime refuse: only what nothing can run may be one.
        entries = {
            workload: entry
            for workload, entry in self.entries.items()
            if entry.choice is not None or self.reports[workload].status == "refused"
        }
        profile = self._profile(merged(old, entries), budget.elapsed_s())
        with tempfile.TemporaryDirectory(prefix="ringtune-") as folder:
            rehearsal = Path(folder) / self.path.name
            save_profile(profile, rehearsal)
            for entry in entries.values():
                if entry.choice is not None:
                    planned = evaluator.obey(entry.workload, str(rehearsal), timeout_s=60.0)
                    check_obeyed(entry, planned)
        save_profile(profile, self.path)
        store.remember("finished", True)
        return ProbeResult(self.path, profile, tuple(self.reports.values()), budget.elapsed_s(), inconclusive)
