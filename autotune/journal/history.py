"""Search histories: the trials that a probe recorded in its Optuna storage, for the workloads of a profile."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from autotune.display_text import format_factor
from autotune.exit_codes import ProbeFailure
from ringattn.workload import Workload, describe

if TYPE_CHECKING:
    from optuna.storages import BaseStorage
    from optuna.trial import FrozenTrial

    from ringattn.profile.schema import Profile


@dataclass(frozen=True, slots=True)
class TimedTrial:
    """One trial of a search: when it began, its speed-up over the default, or None where it gave no time.

    ``readings`` counts the blocks in which it was timed beside the default; ``chosen`` is the plan of the profile.
    """

    elapsed_s: float
    speedup: float | None
    tip: str
    readings: int = 0
    chosen: bool = False


@dataclass(frozen=True, slots=True)
class SearchHistory:
    """The trials of one workload, in the order in which they began.

    ``elapsed_s`` is since the search of it began, with the first plan beside the default; ``end_s`` is when the last
    trial ended.
    """

    workload: Workload
    trials: tuple[TimedTrial, ...]
    end_s: float = 0.0

    @property
    def timed(self) -> int:
        """Return the number of trials that gave a time."""
        return sum(trial.speedup is not None for trial in self.trials)


def search_histories(profile: Profile, storage: str) -> tuple[SearchHistory, ...]:
    """Return the recorded search of each workload of ``profile``, in its order.

    ``storage`` is the path of a journal, or the URL of an Optuna storage. A study in which the profile's plan was never
    tried is of another probe, and left out. Raises ProbeFailure for a storage that cannot be read or holds no study of
    this profile.
    """
    import optuna

    from autotune.journal.storage.storages import without_password

    shown = without_password(storage)
    opened = _opened(storage, shown)
    known = set(optuna.get_all_study_names(opened))
    found = []
    for entry in profile.plans:
        if str(entry.workload) not in known or entry.choice is None:
            continue
        trials = optuna.load_study(study_name=str(entry.workload), storage=opened).get_trials(deepcopy=False)
        chosen = describe(entry.choice.tunables)
        if any(trial.user_attrs.get("plan") == chosen for trial in trials):
            history = SearchHistory(entry.workload, *_timed(trials, chosen))
            found += [history] if history.trials else []
    if not found:
        raise ProbeFailure(f"{shown}: holds no search of this profile's plans; name the storage of its probe")
    return tuple(found)


def _opened(storage: str, shown: str) -> BaseStorage:
    import optuna
    from optuna.exceptions import OptunaError
    from optuna.storages.journal import JournalFileBackend

    from autotune.journal.storage.storages import GRPC, is_url, open_storage, storage_errors

    from .attributes import NO_JOURNAL

    unusable: tuple[type[Exception], ...] = (ImportError, OSError, OptunaError, RuntimeError, *NO_JOURNAL)
    if not is_url(storage) and not Path(storage).is_file():  # Optuna would make one
        raise ProbeFailure(f"{storage}: no such file; --storage names the journal of a probe, or an Optuna URL")
    try:
        if storage.startswith(GRPC):
            return open_storage(storage)
        if is_url(storage):
            _check_made(storage, shown)
            return optuna.storages.get_storage(storage)
        return optuna.storages.JournalStorage(JournalFileBackend(storage))
    except (*unusable, *storage_errors()) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0].replace(storage, shown)
        raise ProbeFailure(f"{shown}: cannot be read ({reason}); name the storage of a probe") from error


def _check_made(url: str, shown: str) -> None:
    """Raise ProbeFailure for a database that Optuna would make, or make its tables in: reading makes nothing."""
    import sqlalchemy

    if url.startswith("redis"):  # no database of SQLAlchemy's, and nothing is made in it
        return
    engine = sqlalchemy.create_engine(url)
    try:
        file = engine.url.database if engine.dialect.name == "sqlite" else None
        if file is not None and not Path(file.removeprefix("file:")).is_file():
            raise ProbeFailure(f"{shown}: no such file; name the storage of a probe")
        if not {"studies", "version_info"} <= set(sqlalchemy.inspect(engine).get_table_names()):
            raise ProbeFailure(f"{shown}: holds no studies of Optuna; name the storage of a probe")
    finally:
        engine.dispose()


def _timed(trials: Sequence[FrozenTrial], chosen: str) -> tuple[tuple[TimedTrial, ...], float]:
    """Return what ended with a time or a failure, and when the last did; plans that never ran are neither.

    A trial stands where it began: those that are in the race to the end all end with it.
    """
    # Probes check the default of every workload first, minutes before most are searched.
    starts = sorted(trial.datetime_start.timestamp() for trial in trials if trial.datetime_start is not None)
    began = starts[:2][-1] if starts else 0.0
    made, end_s = [], 0.0
    for trial in trials:
        plan, kind = trial.user_attrs.get("plan"), trial.user_attrs.get("kind")
        if plan is None or trial.datetime_start is None or trial.datetime_complete is None or kind == "rejected":
            continue
        validation = trial.user_attrs.get("validation")
        if isinstance(validation, Mapping) and "kind" in validation:  # timed, and then found wrong
            kind = str(validation["kind"])
        over = [name for name, value in trial.constraints.items() if value > 0]
        speedup = None
        if trial.state.name == "COMPLETE" and trial.value is not None and not over and kind is None:
            speedup = math.exp(-trial.value)
        elif kind is None and not over:
            continue
        ending = format_factor(speedup) if speedup is not None else kind or f"over a limit: {', '.join(over)}"
        elapsed_s = max(0.0, trial.datetime_start.timestamp() - began)
        readings = len(trial.intermediate_values)
        made.append(TimedTrial(elapsed_s, speedup, f"{plan}: {ending}", readings, chosen=plan == chosen))
        end_s = max(end_s, trial.datetime_complete.timestamp() - began)
    return tuple(sorted(made, key=lambda trial: trial.elapsed_s)), end_s
