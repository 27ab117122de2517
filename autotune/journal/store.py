"""The record of a probe: an Optuna storage with one study per cell, and one for facts of the whole probe."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.study import Study, StudyDirection

from autotune.exit_codes import ProbeFailure
from autotune.journal.sharing.cell_status import CellStatus
from autotune.journal.sharing.lease import Worker
from autotune.journal.sharing.seconds import UsedSeconds
from autotune.journal.storage.journal_file import JournalFile, WriterLock, open_journal
from autotune.journal.storage.mirror import Mirror
from autotune.journal.storage.storages import (
    close_storage,
    is_url,
    not_opened,
    open_storage,
    quiet_optuna,
    reason_of,
    refuse_journal_behind_proxy,
    shown,
    storage_errors,
)
from ringattn.profile.plain_data import to_plain
from ringattn.workload import Workload

from .attributes import BadStudy, attribute, read_by_optuna, required, typed

HEADER = "probe"
_CELL = "cell "  # begins the attributes that name the studies of a storage that are this probe's
_OPENING = "the opening"  # the part that a worker holds while it looks whose search this is, and may delete it
_SINCE = "first worker"
FINISHED = "finished"


class Store:
    """All studies of one probe. ``path=None`` without a ``url`` keeps them in memory (simulation, tests).

    With a ``url`` several workers share them: see ``Worker``. The journal at ``path`` is one process's alone.
    """

    def __init__(
        self,
        path: Path | None,
        *,
        identity: str = "",
        fresh: bool = False,
        url: str | None = None,
        again: Callable[[Store], bool] = lambda store: True,
    ) -> None:
        """Opens or starts the journal at ``path``, or with ``url`` the storage there, see ``open_storage``.

        Either way no process without that ``url`` writes the journal, nor the profile that it is of, meanwhile.

        ``identity`` says what the probe is (machine, software, request); a journal with another one, or ``fresh``, is
        started over; so is a finished one, if ``again`` says so of it. Raises DeviceBusy when another process writes
        the journal, or goes on with what ``fresh`` is to forget; OSError when it cannot be written; ProbeFailure for a
        ``url`` that Optuna cannot open, or whose search has another identity.
        """
        self.path = path
        self.notes: list[str] = []
        self._url = url
        self._identity = identity
        self._locks: list[WriterLock] = []
        self._file: JournalFile | None = None
        self._storage: BaseStorage = InMemoryStorage()
        self._worker: Worker | None = None
        try:
            if url is not None:
                self._storage = open_storage(url)
                self._lock(*([] if is_url(url) else [Path(url)]), *([] if path is None else [path]))
            elif path is not None:
                self._lock(path)
                self._file, self._storage, notes = open_journal(path, fresh=fresh)
                self.notes += notes
            self._join()
            with self.worker.held(_OPENING) if self.shared else contextlib.nullcontext():
                self.resumed = self._open(fresh, again)
        except BaseException as error:
            for lock in () if self.shared else self._locks:  # others may have theirs by now
                lock.forget()
            self.close()
            self._translate(error)
            raise

    @property
    def shared(self) -> bool:
        """Return whether other processes may work on the same search."""
        return self._url is not None

    @property
    def worker(self) -> Worker:
        """Return this process as one of the search's workers."""
        assert self._worker is not None, "the store is closed"
        return self._worker

    @property
    def place(self) -> str:
        """Return where the studies are, in words."""
        if self._url is not None:
            return shown(self._url)
        return str(self.path) if self.path is not None else "memory"

    def _lock(self, *journals: Path) -> None:
        for journal in journals:
            self._locks.append(WriterLock(journal, shared=self.shared))
            self.notes += [self._locks[-1].note] if self._locks[-1].note else []

    def _join(self) -> None:
        try:
            with quiet_optuna():
                self._worker = Worker(self._storage, self.place, alone=not self.shared)
            self.seconds = UsedSeconds(self._worker)
        except storage_errors() as error:
            raise not_opened(self._url or "", error) from error
        if self._url is not None:
            refuse_journal_behind_proxy(self._storage, self._url)

    def _open(self, fresh: bool, again: Callable[[Store], bool]) -> bool:
        """Return whether there is a search of this very probe to go on with; a new one begins else."""
        first = self.worker.open(fresh=fresh)
        if fresh and first and self.shared:
            self._delete_studies()
        self._header = self._study(HEADER)
        with read_by_optuna(_where(HEADER)):
            attrs = self._header.user_attrs
        if self.shared and not _is_probe_header(self._header):
            raise self._somebody_else_s()
        if not attrs:
            self._begin()
            return False
        if required(attrs, "identity", str, _where(HEADER)) != self._identity:
            if self._url is not None:
                raise ProbeFailure(
                    f"{self.place}: holds the studies of another machine, software or request; "
                    "name another storage, or give --fresh to delete them"
                )
            assert self.path is not None, "a store in memory is always new"
            if not self.recall(FINISHED, bool):  # else all that it found is in a profile
                self.notes.append(
                    f"{self.path.name}: of an interrupted probe of another machine, software or request; its trials "
                    "are deleted, rows of a profile are not"
                )
        elif not (first and self.recall(FINISHED, bool) and again(self)):
            return True
        self._start_over()
        return False

    def _start_over(self) -> None:
        """Forget everything; the lock stays held."""
        if self.shared:
            self._delete_studies()
        else:
            assert self._file is not None
            assert self.path is not None
            self._file.close()
            self.path.unlink()
            self._file = JournalFile(self.path)
            self._storage = JournalStorage(self._file)
            self._join()
            self.worker.open(fresh=True)
        self._header = self._study(HEADER)
        self._begin()

    def _begin(self) -> None:
        self._header.set_user_attr("identity", self._identity)  # first: without it the study is somebody else's
        self._header.set_user_attr(_SINCE, self.worker.number)

    def _delete_studies(self) -> None:
        """Delete the probe's own studies, which its header names: a storage may hold those of others, too."""
        names = set(optuna.get_all_study_names(self._storage))
        if HEADER in names:
            header = optuna.load_study(study_name=HEADER, storage=self._storage)
            if not _is_probe_header(header):
                raise self._somebody_else_s()
            cells = {name.removeprefix(_CELL) for name in header.user_attrs if name.startswith(_CELL)}
            for name in (*(names & cells), HEADER):  # last, as it knows the others, and this may be killed
                optuna.delete_study(study_name=name, storage=self._storage)

    def _somebody_else_s(self) -> ProbeFailure:
        return ProbeFailure(f"{self.place}: its study {HEADER!r} is not of a probe; name another database")

    def _study(self, name: str, sampler: BaseSampler | None = None, pruner: BasePruner | None = None) -> Study:
        with quiet_optuna():
            study = optuna.create_study(
                study_name=name,
                storage=self._storage,
                sampler=sampler or optuna.samplers.RandomSampler(seed=0),
                pruner=pruner or optuna.pruners.NopPruner(),
                direction="minimize",
                load_if_exists=True,
            )
        if study.directions != [StudyDirection.MINIMIZE]:
            if self._url is not None and name == HEADER:
                raise self._somebody_else_s()
            directions = ", ".join(direction.name.lower() for direction in study.directions)
            raise BadStudy(_where(name), f"its directions are {directions}, and not minimize alone")
        return study

    def study(self, cell: Workload, sampler: BaseSampler | None = None, pruner: BasePruner | None = None) -> Study:
        """Return the study of a cell, with all that an earlier run recorded; of a shared search its lease is held."""
        name = str(cell)
        if self.shared and f"{_CELL}{name}" not in self._header.user_attrs:
            self.set_status(cell, CellStatus())
        with read_by_optuna(_where(name)):
            study = self._study(name, sampler, pruner)
            if not self.shared:
                return study
            with quiet_optuna():
                mirror = Mirror(self._storage, study._study_id, self.worker.check)
            return Study(study_name=name, storage=mirror, sampler=study.sampler, pruner=study.pruner)

    def statuses(self) -> dict[str, CellStatus]:
        """Return the state of every cell that a worker has met, by its name."""
        found = {name: value for name, value in self._header.user_attrs.items() if name.startswith(_CELL)}
        return {
            name.removeprefix(_CELL): typed(value, CellStatus, f"{_where(HEADER)}: {name}")
            for name, value in found.items()
        }

    def set_status(self, cell: Workload, status: CellStatus) -> None:
        """Set the state of a cell, on which this worker holds the lease; before its study is made."""
        self._header.set_user_attr(f"{_CELL}{cell}", to_plain(status))

    def remember(self, name: str, value: Any) -> None:
        """Record a fact of the whole probe (JSON), such as a cell that is done."""
        self._header.set_user_attr(name, value)
        self.sync()

    def finished(self, cells: Iterable[Workload]) -> int:
        """Return how many of the cells have a result."""
        done = {name for name, status in self.statuses().items() if status.state == "done"}
        return sum(str(cell) in done for cell in cells)

    @property
    def used_s(self) -> float:
        """Return the seconds that others used, and earlier runs."""
        return self.seconds.of_others(self.recall(_SINCE, int) or 0)

    def sync(self) -> None:
        """Put on the disk what was told so far."""
        self.seconds.count(often=True)
        if self._file is not None:
            self._file.sync()
        self.worker.check()

    def recall(self, name: str, hint: Any) -> Any:
        """Return a fact of the whole probe as a value of the type ``hint``, None where there is none; or BadStudy."""
        return attribute(self._header.user_attrs, name, hint, _where(HEADER))

    def close(self) -> None:
        """Leave the search, and let others have the files; of what cannot be written any more the locks, too."""
        worker, file, locks = self._worker, self._file, self._locks
        self._worker, self._file, self._locks = None, None, []
        with contextlib.ExitStack() as ends:  # the last first
            for lock in locks:
                ends.callback(lock.release)
            if self.shared:
                ends.callback(close_storage, self._storage)
            if file is not None:
                ends.callback(file.close)
            if worker is not None:
                ends.callback(worker.leave)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()
        if error is not None:
            self._translate(error)

    def _translate(self, error: BaseException) -> None:
        """Raise ProbeFailure for what a storage, but no mistake of ours, ends with."""
        if self._url is None:
            return
        if isinstance(error, storage_errors()):
            reason = reason_of(error.__cause__ or error, self._url)
            raise ProbeFailure(
                f"{self.place}: cannot be used any more ({reason}); run the same command to go on when it can"
            ) from error
        if isinstance(error, UpdateFinishedTrialError):
            raise ProbeFailure(
                f"{self.place}: another process has ended a trial of this one; run the same command to go on"
            ) from error


def _is_probe_header(study: Study) -> bool:
    """Return whether a study of the header's name is a header: also one whose probe was killed before it wrote."""
    attrs = study.user_attrs
    return "identity" in attrs or (not attrs and not study.trials and study.directions == [StudyDirection.MINIMIZE])


def _where(name: str) -> str:
    return f"study {name!r}"
