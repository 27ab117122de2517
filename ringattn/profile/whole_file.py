"""Reads and writes files, whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from pathlib import Path

STALE_TEMPORARY_S = 3600.0  # a write takes seconds; of what is older the writer was killed
_TEMPORARY = re.compile(r"\.(.{1,100})\.[0-9a-f]{12}\.tmp", re.DOTALL)


def check_regular(descriptor: int, path: Path) -> os.stat_result:
    """Return the status of an open file; OSError, whose ``strerror`` says what it is, for no regular one."""
    status = os.fstat(descriptor)
    if stat.S_ISDIR(status.st_mode):
        raise IsADirectoryError(errno.EISDIR, "it is a directory", str(path))
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return status


def read_regular(path: Path, most_bytes: int) -> bytes:
    """Return the content of a regular file of at most ``most_bytes``.

    OSError, whose ``strerror`` says why, for anything else: no pipe is waited for, no device read, and no more than
    ``most_bytes`` are. Of no size is what the kernel makes up when it is read, as /proc/kmsg, which waits for the next
    message and gives each to one reader alone: nothing is read of it. ValueError for a name with a NUL.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # waits for no writer of a pipe
    try:
        size = check_regular(descriptor, path).st_size
        if size == 0:
            return b""
        _check_size(size, most_bytes, path)
        with os.fdopen(descriptor, "rb", closefd=False) as file:
            content = file.read(most_bytes + 1)
    finally:
        os.close(descriptor)
    _check_size(len(content), most_bytes, path)  # it may have grown
    return content


def _check_size(size: int, most_bytes: int, path: Path) -> None:
    if size > most_bytes:
        raise OSError(errno.EFBIG, f"it has {size} bytes, more than {most_bytes}", str(path))


def replace_file(target: Path, content: bytes, *, lasting: bool = True) -> None:
    """Replace ``target`` by ``content`` in one step; OSError where that fails, with the old file untouched.

    ``lasting``: it is on the disk before it takes the place, so that a power cut leaves one of the two. What killed
    writers of ``target`` left beside it is removed.
    """
    temporary = target.with_name(f".{target.name[:100]}.{secrets.token_hex(6)}.tmp")
    try:
        # Not tempfile: its 0600 would keep a profile from the cluster it is shared with; here the umask decides.
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            if lasting:
                file.flush()
                os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if lasting:
        _sync_directory(target.parent)
    remove_stale(target, target.name)


def remove_stale(written: Path, name: str | None = None) -> None:
    """Remove the old temporary files beside one that was just written, whose time is this file server's.

    Those for the file ``name``, or for any.
    """
    try:
        now = written.stat().st_mtime
        with os.scandir(written.parent) as entries:
            for entry in entries:
                match = _TEMPORARY.fullmatch(entry.name)
                ours = match is not None and (name is None or match[1] == name[:100])
                if ours and now - entry.stat(follow_symlinks=False).st_mtime > STALE_TEMPORARY_S:
                    Path(entry.path).unlink()
    except OSError:  # another writer was faster, or may not list or remove here: what was written is whole
        return


def _sync_directory(directory: Path) -> None:
    """Make the new name last through a power cut, where directories can be synced."""
    if os.name != "posix":
        return
    with contextlib.suppress(OSError):  # the file is whole and in place; some file systems sync no directory
        descriptor = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
