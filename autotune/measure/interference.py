"""Interference with a timing: foreign load, steal time, throttling.

What a monitor finds makes a block worthless, so the caller repeats or refuses it. Readings come from /proc, the cgroup
and NVML; what cannot be read is not guessed at, and ``unmonitored`` names it once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from ringattn.hardware.cgroups import read_throttled_s
from ringattn.hardware.nvml import open_nvml

from .evaluator import Interference, InterferenceKind

FOREIGN_SHARE = 0.25  # of the CPUs we may use, taken by others during a block
STEAL_SHARE = 0.10  # taken by the hypervisor
THROTTLED_SHARE = 0.10  # of the block, held back by a cgroup quota
SHORTEST_S = 0.15  # /proc/stat counts in hundredths of a second: shorter blocks say nothing

_PROC_STAT = Path("/proc/stat")

# Clock event reasons that mean the card cannot keep its clocks for a reason outside of the workload,
# as nvml.h numbers them.
_THROTTLE_BITS = {
    0x08: InterferenceKind.HARDWARE_SLOWDOWN,
    0x20: InterferenceKind.THERMAL,
    0x40: InterferenceKind.HARDWARE_THERMAL,
    0x80: InterferenceKind.POWER_BRAKE,
}


@dataclass(frozen=True, slots=True)
class HostReading:
    """Seconds so far: of all usable CPUs busy and stolen, of this process, and throttled by the cgroup's quota."""

    at_s: float
    busy_s: float
    steal_s: float
    own_s: float
    throttled_s: float

    def after(self, began: HostReading, ended: HostReading) -> HostReading:
        """Return this reading after a further time, from one reading to another."""
        names = (field.name for field in fields(self))
        return HostReading(*(getattr(self, n) + getattr(ended, n) - getattr(began, n) for n in names))


_AT_REST = HostReading(0.0, 0.0, 0.0, 0.0, 0.0)


def cpu_seconds(stat: str, cpus: frozenset[int], ticks_per_s: int) -> tuple[float, float]:
    """Return busy and stolen seconds of these CPUs, out of the text of /proc/stat."""
    busy = steal = 0
    for line in stat.splitlines():
        name, *fields = line.split()
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in cpus:
            user, nice, system, _idle, _iowait, irq, softirq, stolen = map(int, fields[:8])
            busy += user + nice + system + irq + softirq
            steal += stolen
    return busy / ticks_per_s, steal / ticks_per_s


def process_seconds(stat: str, ticks_per_s: int) -> float:
    """Return seconds of all threads of a process and of its ended children, out of the text of /proc/PID/stat."""
    fields = stat.rpartition(")")[2].split()  # the second field, a name in brackets, may hold spaces
    return sum(map(int, fields[11:15])) / ticks_per_s


def host_disturbances(before: HostReading, after: HostReading, cpu_count: int) -> tuple[Interference, ...]:
    """Return the interference between two readings; empty where they are too close to say."""
    seconds = after.at_s - before.at_s
    if seconds < SHORTEST_S:
        return ()
    capacity = seconds * cpu_count
    foreign = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    found = []
    if foreign > FOREIGN_SHARE * capacity + 0.02:  # two ticks of rounding
        found.append(Interference(InterferenceKind.FOREIGN_LOAD, 100 * foreign / capacity))
    steal = after.steal_s - before.steal_s
    if steal > STEAL_SHARE * capacity + 0.02:
        found.append(Interference(InterferenceKind.STEAL, 100 * steal / capacity))
    throttled = after.throttled_s - before.throttled_s
    if throttled > THROTTLED_SHARE * seconds:
        found.append(Interference(InterferenceKind.QUOTA, 100 * throttled / seconds))
    return tuple(found)


def free_cpus(before: HostReading, after: HostReading, cpu_count: int) -> int | None:
    """Return how many CPUs others left between two readings, at least one; None where they are too close to say."""
    seconds = after.at_s - before.at_s
    if seconds < SHORTEST_S:
        return None
    foreign_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s) + (after.steal_s - before.steal_s)
    return max(1, min(cpu_count, round(cpu_count - foreign_s / seconds)))


def throttle_reasons(bits: int) -> tuple[Interference, ...]:
    """Return the clock event reasons that spoil a timing."""
    return tuple(Interference(kind) for bit, kind in _THROTTLE_BITS.items() if bits & bit)


