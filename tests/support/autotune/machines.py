"""Machines that exist only in tests: what they refuse, how fast plans are, and a probe's environment around them."""

from __future__ import annotations

import datetime
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from autotune.journal.store import Store
from autotune.journal.study.result import CellResult
from autotune.measure.evaluator import Checked, Evaluator, Fault
from autotune.measure.simulated import QUIET, ReplayEvaluator, Row, SimulatedClock, Trouble
from autotune.probe.machine.environment import Environment
from autotune.probe.request import ProbeRequest
from autotune.search.budget import EFFORTS, Budget, Deadline, EffortPreset
from autotune.search.limits import Limits
from autotune.search.loop import CellSearch
from autotune.search.settings import NoListener, SearchSettings
from autotune.space.space import Machine, Space, build_space, distance
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.preference import Launch, Preference
from ringattn.profile.schema import Policy
from ringattn.workload import BranchTunables, Mode, Pattern, Tunables, Workload

MIB = 2**20
FACTS = HardwareFacts(
    vendor="cpu",
    device_name="Invented CPU",
    sku="invented",
    arch="x86_64",
    sm_count=2,
    memory_mib=16384,
    l2_mib=32,
    threads=2,
    software=(("torch", "2.13.0"),),
)
H100 = replace(
    FACTS,
    vendor="nvidia",
    device_name="NVIDIA H100 80GB HBM3",
    sku="h100-sxm",
    arch="sm_90",
    sm_count=132,
    memory_mib=81559,
    l2_mib=50,
    threads=0,
    software=(("torch", "2.11.0"), ("triton", "3.6.0")),
)
POLICY = Policy(
    compute_dtype=(("bf16", "fp32"), ("fp16", "fp32"), ("fp32", "fp32"), ("fp64", "fp64")),
    forward=("flash-cpu", "math"),
    backward=("flash-cpu", "math"),
    copy_from_rate=2,
)
LONGNET = Pattern.of([512, 1024, 2048], [1, 2, 4])


def workload(seq_len: int = 4096, mode: Mode = "train", pattern: Pattern = LONGNET, dtype: str = "bf16") -> Workload:
    return Workload(mode, True, seq_len, 4, 64, dtype, pattern=pattern)


def plan(
    cell: Workload, forward: str = "quick", backward: str | None = None, *, dtype: str = "bf16", **changes: object
) -> Tunables:
    """One kernel pair on every branch, rows read in place."""
    back = (backward or forward) if cell.train else ""
    branches = tuple(BranchTunables(forward, back) for _ in cell.pattern.resolved(cell.seq_len))
    return Tunables(dtype, branches, **changes)  # type: ignore[arg-type]


def invented(kernels: tuple[str, ...] = ("quick", "swift", "math")) -> Machine:
    """Refuses what the runtime would refuse for having no effect, and nothing else."""

    def reasons(cell: Workload, tunables: Tunables) -> tuple[str, ...]:
        found = []
        if tunables.checkpoint == "none" and all(branch.gather == "view" for branch in tunables.branches):
            found.append("nothing is gathered that could be kept")
        if tunables.window_tokens is not None and tunables.window_tokens >= cell.seq_len:
            found.append("the window is no shorter than the sequence")
        if tunables.checkpoint == "offload" and "flash-cpu" in kernels:
            found.append("tensors are on the host already")
        return tuple(found)

    return Machine(kernels, reasons, lambda cell, tunables: tunables)


Truth = Callable[[Workload, Tunables], float]  # log(t / t_default)


def row_of(
    log_ratio: Truth,
    *,
    base_ms: float = 5.0,
    peak: Callable[[Tunables], int] = lambda tunables: MIB,
    error: Callable[[Tunables], float] = lambda tunables: 1e-3,
    host_us: Callable[[Tunables], float] = lambda tunables: 20.0,
    torch_kernel: str = "",
    faults: Mapping[Tunables, Fault] | None = None,
    unproven: Mapping[Tunables, Fault] | None = None,
) -> Callable[[Workload, Tunables], Row]:
    """True rows out of a function of the plan; ``unproven`` pass a check but not the ragged lengths."""

    def row(cell: Workload, tunables: Tunables) -> Row:
        fault = (faults or {}).get(tunables)
        if fault is not None:
            return Row(tunables, fault=fault)
        ms = base_ms * math.exp(log_ratio(cell, tunables))
        checked = Checked(ms, error(tunables), peak(tunables), ms, host_us(tunables), torch_kernel=torch_kernel)
        return Row(tunables, (ms,), checked, unproven=(unproven or {}).get(tunables))

    return row


