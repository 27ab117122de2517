"""Writes files whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def replace_file(target: Path, content: bytes, *, lasting: bool = True) -> None:
    """Replace ``target`` by ``content`` in one step; OSError where that fails, with the old file untouched.

    ``lasting``: it is on the disk before it takes the place, so that a power cut leaves one of the two.
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


def _sync_directory(directory: Path) -> None:
    """Make the new name last through a power cut, where directories can be synced."""
    if os.name != "posix":
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
