"""What this machine is: frozen facts, and ``detect()``, the only device query at run time.

Readings (what drivers and files say) are kept apart from the pure functions that make facts out of them.
torch is imported only when a device is looked at.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HardwareFacts:
    """One device as decisions see it; nothing in it names a host, a user, a path or a serial number.

    ``sku`` is the class of card, one for its many spellings. ``sm_count`` is the number of streaming multiprocessors,
    or for a CPU the cores usable under affinity and cgroup quota; ``l2_mib`` the device's last-level cache (L3 of
    a CPU). ``threads`` are torch's intra-op threads (CPU only). ``packages`` are optional import names that can
    be found, without importing them.
    """

    vendor: str
    device_name: str
    sku: str
    arch: str
    sm_count: int
    memory_mib: int
    l2_mib: int
    mig: str = ""
    power_limit_w: int | None = None
    device_count: int = 1
    link: str = ""
    isa: tuple[str, ...] = ()
    threads: int = 0
    software: tuple[tuple[str, str], ...] = ()
    packages: tuple[str, ...] = ()


def detect(device: torch.device | str | int | None = None) -> HardwareFacts:
    raise NotImplementedError
