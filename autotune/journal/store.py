"""The record of a probe: an Optuna storage with one study per cell, and one for facts of the whole probe."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import optuna
from optuna.exceptions import OptunaError, StorageInternalError
from optuna.pruners import BasePruner
from optuna.samplers import BaseSampler
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.study import Study, StudyDirection

from autotune.exit_codes import ProbeFailure
from ringattn.wording import plural
from ringattn.workload import Workload

from .attributes import BadStudy, attribute, read_by_optuna, required
from .cell_study import RESULT
from .file import JournalFile, WriterLock, check_regular, clear_optuna_locks, cut_to_whole_lines, is_foreign
from .lease import Lease

HEADER = "probe"
_USED = "used_s"
COUNTED_EVERY_S = 5.0
_CELLS = "cells"  # names of the studies of a database that are this probe's


class Store:
    """All studies of one probe. ``path=None`` keeps them in memory (simulation, tests)."""

    def __init__(self, path: Path | None, *, identity: str = "", fresh: bool = False, url: str | None = None) -> None:
        """Opens or starts the journal at ``path``, or with ``url`` the storage that Optuna finds there.

        ``identity`` says what the probe is (machine, software, request); a journal with another one, or ``fresh``, is
        started over. Raises DeviceBusy when another process writes it, OSError when it cannot be written, ProbeFailure
        for a ``url`` that Optuna cannot open.
        """
        assert url is None or path is not None
        self.path = path
        self.notes: list[str] = []
        self._url = url
        self._identity = identity
        self._lock: WriterLock | None = None
        self._lease: Lease | None = None
        self._file: JournalFile | None = None
        self._storage: BaseStorage = InMemoryStorage()
        self._count: Callable[[], None] = lambda: None
        if path is not None:
            self._lock = WriterLock(path)  # also beside another storage: two probes must not write one profile
            self.notes += [self._lock.note] if self._lock.note else []
        try:
            if url is not None:
                self._open_url(url)
            elif path is not None:
                self._storage = self._open_journal(path, fresh)
            if url is not None and fresh:
                self._delete_studies()
            self._header = self._study(HEADER)
            self.resumed = self._resume()
        except BaseException as error:
            if self._lock is not None:
                self._lock.forget()
            self.close()
            self._translate(error)
            raise

    def _resume(self) -> bool:
        """Return whether the header is of this very probe; a new one becomes it."""
        with read_by_optuna(_where(HEADER)):
            attrs = self._header.user_attrs
        if self._url is not None and not _is_probe_header(self._header):
            raise self._somebody_else_s()
        if not attrs:
            self._header.set_user_attr("identity", self._identity)
            return False
        if required(attrs, "identity", str, _where(HEADER)) == self._identity:
            return True
        assert self.path is not None, "a store in memory is always new"
        if self._url is not None:
            raise ProbeFailure(
                f"{self.place}: holds the studies of another machine, software or request; "
                "name another database, or give --fresh to delete them"
            )
        self.notes.append(f"{self.path.name}: of another machine, software or request; starting over")
        self.start_over()
        return False

    @property
    def place(self) -> str:
        """Return where the studies are, in words."""
        if self._url is not None:
            return f"--storage {without_password(self._url)}"
        return str(self.path) if self.path is not None else "memory"

    def _open_url(self, url: str) -> None:
        """Open the storage of a URL, which can be read and written and which no other probe holds."""
        try:
            with _quiet_optuna():
                self._storage = optuna.storages.get_storage(url)
                self._lease = Lease(url, self.place)
        except _url_errors() as error:
            raise _not_opened(url, error) from error

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
            header = optuna.load_study(study_name=HEADER, storage=self._storage)
            if not _is_probe_header(header):
                raise self._somebody_else_s()
            kept = header.user_attrs
            cells: tuple[str, ...] = attribute(kept, _CELLS, tuple[str, ...], _where(HEADER)) or ()
            for name in names & {HEADER, *cells}:
                optuna.delete_study(study_name=name, storage=self._storage)

    def _somebody_else_s(self) -> ProbeFailure:
        return ProbeFailure(f"{self.place}: its study {HEADER!r} is not of a probe; name another database")

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
        """The study of a cell, with everything an earlier run recorded in it."""
        name = str(cell)
        if self._url is not None and name not in (known := self.recall(_CELLS, tuple[str, ...]) or ()):
            self._header.set_user_attr(_CELLS, [*known, name])
        with read_by_optuna(_where(name)):
            return self._study(name, sampler, pruner)

    def remember(self, name: str, value: Any) -> None:
        """A fact of the whole probe (JSON), such as a cell that is done."""
        self._header.set_user_attr(name, value)
        self.sync()

    def finished(self, cells: Iterable[Workload]) -> int:
        """Return how many of the cells an earlier run came to a result of."""
        names = {str(cell) for cell in cells}
        studies = self._storage.get_all_studies()
        return sum(study.study_name in names and RESULT in study.user_attrs for study in studies)

    @property
    def used_s(self) -> float:
        """Return the seconds that earlier runs used; of one that was killed its last COUNTED_EVERY_S may be missing."""
        used: float = self.recall(_USED, float) or 0.0
        return used

    @contextlib.contextmanager
    def counting(self, elapsed_s: Callable[[], float]) -> Iterator[None]:
        """Count the seconds of a run until the block is left."""
        before_s, counted_s = self.used_s, 0.0

        def count(*, at_end: bool = False) -> None:
            nonlocal counted_s
            now_s = elapsed_s()
            if at_end or now_s - counted_s >= COUNTED_EVERY_S:
                counted_s = now_s
                self._header.set_user_attr(_USED, round(before_s + now_s, 1))

        self._count = count
        try:
            yield
        finally:
            self._count = lambda: None
            count(at_end=True)

    def sync(self) -> None:
        """Put on the disk what was told so far."""
        self._count()
        if self._file is not None:
            self._file.sync()
        if self._lease is not None:
            self._lease.check()

    def recall(self, name: str, hint: Any) -> Any:
        """Return a fact of the whole probe as a value of the type ``hint``, None where there is none; or BadStudy."""
        return attribute(self._header.user_attrs, name, hint, _where(HEADER))

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lease is not None:
            self._lease.release()
            self._lease = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.close()
        if error is not None:
            self._translate(error)

    def _translate(self, error: BaseException) -> None:
        """Raise ProbeFailure for what a database, but no mistake of ours, ends with."""
        if self._url is not None and isinstance(error, StorageInternalError | _database_error()):
            reason = _reason(error.__cause__ or error, self._url)
            raise ProbeFailure(
                f"{self.place}: cannot be used any more ({reason}); run the same command to go on when it can"
            ) from error


def _is_probe_header(study: Study) -> bool:
    """Return whether a study of the header's name is a header: also one whose probe was killed before it wrote."""
    attrs = study.user_attrs
    return "identity" in attrs or (not attrs and not study.trials and study.directions == [StudyDirection.MINIMIZE])