@dataclass(slots=True)
class Trial:
    """One searched cell, with everything a test wants to look at."""

    space: Space
    search: CellSearch
    result: CellResult
    clock: SimulatedClock
    evaluator: ReplayEvaluator
    fault: Fault | None = None  # for which there was no search


@dataclass(slots=True)
class Setting:
    """How a test searches one cell."""

    cell: Workload
    truth: Truth
    default: Tunables
    machine: Machine = field(default_factory=invented)
    dtypes: tuple[str, ...] = ("bf16",)
    main_dtypes: tuple[str, ...] = ("bf16",)
    effort: str = "standard"
    budget_s: float = 9.0
    limits: Limits = field(default_factory=Limits)
    prefer: Preference = "time"
    trouble: Trouble = QUIET
    rows: Mapping[str, object] = field(default_factory=dict)
    asynchronous: bool = False
    launch: Launch = "eager"
    graphs: bool = False
    sampler: str = "auto"
    unproven: Mapping[Tunables, Fault] = field(default_factory=dict)

    def run(
        self,
        seed: int = 0,
        store: Store | None = None,
        undecided_s: float = 0.0,
        end_s: float = math.inf,
        seeds: Sequence[Tunables] = (),
    ) -> Trial:
        clock = SimulatedClock()
        evaluator = ReplayEvaluator(
            row_of(self.truth, unproven=self.unproven, **self.rows),  # type: ignore[arg-type]
            clock,
            seed,
            self.trouble,
        )
        space = build_space(self.cell, self.machine, self.default, self.dtypes)
        settings = SearchSettings(
            EFFORTS[self.effort],
            seed,
            self.limits,
            self.prefer,
            hang_s=2.0,
            asynchronous=self.asynchronous,
            launch=self.launch,
            graphs=self.graphs,
            sampler=self.sampler,
        )
        search = CellSearch(
            space,
            evaluator,
            store or Store(None),
            settings,
            NoListener(),
            clock,
            main_dtypes=self.main_dtypes,
            end=Deadline(clock, end_s),
        )
        search.state.undecided_s = undecided_s
        budget = Budget(self.budget_s, clock)
        fault = search.settle(budget.deadline(self.budget_s))
        if fault is not None:
            return Trial(space, search, search.refused(fault.message), clock, evaluator, fault)
        return Trial(space, search, search.run(budget.deadline(self.budget_s), seeds=seeds), clock, evaluator)


def far_from(cell: Workload, target: Tunables, per_knob: float = 0.08) -> Truth:
    """Every knob that differs from ``target`` costs as much: one hill, its top at ``target``."""

    def log_ratio(_: Workload, tunables: Tunables) -> float:
        return per_knob * distance(cell, tunables, target)

    return log_ratio


def by_kernels(**log_times: float) -> Truth:
    """The sum of the first branch's kernels; every other knob away from the plainest costs 10 %."""

    def truth(cell: Workload, tunables: Tunables) -> float:
        first = tunables.branches[0]
        uniform = plan(cell, first.forward, first.backward or None, dtype=tunables.dtype)
        frills = 0.1 * distance(cell, tunables, uniform)
        return frills + log_times[first.forward] + (log_times[first.backward] if first.backward else 0.0)

    return truth


def environment_of(
    tmp_path: Path,
    evaluator: Callable[[], Evaluator],
    clock: SimulatedClock,
    machine: Machine | None = None,
    facts: HardwareFacts = FACTS,
) -> Environment:
    """A probe's surroundings: an invented machine, folders of the test's own."""

    def factory(facts: HardwareFacts, request: ProbeRequest, preset: EffortPreset) -> Evaluator:
        return evaluator()

    return Environment(
        facts=facts,
        machine=machine or invented(("flash-cpu", "math")),
        policy=POLICY,
        evaluator=factory,
        clock=clock,
        environ={"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")},
        home=tmp_path,
        today=datetime.date(2026, 1, 2),
        devices=("cuda-invented",),
    )
