"""Journal in a folder that nodes share, which several processes write line by line."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from optuna.exceptions import StorageInternalError
from optuna.storages.journal import JournalFileBackend, JournalFileSymlinkLock

# Seconds after which a lock of a shared journal counts as left by a process that was killed while it appended, which
# takes milliseconds. Meanwhile no worker can give a sign of life, and those must not look dead to each other.
ORPHANED_S = 8
_TAIL_BYTES = 2**20
_BEGINNING = b'{"op_code":'  # of each line that Optuna writes


class SharedJournalFile(JournalFileBackend):
    """Optuna's journal file in a folder that nodes share, written by several processes, each line under Optuna's lock.

    The stock backend appends to a line that a killed process left half-written, which breaks the file for good. A file
    that cannot be written is a StorageInternalError, as a database is.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path), JournalFileSymlinkLock(str(path), grace_period=ORPHANED_S))
        self._path = path

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        lines = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode()
        with self._naming_the_file(), self._locked(), self._path.open("a+b", buffering=0) as file:
            size, whole = _size_and_whole_lines(file)
            if whole < size:
                file.truncate(whole)
            # At the end, wherever that is by now: a process that was stopped here may have lost the lock.
            if file.write(lines) < len(lines):
                raise OSError("only a part could be written")
            os.fsync(file.fileno())

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self._lock.acquire()
        try:
            yield
        finally:
            self._lock.release()

    @contextlib.contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageInternalError(f"{self._path}: {error.strerror or error}") from error
        except RuntimeError as error:  # the lock is another's by now
            raise StorageInternalError(f"{self._path}: held up for {ORPHANED_S} s while writing") from error


def is_journal(path: Path) -> bool:
    """Return whether a file is empty, or begins as a journal of Optuna does, be it half-written."""
    with path.open("rb") as file:
        beginning = file.read(len(_BEGINNING))
    return _BEGINNING.startswith(beginning)


def _size_and_whole_lines(file: BinaryIO) -> tuple[int, int]:
    """Return the position of the end, and the one behind the last newline, 0 where there is none."""
    size = end = file.seek(0, os.SEEK_END)
    while end > 0:
        begin = max(0, end - _TAIL_BYTES)
        file.seek(begin)
        newline = file.read(end - begin).rfind(b"\n")
        if newline >= 0:
            return size, begin + newline + 1
        end = begin
    return size, 0
