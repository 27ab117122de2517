"""Shared by every benchmark here: paired timing, peak memory, and a record of what was measured where.

Ratios come from one run: in each block every contender runs once, in random order, from a cold L2, and a ratio is
the median of the blocks' ratios. Absolute times are medians.
"""

from __future__ import annotations

import json
import platform
import random
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ringattn import detect
from ringattn.wording import plural

Step = Callable[[], object]


def machine() -> dict[str, Any]:
    """Return the card and the versions that a figure depends on."""
    facts = detect()
    return {
        "device": facts.device_name,
        "arch": facts.arch,
        "power_limit_w": facts.power_limit_w,
        "software": dict(facts.software),
        "python": platform.python_version(),
        "command": " ".join(sys.argv),
    }


def need_gpus(count: int = 1) -> None:
    """End the program with one line and exit status 1 where torch finds fewer than ``count`` NVIDIA GPUs."""
    found = torch.cuda.device_count() if torch.version.cuda else 0  # a ROCm build counts AMD's as CUDA devices
    if found < count:
        needs = f"needs {plural(count, 'NVIDIA GPU')}, and torch {torch.__version__} finds {found} here"
        sys.exit(f"{Path(sys.argv[0]).name}: {needs}; run it on a machine that has them, with a CUDA build of torch")


class Clock:
    """Times steps on the current CUDA device with events, L2 flushed before each."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)
        l2_bytes = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._flush = torch.empty(2 * l2_bytes, dtype=torch.uint8, device="cuda")

    def once_ms(self, step: Step) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        self._flush.zero_()
        torch.cuda._sleep(4_000_000)  # about 2 ms, in which the host gets ahead: launch time is measured by launch.py
        begin.record()
        step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    def wait(self) -> None:
        torch.cuda.synchronize()

    def blocks_ms(self, steps: Mapping[str, Step], blocks: int = 15, warmup: int = 3) -> dict[str, list[float]]:
        for step in steps.values():
            for _ in range(warmup):
                step()
        self.wait()
        times: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(blocks):
            for name in self._random.sample(list(steps), len(steps)):
                times[name].append(self.once_ms(steps[name]))
        return times


class HostClock(Clock):
    """Times steps of a CPU, for trying a benchmark where there is no GPU."""

    def __init__(self, seed: int = 0) -> None:
        self._random = random.Random(seed)

    def once_ms(self, step: Step) -> float:
        begin = time.perf_counter()
        step()
        return (time.perf_counter() - begin) * 1e3

    def wait(self) -> None:
        pass


def median(values: list[float]) -> float:
    return statistics.median(values)


def ratio(times: Mapping[str, list[float]], over: str, under: str) -> float:
    """Return the median of the blocks' ratios ``over / under``."""
    return median([a / b for a, b in zip(times[over], times[under], strict=True)])


def looped_ms(step: Step, calls: int) -> float:
    """Return the time of a step in a loop that does not wait for each: the slower of host and device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) / calls * 1e3


def peak_mib(step: Step) -> float:
    """Return the MiB allocated at most during a step beyond what was allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


class Record:
    """Rows printed as they come and written, with the machine, to ``folder``/``name``.json."""

    def __init__(self, name: str, folder: str | None) -> None:
        self.name = name
        self.rows: list[dict[str, Any]] = []
        self._machine = machine()
        self._path = Path(folder) / f"{name}.json" if folder else None
        if self._path:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        print(json.dumps(self._machine), flush=True)

    def add(self, **row: Any) -> None:
        self.rows.append(row)
        shown = (f"{key}={value:.3f}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items())
        print("  ".join(shown), flush=True)
        if self._path:
            self._path.write_text(json.dumps({"machine": self._machine, "rows": self.rows}, indent=1) + "\n")
