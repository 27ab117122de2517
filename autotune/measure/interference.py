"""Interference with a timing: foreign load, steal time, throttling.

What a monitor finds makes a block worthless, so the caller repeats or refuses it. Readings come from /proc, the cgroup
and NVML; what cannot be read is not guessed at, and ``unmonitored`` names it once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from .evaluator import Interference, InterferenceKind

FOREIGN_SHARE = 0.25  # of the CPUs we may use, taken by others during a block
STEAL_SHARE = 0.10  # taken by the hypervisor
THROTTLED_SHARE = 0.10  # of the block, held back by a cgroup quota
SHORTEST_S = 0.15  # /proc/stat counts in hundredths of a second: shorter blocks say nothing

_PROC_STAT = Path("/proc/stat")
_MEMINFO = Path("/proc/meminfo")
_CGROUP_STAT = Path("/sys/fs/cgroup/cpu.stat")

# Clock event reasons that mean the card cannot keep its clocks for a reason outside of the workload.
_THROTTLE_BITS = {
    pynvml.nvmlClocksThrottleReasonHwSlowdown: InterferenceKind.HARDWARE_SLOWDOWN,
    pynvml.nvmlClocksThrottleReasonSwThermalSlowdown: InterferenceKind.THERMAL,
    pynvml.nvmlClocksThrottleReasonHwThermalSlowdown: InterferenceKind.HARDWARE_THERMAL,
    pynvml.nvmlClocksThrottleReasonHwPowerBrakeSlowdown: InterferenceKind.POWER_BRAKE,
}


@dataclass(frozen=True, slots=True)
class HostReading:
    """Seconds so far: of all usable CPUs busy and stolen, of this process, and throttled by the cgroup's quota."""

    at_s: float
    busy_s: float
    steal_s: float
    own_s: float
    throttled_s: float


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


def throttled_seconds(cpu_stat: str) -> float:
    """Return seconds throttled by the quota, out of the text of the cgroup's cpu.stat; 0 without a quota."""
    for line in cpu_stat.splitlines():
        name, _, value = line.partition(" ")
        if name == "throttled_usec":
            return int(value) / 1e6
    return 0.0


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


class Nvml:
    """The NVIDIA driver's readings of one card."""

    def __init__(self, uuid: str) -> None:
        """Open the driver; raises NVMLError where there is none, or it does not know the card."""
        pynvml.nvmlInit()
        self._handle: Any = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid.removeprefix('GPU-')}")

    def reasons(self) -> int:
        """Return the bits of the current clock event reasons."""
        return int(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle))

    def processes(self) -> int:
        """Return how many processes compute on the card, ours among them."""
        return len(pynvml.nvmlDeviceGetComputeRunningProcesses(self._handle))


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
        self._nvml: Nvml | None = None
        self._pool: tuple[int, ...] = ()
        self._foreign: int | None = None  # processes of others on the GPU, once blocks have begun
        if not _PROC_STAT.exists():
            self.unmonitored.append("foreign load on the host cannot be seen: no /proc/stat")
        if gpu_uuid is not None:
            try:
                self._nvml = Nvml(gpu_uuid)
            except pynvml.NVMLError as error:
                self.unmonitored.append(f"throttling of the GPU cannot be seen: {error}")
        self._before: HostReading | None = None
        self._looked: HostReading | None = None  # for CPUs that are free
        self._free = len(self._cpus)

    def _read(self) -> HostReading:
        stat = _PROC_STAT.read_text() if _PROC_STAT.exists() else ""
        busy, steal = cpu_seconds(stat, self._cpus, self._ticks)
        quota = throttled_seconds(_CGROUP_STAT.read_text()) if _CGROUP_STAT.exists() else 0.0
        own = time.process_time() + sum(self._process_seconds(pid) for pid in (*self._siblings, *self._pool))
        return HostReading(time.perf_counter(), busy, steal, own, quota)

    def _process_seconds(self, pid: int) -> float:
        """Return seconds that a process has used; 0 for one that is gone, which ends the block by itself."""
        try:
            return process_seconds(Path(f"/proc/{pid}/stat").read_text(), self._ticks)
        except OSError:
            return 0.0

    def begin(self, pool_processes: Sequence[int] = ()) -> None:
        """Begin a block while ``pool_processes`` of this probe are on the same GPU."""
        self._pool = tuple(pool_processes)
        if self._nvml is not None and self._foreign is None:
            self._foreign = max(0, self._nvml.processes() - self._ours())
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
        """Return the interference since ``begin``."""
        assert self._before is not None
        # A GPU is fed by one host thread: only what the quota or a full machine does to it matters there.
        found = list(host_disturbances(self._before, self._read(), len(self._cpus)))
        if self._nvml is not None:
            found.extend(throttle_reasons(self._nvml.reasons()))
            assert self._foreign is not None
            if self._nvml.processes() > self._ours() + self._foreign:
                found.append(Interference(InterferenceKind.FOREIGN_PROCESS))
        return tuple(found)


def available_kib() -> int:
    """Return the memory of the host that is available without swapping."""
    meminfo = _MEMINFO.read_text()
    return next(int(line.split()[1]) for line in meminfo.splitlines() if line.startswith("MemAvailable:"))
