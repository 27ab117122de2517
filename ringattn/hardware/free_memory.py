"""Reads how much memory a device has free now."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from .cpu import read_cpu, usable_memory

if TYPE_CHECKING:
    import torch


def free_bytes(device: torch.device) -> int:
    """Return the bytes that torch can still allocate on a device: free there, or cached by its allocator.

    Of a CPU what the system calls available, within the limits of this process's cgroups.
    """
    if device.type != "cuda":
        return free_cpu_bytes()
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def free_cpu_bytes(root: Path = Path("/")) -> int:
    """Return what /proc below ``root`` says is available; where it says nothing, as on macOS, all that there is."""
    reading = read_cpu(1, root)
    found = re.search(r"^MemAvailable:\s+(\d+) kB", _text(root / "proc/meminfo"), re.MULTILINE)
    if found is None:
        return usable_memory(reading.memory_bytes, reading.memory_limits)
    pages = _text(root / "proc/self/statm").split()
    resident = int(pages[1]) * os.sysconf("SC_PAGE_SIZE") if len(pages) > 1 else 0
    return max(0, usable_memory(int(found[1]) * 1024, tuple(limit - resident for limit in reading.memory_limits)))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
