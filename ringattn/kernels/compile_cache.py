"""Folders in which compilers of kernels keep what they made: another one where the user's own cannot be written."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

_logger = logging.getLogger("ringattn")


def can_keep(folder: Path) -> bool:
    """Return whether files can be made in ``folder``, which is made if need be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK | os.X_OK)


@cache
def prepare_triton() -> None:
    """Give Triton a folder of this process's own where its own cannot be written: without one it compiles nothing.

    Its own is in the home, which is read-only or absent in many containers. TRITON_CACHE_DIR wins over both.
    """
    if os.environ.get("TRITON_CACHE_DIR"):
        return
    home = os.environ.get("TRITON_HOME") or os.path.expanduser("~/")  # noqa: PTH111 - Path's needs a home
    own = Path(home, ".triton", "cache")
    if can_keep(own):
        return
    try:
        folder = tempfile.mkdtemp(prefix="ringattn-triton-")
    except OSError as error:
        _logger.warning("%s: cannot be written, and %s; set TRITON_CACHE_DIR to a folder that can", own, error.strerror)
        return
    os.environ["TRITON_CACHE_DIR"] = folder
    atexit.register(_remove, folder, os.getpid())
    _logger.warning(
        "%s: cannot be written, so that this process compiles Triton's kernels anew; set TRITON_CACHE_DIR to a folder "
        "that can",
        own,
    )


def _remove(folder: str, process: int) -> None:
    """Remove the folder when the process that made it ends; those that it forked have it, too."""
    if os.getpid() == process:
        shutil.rmtree(folder, ignore_errors=True)
