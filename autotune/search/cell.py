"""One cell under search: what is asked, what is known, and the few things every stage does with it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import optuna

from autotune import statistics
from autotune.journal.stage_record import Entry, StageRecord
from autotune.journal.store import Store
from autotune.measure.evaluator import Checked, Clock, Evaluator, Fault, Interference, Proven, largest_of_each
from autotune.outcome import TrialOutcome
from autotune.space.space import Space, Value, candidate_key
from autotune.statistics import Interval
from ringattn.planning.preference import Preference
from ringattn.workload import Tunables, Workload

from .arena import Arena
from .budget import Deadline, EffortPreset
from .choose import Candidate
from .ledger import Ledger
from .lessons import Lessons, Part, Pupil, without
from .limits import Limits
from .model import CellModel
from .nearby import Nearby, Timed

CellState = Literal["tuned", "default", "refused", "inconclusive"]

CALLS_BEFORE_HANG = 15  # a call may take this many times the default's before it counts as hung
COMPILING = ("compile", "final")  # stages whose plans may be compiled ones
UNKNOWN_SIGMA = 0.05  # noise assumed before any was seen


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """What holds for every cell of a probe. ``hang_s``: no call is given up before (compilation takes its time).

    ``asynchronous``: the device works while the host goes on, so that either may be waited for.
    """

    preset: EffortPreset
    seed: int
    limits: Limits = field(default_factory=Limits)
    prefer: Preference = "time"
    hang_s: float = 10.0
    asynchronous: bool = False


@dataclass(frozen=True, slots=True)
class Measured:
    """A plan with its numbers, ready for a profile."""

    tunables: Tunables
    checked: Checked
    gain: Interval  # of log(t / t_default); a count of 0 says it was never timed
    median_ms: float
    first_call_ms: float  # at a length never met before


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
    singles: tuple[Measured, ...] = ()  # of each kernel used alone in both directions, its fastest plan
    failures: dict[Tunables, Fault] = field(default_factory=dict)
    trials: int = 0
    noise_sigma: float = math.inf
    note: str = ""
    disturbances: tuple[Interference, ...] = ()
    validation_pending: bool = False  # of the default, which stays, at other lengths


class Listener(Protocol):
    """What a search tells."""

    def stage(self, cell: Workload, name: str) -> None: ...

    def trial(self, cell: Workload, tunables: Tunables, outcome: TrialOutcome) -> None: ...


class NoListener:
    """Hears and says nothing."""

    def stage(self, cell: Workload, name: str) -> None: ...

    def trial(self, cell: Workload, tunables: Tunables, outcome: TrialOutcome) -> None: ...


class CellContext:
    """The state of one cell's search. Stages read and extend it; nothing else knows all of it."""

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
        lessons: Lessons | None = None,
        end: Deadline | None = None,
    ) -> None:
        """``main_dtypes`` are the compute dtypes that may win; others compete for ``auto`` only.

        ``lessons`` are what the other cells of the probe taught. ``end`` is the probe's: a cell may run into the time
        of others, but nothing it starts goes beyond that.
        """
        self._whole_space = space
        self._spaces: dict[frozenset[Part], Space] = {}
        self.cell = space.workload
        self.lessons = lessons if lessons is not None else Lessons()
        self.nearby: Nearby | None = None
        self.seeds: Sequence[Tunables] = ()  # worth trying first
        self.owes_proof = False  # of its default, at other lengths
        self.undecided_s = 0.0  # beyond its time, that a final may take which noise keeps from an answer
        self.evaluator = Pupil(evaluator, self.lessons, clock)
        self.store = store
        self.settings = settings
        self.preset = settings.preset
        self.listener = listener
        self.clock = clock
        self.end = end if end is not None else Deadline(clock, math.inf)
        self.main_dtypes = frozenset(main_dtypes)
        self.default = space.default
        self.ledger = Ledger(asynchronous=settings.asynchronous, pace=self.lessons.pace)
        self.estimates: dict[Tunables, Interval] = {}  # log-ratio of every timed plan, over all stages
        self._readings: dict[Tunables, dict[str, list[float]]] = {}  # by stage
        self.trials = 0
        self.note = ""
        self.compared_with = ""  # part of the names of stages, once the heuristic's default had to be replaced

    @property
    def space(self) -> Space:
        """What is worth trying here: without kernels that cannot be loaded, or were hopeless at a length nearby."""
        parts = frozenset(
            self.lessons.lost_parts() | (self.nearby.hopeless_parts(self.default) if self.nearby else set())
        )
        if parts not in self._spaces:
            self._spaces[parts] = without(self._whole_space, parts)
        return self._spaces[parts]

    # --- questions ----------------------------------------------------------------------------------------------

    def is_main(self, plan: Tunables) -> bool:
        return plan.dtype in self.main_dtypes

    def has_failed(self, plan: Tunables) -> bool:
        return isinstance(self.ledger.checked.get(plan), Fault) or isinstance(self.ledger.proven.get(plan), Fault)

    def silent_kernels(self) -> set[str]:
        """Kernels of plans that did not answer in time, and of no plan that ran: each more of them costs as much."""
        hung: set[str] = set()
        ran: set[str] = set()
        for plan, result in self.ledger.checked.items():
            if isinstance(result, Checked):
                ran |= plan.kernels
            elif result.kind == "timeout":
                hung |= plan.kernels
        return hung - ran

    def keeps_limits(self, plan: Tunables) -> bool:
        checked = self.ledger.checked.get(plan)
        return isinstance(checked, Checked) and self.settings.limits.keeps(checked)

    def may_be_chosen(self, plan: Tunables) -> bool:
        """Whether it is right as far as is known, within the limits, and of a dtype that may win."""
        return self.is_main(plan) and self.keeps_limits(plan) and not self.has_failed(plan)

    def checked(self, plan: Tunables) -> Checked:
        result = self.ledger.checked[plan]
        assert isinstance(result, Checked), f"{plan} has no numbers: {result}"
        return result

    def candidate(self, plan: Tunables, gain: Interval) -> Candidate:
        return Candidate(plan, gain, self.checked(plan).peak_bytes, self.keeps_limits(plan))

    def timed(self) -> Timed:
        """What this cell says to others."""
        plans = self.estimates.keys()
        return Timed(
            self.cell,
            self.estimates,
            narrow=frozenset(plan for plan in plans if not self.is_main(plan)),
            ruled_out=frozenset(plan for plan in plans if self.has_failed(plan) or not self.keeps_limits(plan)),
            launch_bound=frozenset(plan for plan in plans if self.ledger.launches_too_long(plan, self.default)),
        )

    def call_s(self) -> float:
        """A warm call of the default; 0 before it was checked."""
        known = self.ledger.checked.get(self.default)
        return known.call_ms / 1e3 if isinstance(known, Checked) else 0.0

    def waited_s(self) -> float:
        """The same where it is waited for: the device's time or the host's, whichever is longer."""
        known = self.ledger.checked.get(self.default)
        return max(known.call_ms / 1e3, known.host_us / 1e6) if isinstance(known, Checked) else 0.0

    def sample_s(self) -> float:
        """About what one sample of a plan takes."""
        return self.ledger.sample_s(self.default, self.preset.sample_target_ms / 1e3)

    def prove_s(self, plan: Tunables | None = None) -> float:
        """About what proving a plan takes, or ``plan`` if its kernels were proven here already."""
        lengths = math.ceil((1 + self.preset.ragged_lengths) / self.evaluator.validation_workers)
        if plan is not None and self.lessons.has_proven(self.cell, plan):
            return self.lessons.proof_s(self.cell, plan, self.call_s(), lengths, compiled=True)
        return self.lessons.proof_s(self.cell, self.default, self.call_s(), lengths)

    def timeout_s(self) -> float:
        return self.settings.hang_s + CALLS_BEFORE_HANG * self.call_s()

    def sigma(self) -> float:
        """Standard deviation of one paired log-ratio; before it was seen that of other cells, or what is assumed."""
        sigma = self.ledger.noise_sigma()
        return sigma if math.isfinite(sigma) else self.lessons.usual_sigma(UNKNOWN_SIGMA)

    def ranked(self, plans: Iterable[Tunables]) -> list[Tunables]:
        """Fastest first, each reading drawn towards what its parts did elsewhere: the luckiest of many must not win."""
        timed = {plan: (i.median, i.count) for plan, i in self.estimates.items() if not self.has_failed(plan)}
        if not timed:
            return []
        model = CellModel(self.cell, self.space.knobs, timed, sigma=self.sigma())
        return sorted((plan for plan in plans if plan in timed), key=model.believed)

    def best_plan(self) -> Tunables:
        ranked = self.ranked(p for p in self.estimates if self.is_main(p) and self.keeps_limits(p))
        return ranked[0] if ranked else self.default

    # --- acts ---------------------------------------------------------------------------------------------------

    def record(self, stage: str, knobs: Mapping[str, tuple[Value, ...]] | None = None) -> StageRecord:
        sampler: optuna.samplers.BaseSampler | None = None
        if stage == "explore":
            sampler = optuna.samplers.TPESampler(seed=self.settings.seed, n_startup_trials=8)
        if knobs is None:
            knobs = self._sampled_knobs() if stage == "explore" else self._whole_space.knobs
            if stage in COMPILING:
                knobs = {**knobs, "compile": (False, True)}
        base = None if sampler is not None else self.default
        return self.store.stage(self.cell, stage + self.compared_with, knobs, sampler, base)

    def _sampled_knobs(self) -> Mapping[str, tuple[Value, ...]]:
        """Those of the space as it is when first asked for: a study's values may not change, in no later run either."""
        name = f"sampled | {self.cell}"
        kept = self.store.recall(name)
        if kept is None:
            kept = {knob: list(values) for knob, values in self.space.knobs.items()}
            self.store.remember(name, kept)
        return {knob: tuple(values) for knob, values in kept.items()}

    def arena(
        self, stage: str, record: StageRecord, default: Tunables | None = None, timeout_s: float | None = None
    ) -> Arena:
        return Arena(
            cell=self.cell,
            stage=stage,
            evaluator=self.evaluator,
            record=record,
            ledger=self.ledger,
            default=default or self.default,
            limits=self.settings.limits,
            seed=self.settings.seed,
            timeout_s=self.timeout_s() if timeout_s is None else timeout_s,
            sample_s=self.preset.sample_target_ms / 1e3,
            clock=self.clock,
            listener=self.told,
        )

    def told(self, plan: Tunables, outcome: TrialOutcome) -> None:
        self.trials += 1
        self.listener.trial(self.cell, plan, outcome)

    def learn(self, arena: Arena, entries: Iterable[Entry]) -> None:
        """Pool what a stage timed with what the others did, and keep every outcome of an earlier run."""
        polished = arena.polished()
        for entry in entries:
            result = entry.fault or entry.checked
            if result is not None:
                self.ledger.checked.setdefault(entry.tunables, result)
            if entry.log_ratios and entry.fault is None:
                readings = self._readings.setdefault(entry.tunables, {})
                readings[arena.stage] = polished[entry]
                pooled = [ratio for of_stage in readings.values() for ratio in of_stage]
                self.estimates[entry.tunables] = statistics.interval_of(
                    pooled,
                    seed=self.settings.seed,
                    sigma=self.sigma(),
                    first_look=self.ledger.first_look(entry.tunables, self.default),
                )

    def forget_times(self) -> None:
        """Every time so far was paired with a default that is gone."""
        self.ledger.default_ms.clear()
        self.estimates.clear()
        self._readings.clear()

    def prove(self, plan: Tunables) -> Fault | None:
        """The ragged lengths of the bucket, once per plan and probe; None when it passed."""
        if plan not in self.ledger.proven:
            name = f"proven | {self.cell} | {candidate_key(plan)}"
            recalled = self.store.recall(name)
            if recalled is None:
                outcome = self.evaluator.validate(self.cell, plan, timeout_s=self.timeout_s())
                recalled = outcome.plain() if isinstance(outcome, Fault) else {"first_call_ms": outcome.first_call_ms}
                self.store.remember(name, recalled)
            self.ledger.proven[plan] = Fault.of(recalled) if "kind" in recalled else Proven(**recalled)
            if "kind" in recalled:
                self.told(plan, TrialOutcome(recalled["kind"], "prove", message=recalled["message"]))
        known = self.ledger.proven[plan]
        return known if isinstance(known, Fault) else None

    def measured(self, candidate: Candidate, median_ms: float) -> Measured:
        """The candidate with everything a profile says of it."""
        checked, proven = self.checked(candidate.tunables), self.ledger.proven.get(candidate.tunables)
        first_ms = proven.first_call_ms if isinstance(proven, Proven) else checked.cold_ms
        return Measured(candidate.tunables, checked, candidate.gain, median_ms, first_ms)

    def singles(self, default_ms: float) -> tuple[Measured, ...]:
        """The fastest plan of each kernel that was timed alone, in both directions and every branch."""
        best: dict[str, Tunables] = {}
        timed = [plan for plan, gain in self.estimates.items() if math.isfinite(gain.half_width)]  # more than once
        for plan in self.ranked(plan for plan in timed if self.is_main(plan)):
            if len(plan.kernels) == 1:
                best.setdefault(min(plan.kernels), plan)
        return tuple(
            self.measured(self.candidate(plan, self.estimates[plan]), default_ms * self.estimates[plan].ratio)
            for plan in best.values()
        )

    def result(self, state: CellState, note: str = "") -> CellResult:
        """A result with everything but its choices."""
        return CellResult(
            self.cell,
            state,
            failures=self.ledger.failures(),
            trials=self.trials,
            noise_sigma=self.ledger.noise_sigma(),
            note="; ".join(filter(None, (self.note, note))),
            disturbances=largest_of_each(self.ledger.disturbances),
        )

    def inconclusive(self, reason: str) -> CellResult:
        """No number can be believed: the default stays, without evidence that it deserves to."""
        result = self.result("inconclusive", reason)
        checked = self.ledger.checked.get(self.default)
        if isinstance(checked, Checked) and self.keeps_limits(self.default):
            untimed = Candidate(self.default, Interval(0.0, 0.0, 0.0, 0), checked.peak_bytes)
            result.default = self.measured(untimed, checked.call_ms)
            result.choice = result.default
        return result
