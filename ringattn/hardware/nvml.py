"""Asks the NVIDIA driver through pynvml. What it does not answer is unknown: None, and never an error.

A virtual GPU, a MIG slice and WSL refuse some queries as not supported, a container others for want of permission;
and the module called pynvml may be an old one, one of somebody else, or broken.
"""

from __future__ import annotations

import importlib
from typing import Any

_MOST_LINKS = 36  # of any card so far; a card ends the list itself
_ENABLED = 1  # NVML_FEATURE_ENABLED


class Nvml:
    """An open driver. A card is a handle of pynvml's, None where the driver does not know it."""

    def __init__(self, module: Any) -> None:
        self._module = module

    def _ask(self, function: str, *arguments: Any) -> Any:
        if None in arguments:
            return None
        try:
            return getattr(self._module, function)(*arguments)
        except Exception:  # noqa: BLE001 - pynvml's own errors have no name that a foreign module must have
            return None

    def _number(self, function: str, *arguments: Any) -> int | None:
        found = self._ask(function, *arguments)
        return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None

    def driver(self) -> str:
        """Return the driver's version; empty where it is unknown."""
        found = self._ask("nvmlSystemGetDriverVersion")
        if isinstance(found, bytes):  # before version 11.5
            found = found.decode("utf-8", "replace")
        return found if isinstance(found, str) else ""

    def card_on_bus(self, bus: str) -> Any:
        """Return the card on a PCI bus; the driver's order of cards is not torch's."""
        return self._ask("nvmlDeviceGetHandleByPciBusId", bus)

    def card_of_uuid(self, uuid: str) -> Any:
        """Return the card with a UUID, with or without ``GPU-`` before it."""
        return self._ask("nvmlDeviceGetHandleByUUID", f"GPU-{uuid.removeprefix('GPU-')}")

    def power_limit_mw(self, card: Any) -> int | None:
        """Return the enforced power limit in milliwatts."""
        return self._number("nvmlDeviceGetEnforcedPowerLimit", card)

    def active_links(self, card: Any) -> int | None:
        """Return how many NVLinks of a card are active."""
        active = None
        for link in range(_MOST_LINKS):
            state = self._number("nvmlDeviceGetNvLinkState", card, link)
            if state is None:  # one that this card does not have
                break
            active = (active or 0) + (state == _ENABLED)
        return active

    def throttle_bits(self, card: Any) -> int | None:
        """Return the bits of the current clock event reasons."""
        return self._number("nvmlDeviceGetCurrentClocksThrottleReasons", card)

    def processes(self, card: Any) -> int | None:
        """Return how many processes compute on a card."""
        found = self._ask("nvmlDeviceGetComputeRunningProcesses", card)
        return len(found) if isinstance(found, list | tuple) else None

    def close(self) -> None:
        """Leave the driver, once for each time that it was opened."""
        self._ask("nvmlShutdown")


def open_nvml() -> Nvml | None:
    """Return the open driver; None without a pynvml that can be imported, or without a driver."""
    try:
        module = importlib.import_module("pynvml")
        module.nvmlInit()
    except Exception:  # noqa: BLE001 - importing or opening a foreign module may raise anything
        return None
    return Nvml(module)