class Gpu:
    """The NVIDIA driver's readings of one card; None is one that it does not give."""

    def __init__(self, uuid: str) -> None:
        self._nvml = open_nvml()
        self._card: Any = None if self._nvml is None else self._nvml.card_of_uuid(uuid)

    def reasons(self) -> int | None:
        """Return the bits of the current clock event reasons."""
        return None if self._nvml is None else self._nvml.throttle_bits(self._card)

    def processes(self) -> int | None:
        """Return how many processes compute on the card, ours among them."""
        return None if self._nvml is None else self._nvml.processes(self._card)


class InterferenceMonitor:
    """Reads the host, and one GPU where there is one, before and after a block.

    ``siblings`` are the processes of the other ranks on this host. Neither their load is foreign nor that of this
    probe's pool, which compiles while blocks are timed.
    """

    def __init__(self, gpu_uuid: str | None = None, siblings: Sequence[int] = ()) -> None:
        self._siblings = tuple(siblings)
        self.unmonitored: list[str] = []
        self._cpus = frozenset(os.sched_getaffinity(0))
        self._ticks = os.sysconf("SC_CLK_TCK")
        self._gpu: Gpu | None = None
        self._pool: tuple[int, ...] = ()
        self._foreign: int | None = None  # processes of others on the GPU, once blocks have begun
        if not _PROC_STAT.exists():
            self.unmonitored.append("foreign load on the host cannot be seen: no /proc/stat")
        if gpu_uuid is not None:
            self._gpu = Gpu(gpu_uuid)
            if self._gpu.reasons() is None:
                self.unmonitored.append("throttling of the GPU cannot be seen: its driver does not tell it here")
            if self._gpu.processes() is None:
                self.unmonitored.append("others on the GPU cannot be seen: its driver does not tell them here")
        self._before: HostReading | None = None
        self._unjudged = _AT_REST  # blocks too short to say anything by themselves, added up
        self._looked: HostReading | None = None  # for CPUs that are free
        self._free = len(self._cpus)

    def _read(self) -> HostReading:
        stat = _PROC_STAT.read_text() if _PROC_STAT.exists() else ""
        busy, steal = cpu_seconds(stat, self._cpus, self._ticks)
        own = time.process_time() + sum(self._process_seconds(pid) for pid in (*self._siblings, *self._pool))
        return HostReading(time.perf_counter(), busy, steal, own, read_throttled_s())

    def _process_seconds(self, pid: int) -> float:
        """Return seconds that a process has used; 0 for one that is gone, which ends the block by itself."""
        try:
            return process_seconds(Path(f"/proc/{pid}/stat").read_text(), self._ticks)
        except OSError:
            return 0.0

    def begin(self, pool_processes: Sequence[int] = ()) -> None:
        """Begin a block while ``pool_processes`` of this probe are on the same GPU."""
        self._pool = tuple(pool_processes)
        if self._gpu is not None and self._foreign is None and (count := self._gpu.processes()) is not None:
            self._foreign = max(0, count - self._ours())
        self._before = self._read()

    def _ours(self) -> int:
        """Return how many processes the driver may count: other ranks here, too, once messages went card to card."""
        return 1 + len(self._siblings) + len(self._pool)

    def free_cpus(self) -> int:
        """Return how many CPUs others have left free since this was asked last."""
        now = self._read()
        found = free_cpus(self._looked, now, len(self._cpus)) if self._looked is not None else None
        if self._looked is None or found is not None:
            self._looked, self._free = now, found or self._free
        return self._free

    def end(self) -> tuple[Interference, ...]:
        """Return the interference since ``begin``, and in the blocks before it that were too short to say.

        A block of three plans takes 50 ms: a row was called stale beside busy loops that no block was long enough for.
        """
        assert self._before is not None
        self._unjudged = self._unjudged.after(self._before, self._read())
        # A GPU is fed by one host thread: only what the quota or a full machine does to it matters there.
        found = list(host_disturbances(_AT_REST, self._unjudged, len(self._cpus)))
        if self._unjudged.at_s >= SHORTEST_S:
            self._unjudged = _AT_REST
        if self._gpu is not None:
            found.extend(throttle_reasons(self._gpu.reasons() or 0))
            count = self._gpu.processes()
            if count is not None and self._foreign is not None and count > self._ours() + self._foreign:
                found.append(Interference(InterferenceKind.FOREIGN_PROCESS))
        return tuple(found)
