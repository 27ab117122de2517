"""Lock of a device: two probes of one user would spoil each other's numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from autotune.exit_codes import DeviceBusy

from .environment import Environment, device_name
from .request import ProbeRequest


@contextlib.contextmanager
def device_lock(request: ProbeRequest, environment: Environment) -> Iterator[None]:
    """Hold the device until the block is left or the process dies; raises DeviceBusy while another holds it."""
    base = environment.environ.get("XDG_STATE_HOME") or str(environment.home / ".local" / "state")
    folder = Path(base) / "ringtune"
    folder.mkdir(parents=True, exist_ok=True)
    name = device_name(request, environment.facts).replace(":", "-")
    try:
        held = FileLock(folder / f"{name}.lock").acquire(timeout=0)
    except Timeout:
        raise DeviceBusy(f"{name}: another probe is measuring it; wait, or choose another --device") from None
    with held:
        yield
