"""Files and folders that the tuner needs: whether it can write where it will have to, and files that need no folder."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from autotune.exit_codes import ProbeFailure

ROOM_BYTES = 4 * 2**20  # that a folder must have: the largest journal so far had 3.6 MB, the largest profile 136 KB


def write_trouble(folder: Path) -> str:
    """Return why ``folder`` cannot be written in, "" where it can: by writing a file that is gone again on return.

    Access rights alone would say nothing of a full disk, of a quota or of root, to whom they do not apply.
    """
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(os.urandom(ROOM_BYTES))  # which no file system compresses
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return error.strerror or str(error)
    return ""


def made_folder(folder: Path, variable: str) -> Path:
    """Return ``folder``, made if need be; ProbeFailure where it cannot be written in, which ``variable`` mends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        trouble = write_trouble(folder)
    except OSError as error:
        trouble = error.strerror or str(error)
    if trouble:
        raise ProbeFailure(f"{folder}: cannot be written in ({trouble}); set {variable} to a folder that can be")
    return folder


def is_there(path: Path) -> bool:
    """Return whether a file or folder is there and may be looked at; ``Path.exists`` raises where it may not be."""
    return os.path.exists(path)  # noqa: PTH110


def memory_file() -> IO[bytes]:
    """Return an open file that is in memory, and so needs no folder for temporary files; children may inherit it."""
    return os.fdopen(os.memfd_create("ringtune"), "w+b")


@contextlib.contextmanager
def readable_copy(content: bytes) -> Iterator[Path]:
    """Yield a name under which other processes of this user can read ``content`` until the block is left."""
    with memory_file() as file:
        file.write(content)
        file.flush()
        yield Path(f"/proc/{os.getpid()}/fd/{file.fileno()}")
