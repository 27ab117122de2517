"""The record of a probe: an Optuna storage with one study per cell, and one for facts of the whole probe."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import OptunaError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.study import Study
from sqlalchemy.exc import SQLAlchemyError

from autotune.exit_codes import ProbeFailure
from ringattn.wording import plural
from ringattn.workload import Workload

from .file import JournalFile, WriterLock, check_regular, clear_optuna_locks, cut_to_whole_lines, is_foreign

HEADER = "probe"


class Store:
    """All studies of one probe. ``path=None`` keeps them in memory (simulation, tests)."""

    def __init__(self, path: Path | None, *, identity: str = "", fresh: bool = False, url: str | None = None) -> None:
        """Opens or starts the journal at ``path``, or with ``url`` the storage that Optuna finds there.

        ``identity`` says what the probe is (machine, software, request); a journal with another one, or ``fresh``, is
        started over. Raises DeviceBusy when another process writes it, OSError when it cannot be written, ProbeFailure
        for a ``url`` that Optuna cannot open.
        """
        self.path = path
        self.notes: list[str] = []
        self._url = url
        self._lock: WriterLock | None = None
        self._file: JournalFile | None = None
        self._storage: BaseStorage = InMemoryStorage()
        if path is not None:
            self._lock = WriterLock(path)  # also beside another storage: two probes must not write one profile
            try:
                self._storage = self._open_journal(path, fresh) if url is None else _open_url(url)
            except BaseException:
                self._lock.release()
                raise
        if url is not None and fresh:
            self._delete_studies()
        self._header = self._study(HEADER)
        self._identity = identity
        self.resumed = "identity" in self._header.user_attrs
        if not self.resumed:
            self._header.set_user_attr("identity", identity)
        elif self._header.user_attrs["identity"] != identity:
            assert path is not None, "a store in memory is always new"
            if url is not None:
                self.close()
                raise ProbeFailure(
                    f"--storage {without_password(url)}: holds the studies of another machine, software or request; "
                    "name another database, or give --fresh to delete them"
                )
            self.notes.append(f"{path.name}: of another machine, software or request; starting over")
            self.start_over()

    def start_over(self) -> None:
        """Forget everything; the lock stays held."""
        if self._url is not None:
            self._delete_studies()
        elif self.path is not None:
            assert self._file is not None
            self._file.close()
            self.path.unlink()
            self._file = JournalFile(self.path)
            self._storage = JournalStorage(self._file)
        else:
            self._storage = InMemoryStorage()
        self.resumed = False
        self._header = self._study(HEADER)
        self._header.set_user_attr("identity", self._identity)

    def _delete_studies(self) -> None:
        """Every study of a storage that may hold those of others, too: the probe's own are known by its header."""
        names = set(optuna.get_all_study_names(self._storage))
        if HEADER in names:
            kept = optuna.load_study(study_name=HEADER, storage=self._storage).user_attrs
            for name in names & {HEADER, *kept.get("cells", ())}:
                optuna.delete_study(study_name=name, storage=self._storage)

    def _open_journal(self, path: Path, fresh: bool) -> JournalStorage:
        check_regular(path)
        cleared = clear_optuna_locks(path)
        if cleared:
            self.notes.append(f"removed orphaned locks: {', '.join(cleared)}")
        if fresh:
            path.unlink(missing_ok=True)
        if path.exists() and is_foreign(path):
            self._set_aside(path)
        if path.exists():
            dropped = cut_to_whole_lines(path)
            if dropped:
                self.notes.append(f"{path.name}: dropped {plural(dropped, 'byte')} of a half-written record")
        self._file = JournalFile(path)
        try:
            return JournalStorage(self._file)
        except (LookupError, TypeError, ValueError, AssertionError, AttributeError):  # what Optuna ends with on it
            self._file.close()
            self._set_aside(path)
            self._file = JournalFile(path)
            return JournalStorage(self._file)

    def _set_aside(self, path: Path) -> None:
        aside = path.with_name(path.name + ".unreadable")
        path.replace(aside)
        self.notes.append(f"{path.name}: holds no records of a probe; moved to {aside.name}, starting over")

    def _study(self, name: str, sampler: BaseSampler | None = None, pruner: BasePruner | None = None) -> Study:
        with _quiet_optuna():
            return optuna.create_study(
                study_name=name,
                storage=self._storage,
                sampler=sampler or optuna.samplers.RandomSampler(seed=0),
                pruner=pruner or optuna.pruners.NopPruner(),
                direction="minimize",
                load_if_exists=True,
            )

    def study(self, cell: Workload, sampler: BaseSampler | None = None, pruner: BasePruner | None = None) -> Study:
        """The study of a cell, with everything an earlier run recorded in it."""
        name = str(cell)
        if self._url is not None and name not in (known := self._header.user_attrs.get("cells", [])):
            self._header.set_user_attr("cells", [*known, name])
        return self._study(name, sampler, pruner)

    def remember(self, name: str, value: Any) -> None:
        """A fact of the whole probe (JSON), such as a cell that is done."""
        self._header.set_user_attr(name, value)
        self.sync()

    def sync(self) -> None:
        """Put on the disk what was told so far."""
        if self._file is not None:
            self._file.sync()

    def recall(self, name: str) -> Any:
        return self._header.user_attrs.get(name)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def without_password(url: str) -> str:
    """Return a URL as messages show it."""
    return re.sub(r"(//[^:/@]*):[^@/]*@", r"\1:***@", url)


def _open_url(url: str) -> BaseStorage:
    """Return the storage of a URL, which can be read and written."""
    try:
        with _quiet_optuna():
            storage = optuna.storages.get_storage(url)
            optuna.create_study(study_name=HEADER, storage=storage, load_if_exists=True)
            return storage
    except (ImportError, OptunaError, SQLAlchemyError, RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0].replace(url, without_password(url))
        raise ProbeFailure(
            f"--storage {without_password(url)}: cannot be opened ({reason}); give a URL that Optuna takes"
        ) from error


@contextlib.contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna announces every study on stderr; a progress display cannot use that."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
