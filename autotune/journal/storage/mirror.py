"""Study of a cell as the worker that holds it sees it: read from memory, and written through to the shared storage."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage, InMemoryStorage
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState


class Mirror(InMemoryStorage):
    """One study of another storage, which nobody else writes meanwhile.

    Optuna asks a database anew for every running trial at each of its steps, as another process may have changed it: a
    trial of a search took 180 round trips to PostgreSQL. Who holds the lease on a cell need not ask.
    """

    def __init__(self, behind: BaseStorage, study_id: int, check: Callable[[], None]) -> None:
        """Read the study ``study_id`` of the storage ``behind``; ``check`` raises once it is another's to write."""
        super().__init__()
        self._storage, self._study_behind, self._check = behind, study_id, check
        self._trials_behind: dict[int, int] = {}  # ids there, by those here
        directions: Sequence[StudyDirection] = behind.get_study_directions(study_id)
        self._mirrored = super().create_new_study(directions, behind.get_study_name_from_id(study_id))
        for key, value in behind.get_study_user_attrs(study_id).items():
            super().set_study_user_attr(self._mirrored, key, value)
        for key, value in behind.get_study_system_attrs(study_id).items():
            super().set_study_system_attr(self._mirrored, key, value)
        self._read_new()

    def _read_new(self) -> None:
        trials = self._storage.get_all_trials(self._study_behind, deepcopy=False)
        for trial in trials[len(self._trials_behind) :]:
            self._trials_behind[super().create_new_trial(self._mirrored, trial)] = trial._trial_id

    def _there(self) -> BaseStorage:
        """Return the storage behind, to write it."""
        self._check()
        return self._storage

    # --- written there, then here -----------------------------------------------------------------------------------

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        there = self._there().create_new_trial(self._study_behind, template_trial)
        if self._storage.get_trial_number_from_id(there) == len(self._trials_behind):
            here = super().create_new_trial(study_id, template_trial)
            self._trials_behind[here] = there
            return here
        self._read_new()  # somebody added a trial of his own
        return next(here for here, behind in self._trials_behind.items() if behind == there)

    def set_study_user_attr(self, study_id: int, key: str, value: Any) -> None:
        self._there().set_study_user_attr(self._study_behind, key, value)
        super().set_study_user_attr(study_id, key, value)

    def set_study_system_attr(self, study_id: int, key: str, value: Any) -> None:
        self._there().set_study_system_attr(self._study_behind, key, value)
        super().set_study_system_attr(study_id, key, value)

    def set_trial_param(
        self, trial_id: int, param_name: str, param_value_internal: float, distribution: BaseDistribution
    ) -> None:
        there = self._trials_behind[trial_id]
        self._there().set_trial_param(there, param_name, param_value_internal, distribution)
        super().set_trial_param(trial_id, param_name, param_value_internal, distribution)

    def set_trial_state_values(self, trial_id: int, state: TrialState, values: Sequence[float] | None = None) -> bool:
        done = self._there().set_trial_state_values(self._trials_behind[trial_id], state, values)
        return done and super().set_trial_state_values(trial_id, state, values)

    def set_trial_intermediate_value(self, trial_id: int, step: int, intermediate_value: float) -> None:
        self._there().set_trial_intermediate_value(self._trials_behind[trial_id], step, intermediate_value)
        super().set_trial_intermediate_value(trial_id, step, intermediate_value)

    def set_trial_user_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._there().set_trial_user_attr(self._trials_behind[trial_id], key, value)
        super().set_trial_user_attr(trial_id, key, value)

    def set_trial_system_attr(self, trial_id: int, key: str, value: Any) -> None:
        self._there().set_trial_system_attr(self._trials_behind[trial_id], key, value)
        super().set_trial_system_attr(trial_id, key, value)
