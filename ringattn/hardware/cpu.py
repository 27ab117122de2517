"""Reads this machine's CPU: the share that a container may use, not the whole host."""

from __future__ import annotations

import os
import platform
import re
from dataclasses import dataclass
from pathlib import Path

from .cgroups import read_limits, text_of

# Flags of /proc/cpuinfo that decide how fast a matrix product or an exponential runs, by the name used in facts.
_ISA_FLAGS = {
    "avx2": "avx2",
    "fma": "fma",
    "avx512f": "avx512f",
    "avx512_bf16": "avx512_bf16",
    "avx512_fp16": "avx512_fp16",
    "amx_bf16": "amx_bf16",
    "amx_fp16": "amx_fp16",
    "asimd": "neon",
    "neon": "neon",
    "asimdhp": "neon_fp16",
    "bf16": "neon_bf16",
    "sve": "sve",
    "sve2": "sve2",
    "sme": "sme",
}
_MACHINES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}


@dataclass(frozen=True, slots=True)
class CpuReading:
    """Raw answers of the operating system.

    ``cpuinfo`` is the text of /proc/cpuinfo, ``affinity`` the number of CPUs this process may be put on, ``quotas`` the
    CPU time each cgroup around it allows, in cores, and ``memory_limits`` their memory, in bytes.
    """

    machine: str
    cpuinfo: str
    fallback_name: str
    affinity: int
    quotas: tuple[float, ...]
    memory_bytes: int
    memory_limits: tuple[int, ...]
    last_level_cache_bytes: int
    threads: int


@dataclass(frozen=True, slots=True)
class CpuModel:
    """First processor of a /proc/cpuinfo."""

    name: str
    vendor_id: str
    family: int
    model: int
    implementer: int
    part: int
    flags: frozenset[str]


# --- pure -------------------------------------------------------------------------------------------------------


def parse_cpuinfo(text: str) -> CpuModel:
    """Parse the first processor of an x86 or Arm /proc/cpuinfo; a missing entry is empty or -1."""
    entries: dict[str, str] = {}
    for line in text.splitlines():
        name, separator, value = line.partition(":")
        if separator:
            entries.setdefault(name.strip(), value.strip())
    return CpuModel(
        name=" ".join(entries.get("model name", "").split()),
        vendor_id=entries.get("vendor_id", ""),
        family=_number(entries.get("cpu family")),
        model=_number(entries.get("model")),
        implementer=_number(entries.get("CPU implementer")),
        part=_number(entries.get("CPU part")),
        flags=frozenset(entries.get("flags", entries.get("Features", "")).split()),
    )


def isa_flags(flags: frozenset[str]) -> tuple[str, ...]:
    """Return the flags that matter for attention, sorted."""
    return tuple(sorted({name for flag, name in _ISA_FLAGS.items() if flag in flags}))


def cpu_arch(machine: str) -> str:
    """Return ``x86_64`` or ``aarch64`` for the names systems give them; any other machine's own name."""
    return _MACHINES.get(machine.lower(), machine.lower())


def usable_cores(affinity: int, quotas: tuple[float, ...]) -> int:
    """Return the cores that can be busy all the time: whole ones, and at least one."""
    return max(1, int(min([float(affinity), *quotas])))


def usable_memory(memory_bytes: int, limits: tuple[int, ...]) -> int:
    """Return the bytes this process may have: the machine's, or the least of its cgroups' limits."""
    return min([memory_bytes, *limits]) if memory_bytes else min(limits, default=0)


def _number(text: str | None) -> int:
    if text is None or not re.fullmatch(r"0x[0-9a-fA-F]+|[0-9]+", text):
        return -1
    return int(text, 0)


# --- the edge ---------------------------------------------------------------------------------------------------


def read_cpu(threads: int, root: Path = Path("/")) -> CpuReading:
    """Read /proc and /sys below ``root``; ``threads`` is torch's number. Missing files give empty or 0 entries."""
    limits = read_limits(root)
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        affinity = len(os.sched_getaffinity(0))
    else:
        affinity = os.cpu_count() or 1
    return CpuReading(
        machine=platform.machine(),
        cpuinfo=text_of(root / "proc/cpuinfo"),
        fallback_name=platform.processor(),
        affinity=affinity,
        quotas=limits.quotas,
        memory_bytes=_memory_bytes(root),
        memory_limits=limits.memory_limits,
        last_level_cache_bytes=_last_level_cache_bytes(root),
        threads=threads,
    )


def _memory_bytes(root: Path) -> int:
    if match := re.search(r"^MemTotal:\s+(\d+) kB", text_of(root / "proc/meminfo"), re.MULTILINE):
        return int(match[1]) * 1024
    if root == Path("/") and "SC_PHYS_PAGES" in os.sysconf_names:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 0


def _last_level_cache_bytes(root: Path) -> int:
    sizes = [0]
    for file in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*/size")):
        if match := re.fullmatch(r"(\d+)([KM])", text_of(file).strip()):
            sizes.append(int(match[1]) * {"K": 2**10, "M": 2**20}[match[2]])
    return max(sizes)
