"""The file that Optuna's journal is in: where it lies, who may write it, and what is left of it after a kill.

Optuna's journal breaks for good when something is appended after a half-written line, and an orphaned lock of
its file backend blocks a reader or writer for thirty seconds. So one process writes, under a lock of our own that
dies with it; before it opens the file it cuts it to its last whole line and removes locks nobody can hold.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

from autotune.exit_codes import DeviceBusy, ProbeFailure
from autotune.journal.attributes import NO_JOURNAL
from autotune.locks import FileLock, LockHeld
from ringattn.wording import plural

_TAIL_BYTES = 2**20
_OPTUNA_LOCK_SUFFIXES = (".lock", ".rename")


def journal_path(profile: Path) -> Path:
    """Return the journal's path, beside the profile."""
    return profile.with_name(profile.name + ".journal")


def check_regular(path: Path) -> None:
    """Raise ProbeFailure for a pipe, device or folder in a file's place: opening a pipe would wait forever."""
    if path.exists() and not path.is_file():
        raise ProbeFailure(f"{path}: is not a regular file; move it away or choose another --output")


class WriterLock:
    """A lock on a file beside the journal, which holds the id of the process that has it.

    Workers of a ``shared`` search have it together, as they write one journal line by line, and one profile. ``note``
    says why two writers at once would not see each other, "" where they would.
    """

    def __init__(self, journal: Path, *, shared: bool = False) -> None:
        path = journal.with_name(journal.name + ".writer")
        journal.parent.mkdir(parents=True, exist_ok=True)
        check_regular(path)
        self.note = ""
        self._path, self._is_new = path, not path.exists()
        self._lock: FileLock | None = None
        try:
            self._lock = FileLock(path, shared=shared)
        except LockHeld as held:
            raise DeviceBusy(
                f"{journal}: another probe ({held}) is writing it; wait for it or choose another --output. "
                f"Where its host is gone for good, delete {path}"
            ) from None
        except OSError as error:
            self.note = f"{path}: cannot be locked ({error.strerror}); let no other probe write this profile meanwhile"

    def forget(self) -> None:
        """Delete the file if this lock made it, as nothing was written. Called while it is held."""
        if self._is_new:
            self._path.unlink(missing_ok=True)

    def release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def is_foreign(path: Path) -> bool:
    """Return whether the first whole line is no JSON: no record cut off while it was written, but somebody's file."""
    with path.open("rb") as file:
        first = file.readline(2**20)
    try:
        json.loads(first)
    except ValueError:
        return first.endswith(b"\n")
    return False


def cut_to_whole_lines(path: Path) -> int:
    """Drop a half-written tail, and what follows the first line in it that is no JSON; return the bytes dropped.

    Only the end of an appended file can be damaged by a process or a machine that stopped.
    """
    size = path.stat().st_size
    keep = 0
    with path.open("rb") as journal:
        if size > _TAIL_BYTES:
            journal.seek(size - _TAIL_BYTES)
            journal.readline()  # the rest of a line
            keep = journal.tell()
        for line in journal:
            if not line.endswith(b"\n"):
                break
            try:
                json.loads(line)
            except ValueError:
                break
            keep += len(line)
    if keep < size:
        os.truncate(path, keep)
    return size - keep


def clear_optuna_locks(path: Path) -> list[str]:
    """Remove the locks of Optuna's file backend: only who holds our own lock writes, so they are orphans."""
    cleared = []
    for orphan in path.parent.glob(f"{path.name}*"):
        if orphan.name.endswith(_OPTUNA_LOCK_SUFFIXES):
            orphan.unlink(missing_ok=True)
            cleared.append(orphan.name)
    return cleared


class JournalFile(JournalFileBackend):
    """Optuna's journal file, written by this process alone: no lock per line, and on the disk when a trial is told.

    The stock backend takes a lock and waits for the disk at every one of a trial's dozen lines, and opens the file to
    read each of them back: 2.4 ms of the tuner's own time a trial, where this takes 0.6. What is written survives this
    process being killed either way.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._lines = path.open("ab", buffering=0)
        self._unread: list[str] | None = None  # written here and not read back yet; None before the first reading

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = [json.dumps(log, separators=(",", ":")) + "\n" for log in logs]
        content = "".join(lines).encode()
        with self._naming_the_file():
            written = self._lines.write(content)
            if written < len(content):  # where the disk became full; what is appended to half a line is lost
                os.ftruncate(self._lines.fileno(), self._lines.tell() - written)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self._unread is not None:
            self._unread += lines

    def read_logs(self, log_number_from: int) -> Generator[dict[str, Any], None, None]:
        """Return logs from this number on. Optuna reads each once: after the first time those written since."""
        if self._unread is None:
            self._unread = []
            yield from super().read_logs(log_number_from)
            return
        unread, self._unread = self._unread, []
        yield from map(json.loads, unread)

    def sync(self) -> None:
        with self._naming_the_file():
            os.fsync(self._lines.fileno())

    @contextlib.contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """Report a full disk with the name of the file, which the system leaves out, and the way on."""
        try:
            yield
        except OSError as error:
            raise ProbeFailure(
                f"{self._lines.name}: cannot be written ({error.strerror}); finished trials are kept: "
                "make room, then run the same command to go on"
            ) from error

    def close(self) -> None:
        self._lines.close()


def open_journal(path: Path, *, fresh: bool) -> tuple[JournalFile, JournalStorage, list[str]]:
    """Return the journal at ``path``, empty where it is ``fresh`` or not a probe's, and what has to be said of it."""
    check_regular(path)
    cleared = clear_optuna_locks(path)
    notes = [f"removed orphaned locks: {', '.join(cleared)}"] if cleared else []
    if fresh:
        path.unlink(missing_ok=True)
    if path.exists() and is_foreign(path):
        notes.append(_set_aside(path))
    if path.exists() and (dropped := cut_to_whole_lines(path)):
        notes.append(f"{path.name}: dropped {plural(dropped, 'byte')} of a half-written record")
    file = JournalFile(path)
    try:
        return file, JournalStorage(file), notes
    except NO_JOURNAL:
        file.close()
        notes.append(_set_aside(path))
        file = JournalFile(path)
        return file, JournalStorage(file), notes


def _set_aside(path: Path) -> str:
    aside = path.with_name(path.name + ".unreadable")
    path.replace(aside)
    return f"{path.name}: holds no records of a probe; moved to {aside.name}"
