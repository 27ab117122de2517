"""Tells hosts and devices apart, for locks and process groups. None of it ever goes into a profile."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .cgroups import text_of

if TYPE_CHECKING:
    import torch

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Return text that tells this host, until it reboots, from any other; containers of one host may differ."""
    return f"{platform.node()} {text_of(_BOOT_ID).strip()}"


def pid_scope() -> tuple[str, str]:
    """Return where a process id is valid: the host, and its namespace of process ids, "" where that is not told."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return host_identity(), namespace


def device_identity(device: torch.device) -> str:
    """Return text that tells this device from any other, the same under each of its names and numbers.

    That is a card's UUID, else its place on the PCI bus of this host; for a CPU the host, of which all containers have
    one kernel.
    """
    host = text_of(_BOOT_ID).strip() or platform.node()
    if device.type != "cuda":
        return f"{device.type}-{host}"
    import torch

    properties: Any = torch.cuda.get_device_properties(device)
    uuid = str(getattr(properties, "uuid", "") or "")
    if any(character not in "0-" for character in uuid):
        return f"cuda-{uuid}"
    return f"cuda-{pci_bus(properties)}-{host}"


def pci_bus(properties: Any) -> str:
    """Return a card's place on the PCI bus as the driver writes it, out of torch's properties of the card."""
    return f"{properties.pci_domain_id:08X}:{properties.pci_bus_id:02X}:{properties.pci_device_id:02X}.0"
