"""What is recorded of one stage of one cell: an Optuna study, whose trials are the stage's candidates.

Every candidate is a trial: asked when it enters a stage, reported block by block, told when it leaves. A probe
that is killed finds all of it again, down to the last block of a race.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from autotune.measure.evaluator import Checked, Fault
from autotune.space.space import Assignment, Value, candidate_key, encode, from_key
from ringattn.workload import Tunables, Workload

RUNS = "runs"  # the constraint every trial has: above 0 where the candidate gave no number
_BLOCK = "default_ms:"


@dataclass(slots=True, eq=False)
class Entry:
    """One candidate in one stage: its place in the journal, and everything known of it so far.

    ``log_ratios`` maps the number of a block to log(t / t_default) in it; a time in ms is that against the time
    of the default in the same block, which ``StageRecord.default_ms`` keeps.
    """

    tunables: Tunables
    trial: Trial | None  # None: finished in an earlier run
    number: int
    log_ratios: dict[int, float] = field(default_factory=dict)
    checked: Checked | None = None
    fault: Fault | None = None
    finished: bool = False
    constrained: frozenset[str] = frozenset()  # constraints that a run cut off while telling had set already


class StageRecord:
    """One Optuna study: the candidates of one stage of one cell.

    Constraints: ``runs`` is above 0 for a candidate that gave no number (told PRUNED, with its kind), ``memory``
    and ``error`` above 0 for one over a limit (told COMPLETE: its time is as true as any other).

    With a ``base`` plan the parameters of a trial are what its candidate changes of it. A sampler needs all of them.
    """

    def __init__(
        self,
        study: Study,
        workload: Workload,
        knobs: Mapping[str, tuple[Value, ...]],
        sync: Callable[[], None],
        base: Tunables | None,
    ) -> None:
        self.study = study
        self._sync = sync
        self._workload = workload
        self._knobs = dict(knobs)
        self._distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(values) for name, values in knobs.items()
        }
        self._base = {} if base is None else encode(workload, base)
        self._entries: dict[str, Entry] = {}
        self.default_ms: dict[int, float] = {}  # by block
        self.repeated_default: list[float] = []  # log of one of two readings over the other
        for name, value in study.user_attrs.items():
            if name.startswith(_BLOCK):
                self._keep_block(int(name.removeprefix(_BLOCK)), *value)
        for frozen in study.get_trials(deepcopy=False):
            self._recall(frozen)

    def _recall(self, frozen: FrozenTrial) -> None:
        key = frozen.user_attrs.get("candidate")
        if key is None or frozen.state in (TrialState.FAIL, TrialState.WAITING):
            if frozen.state in (TrialState.RUNNING, TrialState.WAITING):
                self._abandon(frozen)
            return
        running = frozen.state == TrialState.RUNNING
        entry = Entry(
            tunables=from_key(key),
            trial=Trial(self.study, frozen._trial_id) if running else None,
            number=frozen.number,
            log_ratios=dict(frozen.intermediate_values),
            finished=not running,
            constrained=frozenset(frozen.constraints),
        )
        if "checked" in frozen.user_attrs:
            entry.checked = Checked(**frozen.user_attrs["checked"])
        if "kind" in frozen.user_attrs and frozen.state == TrialState.PRUNED:
            entry.fault = Fault.of({"message": "", **frozen.user_attrs})
        self._entries[key] = entry

    def _abandon(self, frozen: FrozenTrial) -> None:
        """A trial cut off before its candidate was even named holds nothing: failed, so that no sampler reads it."""
        storage = self.study._storage
        if frozen.state == TrialState.WAITING:
            storage.set_trial_state_values(frozen._trial_id, TrialState.RUNNING)
        storage.set_trial_state_values(frozen._trial_id, TrialState.FAIL)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())

    def find(self, tunables: Tunables) -> Entry | None:
        return self._entries.get(candidate_key(tunables))

    def open(self, tunables: Tunables) -> Entry:
        """The entry of this plan: a recorded one, or a trial asked now."""
        key = candidate_key(tunables)
        if key in self._entries:
            return self._entries[key]
        params = self._params(tunables)
        assert params is not None, f"a plan outside its own space: {key}"
        changed = {name: value for name, value in params.items() if name not in self._base or self._base[name] != value}
        self.study.enqueue_trial(changed, user_attrs={"candidate": key})
        trial = self.study.ask({name: self._distributions[name] for name in changed})
        return self._add(key, Entry(tunables, trial, trial.number))

    def _params(self, tunables: Tunables) -> Assignment | None:
        """The plan as values of this study's knobs; None where the study does not have one of them."""
        plan = encode(self._workload, tunables)
        params = {name: plan.get(name, values[0]) for name, values in self._knobs.items()}
        return params if all(params[name] in values for name, values in self._knobs.items()) else None

    def ask(self) -> tuple[Trial, Assignment]:
        """A trial whose values the study's sampler chose; hand it to ``adopt`` or ``reject``."""
        trial = self.study.ask(self._distributions)
        return trial, dict(trial.params)

    def adopt(self, trial: Trial, tunables: Tunables) -> Entry:
        """The asked trial becomes this candidate's entry."""
        key = candidate_key(tunables)
        trial.set_user_attr("candidate", key)
        return self._add(key, Entry(tunables, trial, trial.number))

    def reject(self, trial: Trial, reasons: Sequence[str]) -> None:
        """An asked plan that cannot run: the sampler learns it, and nothing was measured."""
        trial.set_user_attr("kind", "rejected")
        trial.set_user_attr("message", "; ".join(reasons)[:400])
        trial.set_constraint(RUNS, 1.0)
        self.study.tell(trial, state=TrialState.PRUNED)

    def repeat(self, trial: Trial, value: float) -> None:
        """An asked plan that is known already: told its known value, so that the sampler moves on."""
        trial.set_constraint(RUNS, 0.0)
        trial.set_user_attr("repeats", True)
        self.study.tell(trial, value)

    def learn(self, tunables: Tunables, value: float | None, constraints: Mapping[str, float]) -> None:
        """Adds what another stage found out, for the sampler; None for a plan that gave no number."""
        params = self._params(tunables)
        if params is None:
            return  # of a wider space, such as one with more dtypes
        self.study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.PRUNED if value is None else TrialState.COMPLETE,
                value=value,
                params=params,
                distributions=self._distributions,
                constraints={RUNS: 1.0 if value is None else 0.0, **constraints},
                user_attrs={"learned": candidate_key(tunables)},
            )
        )

    def _add(self, key: str, entry: Entry) -> Entry:
        assert key not in self._entries, f"asked twice in one stage: {key}"
        self._entries[key] = entry
        return entry

    def checked(self, entry: Entry, checked: Checked) -> None:
        entry.checked = checked
        if entry.trial is not None:
            entry.trial.set_user_attr("checked", {name: getattr(checked, name) for name in Checked.__slots__})

    def begin_block(self, block: int, default_ms: float, repeated: float | None = None) -> None:
        """The default's own time in a block whose ratios are about to be reported.

        ``repeated`` is the log of one of its two readings over the other.
        """
        self._keep_block(block, default_ms, repeated)
        self.study.set_user_attr(f"{_BLOCK}{block}", [default_ms, repeated])

    def _keep_block(self, block: int, default_ms: float, repeated: float | None) -> None:
        self.default_ms[block] = default_ms
        if repeated is not None:
            self.repeated_default.append(repeated)

    def report(self, entry: Entry, block: int, log_ratio: float) -> None:
        """One paired repetition; a block is told once."""
        entry.log_ratios[block] = log_ratio
        if entry.trial is not None and not entry.finished:
            entry.trial.report(log_ratio, block)

    def complete(
        self, entry: Entry, value: float, constraints: Mapping[str, float], **attributes: Value | float
    ) -> None:
        """The candidate has a time: ``value`` is log(t / t_default), constraints above 0 are limits it broke."""
        assert math.isfinite(value)
        if entry.trial is None or entry.finished:
            return
        for name, attribute in attributes.items():
            entry.trial.set_user_attr(name, attribute)
        self._constrain(entry, {RUNS: 0.0, **constraints})
        self.study.tell(entry.trial, value)
        entry.finished = True
        self._sync()

    def fail(self, entry: Entry, fault: Fault) -> None:
        """The candidate gave no number: PRUNED with the kind, never a bad score and never FAIL (TPE ignores FAIL)."""
        entry.fault = fault
        if entry.trial is None or entry.finished:
            return
        for name, value in fault.plain().items():
            entry.trial.set_user_attr(name, value)
        self._constrain(entry, {RUNS: 1.0})
        self.study.tell(entry.trial, state=TrialState.PRUNED)
        entry.finished = True
        self._sync()

    def _constrain(self, entry: Entry, constraints: Mapping[str, float]) -> None:
        assert entry.trial is not None
        for name, value in constraints.items():
            if name not in entry.constrained:
                entry.trial.set_constraint(name, value)

    def abandon_open(self, reason: str) -> None:
        """What was asked and never timed is told FAIL, which no sampler reads: it is neither good nor bad."""
        for entry in self._entries.values():
            if entry.trial is not None and not entry.finished:
                entry.trial.set_user_attr("message", reason)
                self.study.tell(entry.trial, state=TrialState.FAIL)
                entry.finished = True

    def note(self, name: str, value: Any) -> None:
        self.study.set_user_attr(name, value)

    def noted(self, name: str) -> Any:
        return self.study.user_attrs.get(name)
