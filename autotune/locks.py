"""Locks on files. They are the kernel's, which drops them when their process ends, however it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import platform
from pathlib import Path

_MOST_BYTES = 300  # of a file of somebody else's


class LockHeld(Exception):
    """Another process holds the lock; the text names it."""


class FileLock:
    """Lock on a file, made if need be, that holds the id of the process that has it and the name of its host."""

    def __init__(self, path: Path, *, shared: bool = False) -> None:
        """Take the lock, without waiting; a ``shared`` one beside others of that kind, whose file names the last.

        Raises LockHeld while another holds it; OSError where the file cannot be written, as on a read-only or full
        disk, and where its file system has no locks.
        """
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._file, _MOST_BYTES, 0).decode("ascii", "replace").strip()
            self.release()
            raise LockHeld(f"process {holder or 'unknown'}") from None
        except OSError:
            self.release()
            raise
        with contextlib.suppress(OSError):  # on a full disk it holds as well without a name in it
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, f"{os.getpid()} on {platform.node()}".encode(), 0)

    def release(self) -> None:
        os.close(self._file)
