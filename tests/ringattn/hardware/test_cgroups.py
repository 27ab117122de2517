"""One reader of a container's limits, for the facts, the worker's limit and the monitor."""

from __future__ import annotations

from pathlib import Path

import pytest

from autotune.measure import interference, worker
from ringattn.hardware import cgroups
from ringattn.hardware.cgroups import ContainerLimits, available_bytes, data_bytes, read_limits, read_throttled_s
from ringattn.hardware.cpu import read_cpu, usable_memory

GIB = 2**30
MEMORY = {
    "proc/meminfo": "MemTotal: 33554432 kB\nMemAvailable:   16777216 kB\n",
    "proc/self/status": "VmPeak: 9 kB\nVmData:\t  262144 kB\n",
}
V2 = {
    "proc/self/cgroup": "0::/pods/pod/c\n",
    "sys/fs/cgroup/pods/pod/memory.max": f"{GIB}\n",
    "sys/fs/cgroup/pods/pod/memory.current": f"{GIB // 2}\n",
    "sys/fs/cgroup/pods/pod/memory.stat": f"anon 1\ninactive_file {GIB // 4}\n",
    "sys/fs/cgroup/pods/pod/c/memory.max": "max\n",
    "sys/fs/cgroup/pods/cpu.stat": "usage_usec 9\nnr_throttled 3\nthrottled_usec 2500000\n",
    "sys/fs/cgroup/pods/pod/cpu.max": "250000 100000\n",
    "sys/fs/cgroup/pods/pod/c/cpu.stat": "usage_usec 9\nthrottled_usec 500000\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/pod/c\n3:cpu,cpuacct:/pod/c\n1:name=systemd:/\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/memory/pod/memory.limit_in_bytes": f"{GIB}\n",
    "sys/fs/cgroup/memory/pod/memory.usage_in_bytes": f"{GIB // 2}\n",
    "sys/fs/cgroup/memory/pod/memory.stat": f"inactive_file 0\ntotal_inactive_file {GIB // 4}\n",
    "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_quota_us": "250000\n",
    "sys/fs/cgroup/cpu,cpuacct/pod/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/pod/cpu.stat": "nr_periods 9\nthrottled_time 2500000000\n",
    "sys/fs/cgroup/cpu,cpuacct/pod/c/cpu.stat": "throttled_time 500000000\n",
}


def files(root: Path, content: dict[str, str]) -> Path:
    for name, text in content.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("content", [V2, V1], ids=["version 2", "version 1"])
def test_limits_of_nested_cgroups_are_seen(tmp_path: Path, content: dict[str, str]) -> None:
    root = files(tmp_path, content | MEMORY)
    assert read_limits(root) == ContainerLimits((2.5,), (GIB,), (3 * GIB // 4,))
    assert read_throttled_s(root) == 3.0
    assert available_bytes(root) == 3 * GIB // 4
    reading = read_cpu(1, root)
    assert usable_memory(reading.memory_bytes, reading.memory_limits) == GIB


@pytest.mark.parametrize("content", [V2, V1], ids=["version 2", "version 1"])
def test_the_worker_s_limit_and_the_facts_see_one_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: dict[str, str]
) -> None:
    root = files(tmp_path, content | MEMORY)
    limits: list[tuple[int, int]] = []
    monkeypatch.setattr(worker.resource, "setrlimit", lambda kind, pair: limits.append(pair))
    monkeypatch.setattr(worker, "available_bytes", lambda: available_bytes(root))
    monkeypatch.setattr(worker, "data_bytes", lambda: data_bytes(root))
    worker._limit_memory(ranks=3)
    assert [soft for soft, _ in limits] == [GIB // 4 + int(3 * GIB // 4 * worker.MEMORY_SHARE / 3)]


def test_the_monitor_sees_a_quota_of_a_cgroup_further_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = files(tmp_path, V2)
    monkeypatch.setattr(interference, "read_throttled_s", lambda: read_throttled_s(root))
    monitor = interference.InterferenceMonitor()
    before = monitor._read().throttled_s
    files(root, {"sys/fs/cgroup/pods/cpu.stat": "throttled_usec 9500000\n"})
    assert monitor._read().throttled_s - before == 7.0


@pytest.mark.parametrize(
    ("content", "available"),
    [
        ({}, None),
        (MEMORY, 16 * GIB),
        ({"proc/meminfo": "MemTotal: 33554432 kB\n"}, None),
        (MEMORY | {"proc/self/cgroup": "0::/\nnonsense\n:::\n"}, 16 * GIB),
        (MEMORY | {"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/memory.max": "-1\n"}, 16 * GIB),
        (V2 | {"sys/fs/cgroup/pods/pod/memory.current": f"{2 * GIB}\n"}, 0),
        ({name: text for name, text in V2.items() if "memory.current" not in name}, GIB),
    ],
    ids=["nothing", "no container", "old kernel", "nonsense", "no limit", "over it", "use unknown"],
)
def test_available_memory(tmp_path: Path, content: dict[str, str], available: int | None) -> None:
    assert available_bytes(files(tmp_path, content)) == available


def test_unknown_memory_is_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "available_bytes", lambda: None)
    monkeypatch.setattr(worker.resource, "setrlimit", lambda *_: pytest.fail("a limit of nothing known"))
    worker._limit_memory(ranks=1)


def test_this_machine_is_read() -> None:
    assert (available_bytes() or 0) > 0
    assert cgroups.throttled_seconds("usage_usec 5\n") == 0.0
