"""Exact long-context attention, dense or dilated, that runs the way this machine was measured to run best."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .versions import __version__ as __version__
from .workload import Pattern, Workload

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts, detect
    from ringattn.profile.schema import Profile
    from ringattn.profile.yaml_io import load_profile
    from ringattn.runtime.packed.documents import Documents
    from ringattn.runtime.ranges import named_ranges

    from .attention import RingAttention
    from .decoding.cache import KVCache

__all__ = [
    "Documents",
    "HardwareFacts",
    "KVCache",
    "LongNetBlock",
    "LongNetEncoder",
    "MultiheadAttention",
    "Pattern",
    "Profile",
    "RingAttention",
    "Workload",
    "detect",
    "load_profile",
    "named_ranges",
    "scaled_dot_product_attention",
]

# Loaded on first use, so that the command line can read profiles without waiting for torch.
_HOMES = {
    "RingAttention": "attention",
    "MultiheadAttention": "modules.multihead_attention",
    "scaled_dot_product_attention": "modules.functional",
    "LongNetBlock": "modules.longnet",
    "LongNetEncoder": "modules.longnet",
    "Documents": "runtime.packed.documents",
    "KVCache": "decoding.cache",
    "HardwareFacts": "hardware.facts",
    "detect": "hardware.facts",
    "Profile": "profile.schema",
    "load_profile": "profile.yaml_io",
    "named_ranges": "runtime.ranges",
}


def __dir__() -> list[str]:
    return sorted(__all__)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(f".{_HOMES[name]}", __name__), name)
