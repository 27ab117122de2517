"""Exact long-context attention, dense or dilated, that runs the way this machine was measured to run best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .workload import Pattern, Workload

if TYPE_CHECKING:
    from .attention import RingAttention
    from .hardware import HardwareFacts, detect
    from .profile import Profile
    from .profile_io import load_profile

__version__ = "0.1.0"

__all__ = ["HardwareFacts", "Pattern", "Profile", "RingAttention", "Workload", "detect", "load_profile"]

# Loaded on first use, so that the command line can read profiles without waiting for torch.
_HOMES = {
    "RingAttention": "attention",
    "HardwareFacts": "hardware",
    "detect": "hardware",
    "Profile": "profile",
    "load_profile": "profile_io",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