def _where(name: str) -> str:
    return f"study {name!r}"


def _database_error() -> type[Exception]:
    """Return the error of all databases. A journal needs none: their package takes 0.2 s to import."""
    from sqlalchemy.exc import SQLAlchemyError

    return SQLAlchemyError


def _url_errors() -> tuple[type[Exception], ...]:
    """Return what a URL that is not usable ends with."""
    return ImportError, OptunaError, _database_error(), RuntimeError, ValueError


def check_url(url: str) -> None:
    """Raise ProbeFailure for a URL that no storage can be opened at; nothing is written, and no SQLite file made."""
    import sqlalchemy

    try:
        engine = sqlalchemy.create_engine(url)
        file = engine.url.database if engine.dialect.name == "sqlite" else None
        if file is None or file in ("", ":memory:") or Path(file).exists():
            engine.connect().close()
        elif not Path(file).absolute().parent.is_dir():
            raise ValueError(f"the folder of {file} does not exist")
        engine.dispose()
    except _url_errors() as error:
        raise _not_opened(url, error) from error


def _not_opened(url: str, error: Exception) -> ProbeFailure:
    reason = _reason(error, url)
    return ProbeFailure(f"--storage {without_password(url)}: cannot be opened ({reason}); give a URL that Optuna takes")


def without_password(url: str) -> str:
    """Return a URL as messages show it."""
    return re.sub(r"(//[^:/@]*):[^@/]*@", r"\1:***@", url)


def _reason(error: BaseException, url: str) -> str:
    """Return the first line of what an error says, without the password of the URL."""
    return (str(error).splitlines() or [type(error).__name__])[0].replace(url, without_password(url))


@contextlib.contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna announces every study on stderr; a progress display cannot use that."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
