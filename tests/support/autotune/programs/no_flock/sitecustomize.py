"""Makes this interpreter's file system one without locks, as some network and user-space ones are."""

from __future__ import annotations

import errno
import fcntl
import os


def _refuse(file: object, operation: int) -> None:
    number = getattr(errno, os.environ["TEST_FLOCK_ERRNO"])
    raise OSError(number, os.strerror(number))


fcntl.flock = _refuse  # type: ignore[assignment]
