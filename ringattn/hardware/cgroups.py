"""Limits of the container around this process: the one reader of its cgroups, version 1 and 2, nested or not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_LIMIT_BYTES = 2**60  # version 1 writes a number near 2**63 for "no limit"
_ROOT = Path("/")


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """Limits of each cgroup around this process, without those of no limit.

    ``quotas`` are the cores whose time may be used, ``memory_limits`` the bytes, and ``memory_left`` the bytes of each
    of those limits that are not in use; page cache that the kernel can drop is not.
    """

    quotas: tuple[float, ...] = ()
    memory_limits: tuple[int, ...] = ()
    memory_left: tuple[int, ...] = ()


def read_limits(root: Path = _ROOT) -> ContainerLimits:
    """Read the limits from the files below ``root``; a file that is missing or unreadable limits nothing."""
    quotas: list[float] = []
    limits: list[int] = []
    left: list[int] = []
    for controllers, folder in _cgroups(root):
        if not controllers:
            quota, _, period = text_of(folder / "cpu.max").partition(" ")
            quotas += _ratio(quota, period)
            limit, usage, idle = "memory.max", "memory.current", "inactive_file"
        else:
            if "cpu" in controllers:
                quotas += _ratio(text_of(folder / "cpu.cfs_quota_us"), text_of(folder / "cpu.cfs_period_us"))
            if "memory" not in controllers:
                continue
            limit, usage, idle = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        for limit_bytes in _limit(text_of(folder / limit)):
            used = _number(text_of(folder / usage)) - _entry(text_of(folder / "memory.stat"), idle)
            limits.append(limit_bytes)
            left.append(max(0, limit_bytes - max(0, used)))
    return ContainerLimits(tuple(quotas), tuple(limits), tuple(left))


def read_throttled_s(root: Path = _ROOT) -> float:
    """Return the seconds for which quotas have held this process back; 0 without a quota.

    Each cgroup counts for its own quota alone, so that those around it count, too.
    """
    return sum(
        throttled_seconds(text_of(folder / "cpu.stat"))
        for controllers, folder in _cgroups(root)
        if not controllers or "cpu" in controllers
    )


def throttled_seconds(cpu_stat: str) -> float:
    """Return seconds throttled, out of the text of a cgroup's cpu.stat: microseconds in version 2, else nanoseconds."""
    return _entry(cpu_stat, "throttled_usec") / 1e6 + _entry(cpu_stat, "throttled_time") / 1e9


def available_bytes(root: Path = _ROOT) -> int | None:
    """Return the memory that is available without swapping, to the host and within each limit; None where unknown."""
    left = [*read_limits(root).memory_left, *_kib_entry(root / "proc/meminfo", "MemAvailable")]
    return min(left, default=None)


def data_bytes(root: Path = _ROOT) -> int:
    """Return the bytes of addresses that RLIMIT_DATA counts against this process; 0 where unknown."""
    return sum(_kib_entry(root / "proc/self/status", "VmData"))


def _kib_entry(path: Path, name: str) -> list[int]:
    """Return the bytes of an entry such as ``MemAvailable: 16777216 kB``; none where there is none."""
    for line in text_of(path).splitlines():
        key, _, value = line.partition(":")
        if key == name and (kib := _number(value.removesuffix("kB"))) >= 0:
            return [1024 * kib]
    return []


def text_of(path: Path) -> str:
    """Return the file's text; empty where this system has no such file or does not let it be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cgroups(root: Path) -> Iterator[tuple[tuple[str, ...], Path]]:
    """Yield (controllers, folder) of each cgroup around this process; version 2 names no controllers.

    A container may see only part of the folders, or the mount alone.
    """
    mount = root / "sys/fs/cgroup"
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        controllers = tuple(name for name in names.split(",") if name)
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for depth in range(len(parts), -1, -1):
            yield controllers, (mount / names).joinpath(*parts[:depth])


def _ratio(quota: str, period: str) -> list[float]:
    if _number(quota) <= 0 or _number(period) <= 0:  # "max", "-1", or no such file
        return []
    return [_number(quota) / _number(period)]


def _limit(text: str) -> list[int]:
    return [limit] if 0 < (limit := _number(text)) < _NO_LIMIT_BYTES else []


def _entry(text: str, name: str) -> int:
    """Return the number behind a name in a file of such pairs; 0 where there is none."""
    for line in text.splitlines():
        key, _, value = line.partition(" ")
        if key == name:
            return max(0, _number(value))
    return 0


def _number(text: str) -> int:
    text = text.strip()
    return int(text) if text.isascii() and text.isdigit() else -1
