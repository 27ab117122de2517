"""The Optuna study of one cell: every plan is a trial, every paired block an intermediate value of it.

What is measured is told as it comes, in Optuna's own fields: parameters, constraint values, log(t / t_default) of each
block under the block's number, and the state. A probe that is killed finds all of it again, down to the last block.
"""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping
from typing import Any

from optuna.samplers import BaseSampler
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from autotune.journal import attributes
from autotune.journal.attributes import BadStudy, attribute, read_by_optuna
from autotune.measure.evaluator import Checked, Fault, Sample
from autotune.space.space import Value
from ringattn.errors import InputError
from ringattn.workload import Tunables, Workload, describe

from .entry import Entry, PairedBlock
from .parameters import Parameters
from .result import ResultRecord

RUNS = "runs"  # the constraint every trial has: above 0 where the plan gave no number
SAMPLER, QUEUE = "sampler", "queue"
RESULT, DEFAULT, FINAL, LOADED = "result", "default", "final since", "under load"  # facts of the whole cell
LEFT = "left without a result"  # the same, for the workers of one run
_BLOCK = "block "


class CellStudy:
    """Tells a study of one cell, and recalls what an earlier run told it.

    Constraints: ``runs`` is above 0 for a plan that gave no number (told PRUNED, with its kind), ``memory`` and
    ``error`` above 0 for one over a limit. What was dropped from the race is told COMPLETE with its median so far: its
    time is as true as any other, and Optuna's importances count complete trials alone. What was never timed beside the
    default, as its check was far slower than the best's, is told PRUNED.

    A plan that is timed again after its trial was told has another trial, for the further blocks.
    """

    def __init__(
        self, study: Study, workload: Workload, knobs: Mapping[str, tuple[Value, ...]], sync: Callable[[], None]
    ) -> None:
        self.study = study
        self.parameters = Parameters(workload, knobs)
        self.recalled: dict[Tunables, Entry] = {}
        self.blocks: dict[int, PairedBlock] = {}
        self._sync = sync
        self._where = f"study {study.study_name!r}"
        with read_by_optuna(self._where):
            self._attrs = study.user_attrs
        self._trials: dict[Tunables, Trial] = {}  # that are running
        self._numbers: dict[Tunables, int] = {}  # of each plan's first trial
        self._recall()

    # --- what is there --------------------------------------------------------------------------------------------

    def _recall(self) -> None:
        with read_by_optuna(self._where):
            self._fail_strays()
            trials = self.study.get_trials(deepcopy=False)
        abandoned: dict[Tunables, Checked] = {}  # whose check is told nowhere else
        for frozen in trials:
            if frozen.state == TrialState.FAIL:
                if "checked" in frozen.user_attrs:
                    where = self._where_of(frozen)
                    plan = self._plan_of_params(frozen.params, where)
                    abandoned[plan] = attributes.checked(frozen.user_attrs["checked"], f"{where}: checked")
            elif "plan" in frozen.user_attrs:
                self._recall_trial(frozen)
        for plan, entry in self.recalled.items():
            entry.checked = entry.checked or abandoned.get(plan)
        plans = {trial: plan for plan, trial in self._numbers.items()}
        for name, value in self._attrs.items():
            if name.startswith(_BLOCK):
                self._recall_block(name, value, plans)

    def _recall_block(self, name: str, value: object, plans: Mapping[int, Tunables]) -> None:
        where = f"{self._where}: {name}"
        number, default, by_trial = attributes.block(name.removeprefix(_BLOCK), value, where)
        samples: dict[Tunables, tuple[Sample, ...]] = {}
        for trial, read in by_trial.items():
            plan = plans.get(trial)
            if plan is None or self.recalled[plan].checked is None:
                raise BadStudy(where, f"names trial {trial}, which is none with a check")
            samples[plan] = read
        self.blocks[number] = PairedBlock(plans[default], samples)

    def _where_of(self, frozen: FrozenTrial) -> str:
        return f"{self._where}, trial {frozen.number}"

    def _fail_strays(self) -> None:
        """End trials without a plan, cut off before all of their parameters were told, and those that wait.

        A killed run, or somebody else, left these waiting: ``ask`` would give one for another plan.
        """
        for frozen in self.study.get_trials(deepcopy=False, states=(TrialState.WAITING, TrialState.RUNNING)):
            if frozen.state == TrialState.WAITING or "plan" not in frozen.user_attrs:
                self.study._storage.set_trial_state_values(frozen._trial_id, TrialState.FAIL)

    def _recall_trial(self, frozen: FrozenTrial) -> None:
        attrs, where = frozen.user_attrs, self._where_of(frozen)
        if attrs.get("kind") == "rejected":
            return
        plan = self._plan_of_params(frozen.params, where)
        entry = self.recalled.setdefault(plan, Entry(plan))
        self._numbers.setdefault(plan, frozen.number)
        if "checked" in attrs:
            entry.checked = attributes.checked(attrs["checked"], f"{where}: checked")
        if "kind" in attrs:
            entry.fault = attributes.fault(attrs, where)
        if "validation" in attrs:
            entry.validated = attributes.validation(attrs["validation"], f"{where}: validation")
        entry.told |= frozen.state.is_finished()
        if not frozen.state.is_finished():
            self._trials[plan] = Trial(self.study, frozen._trial_id)
            entry.open = True

    def _plan_of_params(self, params: Mapping[str, Any], where: str) -> Tunables:
        """Return the plan of a trial's parameters, which must be exactly those of a plan of this cell."""
        for name, value in params.items():
            distribution = self.parameters.distributions.get(name)
            if distribution is None:
                raise BadStudy(where, f"{name} is no parameter of its plans")
            if value not in distribution.choices:  # type: ignore[attr-defined]
                raise BadStudy(where, f"{name} is {str(value)[:60]}, which is none of its values")
        try:
            return self.parameters.plan(params)
        except KeyError as error:
            raise BadStudy(where, f"parameter {error.args[0]} is missing") from None
        except InputError as error:
            raise BadStudy(where, f"its parameters are no plan ({error})") from None

    def number_of(self, plan: Tunables) -> int:
        """Return the number of a plan's first trial; one is made for a plan that has none."""
        if plan not in self._numbers:
            self.open(Entry(plan), QUEUE)
        return self._numbers[plan]

    def plan_of(self, number: int) -> tuple[Tunables, Checked]:
        """Return the plan of a trial, and its check; BadStudy where the result names a trial that has none."""
        known = next((plan for plan, first in self._numbers.items() if first == number), None)
        found = None if known is None else self.recalled[known].checked
        if known is None or found is None:
            raise BadStudy(self._where, f"{RESULT} names trial {number}, which is none with a check")
        return known, found

    # --- trials begin -----------------------------------------------------------------------------------------------

    def open(self, entry: Entry, proposed_by: str) -> None:
        """Begin a trial of this plan in one step: one line of a journal, which a kill leaves whole or not at all."""
        params = self.parameters.of(entry.tunables)
        assert self.parameters.plan(params) == entry.tunables, f"a plan outside its own space: {entry.tunables}"
        distributions = {name: self.parameters.distributions[name] for name in params}
        attrs = {"plan": describe(entry.tunables), "proposed_by": proposed_by}
        template = create_trial(state=TrialState.RUNNING, params=params, distributions=distributions, user_attrs=attrs)
        made = self.study._storage.create_new_trial(self.study._study_id, template_trial=template)
        trial = Trial(self.study, made)
        self._begin(entry, trial)
        if entry.checked is not None:  # timed before: the check is told once
            self._trial(entry).set_user_attr("repeats", self._numbers[entry.tunables])

    def _begin(self, entry: Entry, trial: Trial) -> None:
        self._trials[entry.tunables] = trial
        self._numbers.setdefault(entry.tunables, trial.number)
        entry.open = True

    def propose(self, sampler: BaseSampler) -> Tunables:
        """Return what a sampler that chooses all parameters at once wants next."""
        stub = FrozenTrial(
            number=-1,
            state=TrialState.RUNNING,
            value=None,
            datetime_start=datetime.datetime.now(tz=datetime.UTC),
            datetime_complete=None,
            params={},
            distributions={},
            user_attrs={},
            system_attrs={},
            intermediate_values={},
            trial_id=-1,
        )
        space = sampler.infer_relative_search_space(self.study, stub)
        return self.parameters.plan(sampler.sample_relative(self.study, stub, space))

    def ask(self) -> tuple[Trial, Tunables]:
        """Return a trial of the study's sampler, whatever it is; hand it to ``adopt``, ``reject`` or ``repeat``."""
        try:
            trial = self.study.ask()
            return trial, self.parameters.suggest(trial)
        except Exception:  # of a sampler
            self._fail_strays()
            raise

    def adopt(self, trial: Trial, entry: Entry) -> None:
        trial.set_user_attr("plan", describe(entry.tunables))
        trial.set_user_attr("proposed_by", SAMPLER)
        self._begin(entry, trial)

    def reject(self, trial: Trial, reason: str) -> None:
        """Drop an asked plan that is not to run: the sampler learns it, and nothing was measured."""
        trial.set_user_attr("kind", "rejected")
        trial.set_user_attr("message", reason[:400])
        trial.set_constraint(RUNS, 1.0)
        self.study.tell(trial, state=TrialState.PRUNED)

    def repeat(self, trial: Trial, value: float, *, paired: bool) -> None:
        """Tell an asked plan that is known already its known value, so that the sampler moves on.

        One that was never timed in pairs breaks a constraint, so that it is nobody's best trial.
        """
        trial.set_constraint(RUNS, 0.0 if paired else 1.0)
        self.study.tell(trial, value)

    # --- what is measured -------------------------------------------------------------------------------------------

    def _trial(self, entry: Entry) -> Trial:
        if entry.tunables not in self._trials:
            self.open(entry, QUEUE)
        return self._trials[entry.tunables]

    def checked(self, entry: Entry) -> None:
        assert entry.checked is not None
        self._trial(entry).set_user_attr("checked", dataclasses.asdict(entry.checked))

    def validated(self, entry: Entry) -> None:
        done = entry.validated
        plain = done.plain() if isinstance(done, Fault) else dataclasses.asdict(done)  # type: ignore[arg-type]
        self._trial(entry).set_user_attr("validation", plain)
        self._sync()

    def block(self, number: int, block: PairedBlock) -> None:
        """Record every plan's times of device and host, by trial, in a block whose ratios are about to be told."""
        self.blocks[number] = block
        samples = {str(self.number_of(p)): [[s.ms, s.host_us] for s in each] for p, each in block.samples.items()}
        self.study.set_user_attr(f"{_BLOCK}{number}", {"default": self.number_of(block.default), "samples": samples})

    def reading(self, entry: Entry, block: int, log_ratio: float) -> None:
        self._trial(entry).report(log_ratio, block)

    def under_load(self) -> None:
        """Foreign load does not end: what is timed counts all the same, here and in a run that goes on with it."""
        self.note(LOADED, True)

    def should_prune(self, entry: Entry) -> bool:
        """Return the study's pruner's word on a plan that is being timed."""
        return self._trial(entry).should_prune()

    def complete(
        self, entry: Entry, value: float, constraints: Mapping[str, float], reason: str, *, paired: bool = True
    ) -> None:
        """Give the plan its time: ``value`` is log(t / t_default), constraints above 0 are limits it broke.

        Without a reading beside the default the call of its check is a hint, which no best trial may be: the trial is
        PRUNED with it, as reading 0.
        """
        assert math.isfinite(value)
        trial = self._trial(entry)
        trial.set_user_attr("reason", reason)
        for name, over in {RUNS: 0.0, **constraints}.items():
            if name not in trial.constraints:  # which a run cut off while telling had set already
                trial.set_constraint(name, over)
        if paired:
            self.study.tell(trial, value)
        else:
            trial.report(value, 0)
            self.study.tell(trial, state=TrialState.PRUNED)
        self._end(entry)

    def failed(self, entry: Entry, fault: Fault) -> None:
        trial = self._trial(entry)
        for name, value in fault.plain().items():
            trial.set_user_attr(name, value)
        if RUNS not in trial.constraints:
            trial.set_constraint(RUNS, 1.0)
        self.study.tell(trial, state=TrialState.PRUNED)
        self._end(entry)

    def abandon(self, entry: Entry, reason: str) -> None:
        """End a trial that was never timed as FAIL, which no sampler reads, as it is neither good nor bad."""
        trial = self._trial(entry)
        trial.set_user_attr("reason", reason)
        self.study.tell(trial, state=TrialState.FAIL)
        self._end(entry)

    def _end(self, entry: Entry) -> None:
        del self._trials[entry.tunables]
        entry.open, entry.told = False, True
        self._sync()

    def note(self, name: str, value: Any) -> None:
        """Record a fact of the whole cell (JSON), such as its result."""
        self.study.set_user_attr(name, value)
        self._attrs[name] = value
        self._sync()

    def noted_result(self) -> ResultRecord | None:
        """Return the result that the cell came to, if any."""
        record: ResultRecord | None = attribute(self._attrs, RESULT, ResultRecord, self._where)
        return record

    def noted_left(self) -> ResultRecord | None:
        """Return what stands for a result in the run that left the cell without one, if any."""
        record: ResultRecord | None = attribute(self._attrs, LEFT, ResultRecord, self._where)
        return record

    def noted_default(self) -> Tunables | None:
        """Return the plan that stands in for the default of the heuristic, if any."""
        if DEFAULT not in self._attrs:
            return None
        where = f"{self._where}: {DEFAULT}"
        if not isinstance(params := self._attrs[DEFAULT], dict):
            raise BadStudy(where, "must be a mapping of parameters")
        return self._plan_of_params(params, where)

    def noted_under_load(self) -> bool:
        """Return whether foreign load did not end while blocks were timed."""
        return attribute(self._attrs, LOADED, bool, self._where) or False

    def noted_final(self) -> int | None:
        """Return the first block of the final, if that has begun."""
        since: int | None = attribute(self._attrs, FINAL, int, self._where)
        most = max(self.blocks, default=0) + 1
        if since is not None and not 1 <= since <= most:
            raise BadStudy(f"{self._where}: {FINAL}", f"is {since}; it must be from 1 to {most}, the next block")
        return since
