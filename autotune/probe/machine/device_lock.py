"""Lock of a device: two probes of one user would spoil each other's numbers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from autotune.exit_codes import DeviceBusy
from autotune.locks import FileLock, LockHeld
from autotune.probe.request import ProbeRequest
from ringattn.profile.locations import state_folder

from .environment import Environment, device_name


@contextlib.contextmanager
def device_lock(request: ProbeRequest, environment: Environment, say: Callable[[str], None]) -> Iterator[None]:
    """Hold the devices of a probe until the block is left or the process dies; raises DeviceBusy while another does.

    The locks are in the user's state folder. Where none can be there the probe goes on, and ``say`` is told.
    """
    folder = state_folder(environment.environ, environment.home)
    name = device_name(request, environment.facts)
    with contextlib.ExitStack() as held:
        for device in environment.devices:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                held.callback(FileLock(folder / f"{device}.lock").release)
            except LockHeld as holder:
                other = ", or choose another --device" if environment.facts.device_count > 1 else ""
                raise DeviceBusy(f"{name}: another probe is measuring it ({holder}); wait{other}") from None
            except OSError as error:
                say(f"{folder}: cannot hold a lock ({error.strerror}); let no other probe measure {name} meanwhile")
                break
        yield
