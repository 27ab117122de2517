"""Benches whose kernels misbehave by head dimension: 16 kills the worker, 24 hangs, 32 loses the device."""

from __future__ import annotations

import os
import signal
import sys
import time

from autotune.measure.bench import BenchSettings
from ringattn.hardware.kernel_faults import Combination, Figure, Verdict


class CrashingBench:
    def __init__(self, settings: BenchSettings) -> None:
        print("a library that talks", flush=True)

    def check_kernel(self, asked: Combination, rows: int) -> Verdict:
        one = (asked.head_dim, asked.kernel, asked.backward)
        if one == (16, "flash-cpu", True):
            print("so long", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGSEGV)
        if one == (24, "flash-cpu", True):
            time.sleep(60)
        if one[:2] == (32, "flash-cpu"):
            raise RuntimeError("CUDA error: misaligned address")
        return Verdict((Figure("dq", 0.001, 0.03),))

    def unmonitored(self) -> tuple[str, ...]:
        return ()


class NeverStarts:
    def __init__(self, settings: BenchSettings) -> None:
        print("no torch", file=sys.stderr, flush=True)
        os._exit(1)
