"""One probe per device and user: two would spoil each other's numbers."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from .edge import Edge, device_name
from .exit_codes import DeviceBusy
from .probe import ProbeRequest


@contextlib.contextmanager
def device_lock(request: ProbeRequest, edge: Edge) -> Iterator[None]:
    """Holds the device until the block is left or the process dies; raises DeviceBusy while another holds it."""
    base = edge.environ.get("XDG_STATE_HOME") or str(edge.home / ".local" / "state")
    folder = Path(base) / "ringtune"
    folder.mkdir(parents=True, exist_ok=True)
    name = device_name(request, edge.facts).replace(":", "-")
    with (folder / f"{name}.lock").open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DeviceBusy(f"{name}: another probe is measuring it; wait, or choose another --device") from None
        yield
