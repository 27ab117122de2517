"""What a worker runs in tests: a bench that dies, hangs or errs on command. The command is the name of the kernel."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from autotune.measure.bench import BenchSettings, Phase, WrongAnswer
from autotune.measure.evaluator import Checked, Interference, Proven, Sample
from ringattn.errors import DeviceError, KernelLoadError
from ringattn.workload import Tunables, Workload

TIMES_MS = {"quick": 2.0, "swift": 1.0}


class FaultyBench:
    """Right and instant for the kernels of TIMES_MS; every other kernel name is a way to fail."""

    def __init__(self, settings: BenchSettings) -> None:
        self.settings = settings
        self.forgotten = 0
        self.loaded = False
        if settings.device == "bug-at-start":
            raise ZeroDivisionError("a bug of ours")

    def check(self, workload: Workload, tunables: Tunables, phase: Phase, pace_ms: float | None) -> Checked:
        kernel = tunables.branches[0].forward
        phase("reference" if kernel == "stopped-at-reference" else "forward")
        if tunables.branches[0].backward:
            self._obey(kernel)
            phase("backward")
            kernel = tunables.branches[0].backward
        ms = self._obey(kernel)
        return Checked(ms, 1e-3, 1000, ms, float(os.getpid()))

    def validate(self, workload: Workload, tunables: Tunables, phase: Phase, part: tuple[int, int] = (0, 1)) -> Proven:
        phase("candidate")
        return Proven(self._obey(tunables.branches[0].forward))

    def first_call(self, workload: Workload, tunables: Tunables) -> Proven:
        return Proven(self._obey(tunables.branches[0].forward))

    def run_profile(self, workload: Workload, profile_path: str) -> Tunables:
        raise NotImplementedError

    def sample(self, workload: Workload, tunables: Tunables) -> Sample:
        if tunables.branches[0].forward == "who-else":
            return Sample(1.0, float(len(self.pool_processes)))
        return Sample(self._obey(tunables.branches[0].forward), 10.0)

    def begin_block(self, pool_processes: Sequence[int] = ()) -> None:
        self.pool_processes = pool_processes

    def end_block(self) -> tuple[Interference, ...]:
        return ()

    def unmonitored(self) -> tuple[str, ...]:
        return ("nothing is watched here",)

    def release_all(self) -> None:
        self.forgotten += 1

    def _obey(self, kernel: str) -> float:
        if kernel in TIMES_MS:
            return TIMES_MS[kernel]
        if kernel == "segfault":
            ctypes.string_at(0)
        elif kernel == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kernel in ("stopped", "stopped-at-reference"):
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kernel in ("killed-once", "stopped-once"):
            done = Path(os.environ["ONCE_FILE"])
            if not done.exists():
                done.touch()
                os.kill(os.getpid(), signal.SIGKILL if kernel == "killed-once" else signal.SIGSTOP)
            return 3.0
        elif kernel == "loads":  # at its first call in a process
            if not self.loaded:
                time.sleep(float(os.environ["LOAD_S"]))
                self.loaded = True
            return 5.0
        elif kernel == "exit":
            print("the library's last words", flush=True)
            os._exit(3)
        elif kernel == "hang":
            time.sleep(3600)
        elif kernel == "oom":
            raise RuntimeError("CUDA out of memory. Tried to allocate 80.00 GiB")
        elif kernel == "oom-once":
            if not self.forgotten:
                raise RuntimeError("[enforce fail at alloc_cpu.cpp] . DefaultCPUAllocator: can't allocate memory")
            return 4.0
        elif kernel == "too-much":
            import torch

            torch.empty(1 << 44, dtype=torch.uint8).fill_(1)
        elif kernel == "wrong":
            raise WrongAnswer("out errs by 3e-01; S=3001, negative inputs, seed 0")
        elif kernel == "sticky":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        elif kernel == "compile":
            raise _CompilationError("at 12:34: unsupported tile")
        elif kernel == "error":
            raise ValueError("several\nlines of\ntext")
        elif kernel == "unloadable":
            raise KernelLoadError("lost", "import lost: no", "Install it")
        elif kernel == "mentions-kills":
            raise RuntimeError("another process got SIGKILL; kernel lost cannot be loaded")
        elif kernel == "bug":
            raise AssertionError("a bug of ours")
        elif kernel == "late-orphan":
            Path(os.environ["ORPHAN_FILE"]).write_text(str(os.getpid()))
            time.sleep(3600)
        raise AssertionError(f"unknown command {kernel}")


class _CompilationError(Exception):
    pass


_CompilationError.__name__ = "CompilationError"


class ProvingInParts(FaultyBench):
    """A part of a proof is wrong, or has no memory, as the environment says when the process starts."""

    def __init__(self, settings: BenchSettings) -> None:
        super().__init__(settings)
        self._wrong = os.environ.get("WRONG_PART", "")
        self._lacks_memory = "HELPER_LACKS_MEMORY" in os.environ
        if "NO_DEVICE" in os.environ:
            raise DeviceError("all of its slots are taken")

    def validate(self, workload: Workload, tunables: Tunables, phase: Phase, part: tuple[int, int] = (0, 1)) -> Proven:
        if self._lacks_memory:
            raise RuntimeError("CUDA out of memory. Tried to allocate 80.00 GiB")
        if str(part[0]) == self._wrong:
            raise WrongAnswer(f"part {part[0]} of {part[1]} errs")
        if part[0] == 0 and tunables.branches[0].forward == "error":
            raise ValueError("in the measuring worker alone")
        return Proven(0.0)


class Crowded(FaultyBench):
    """Has memory for a check while no other process makes first calls, and for its own part of a proof afterwards."""

    def __init__(self, settings: BenchSettings) -> None:
        super().__init__(settings)
        self._crowd = Path(os.environ["CROWD_FOLDER"])
        self._refusals = 0

    def first_call(self, workload: Workload, tunables: Tunables) -> Proven:
        (self._crowd / str(os.getpid())).touch()
        return super().first_call(workload, tunables)

    def check(self, workload: Workload, tunables: Tunables, phase: Phase, pace_ms: float | None) -> Checked:
        if any(Path("/proc", other.name).exists() for other in self._crowd.iterdir()):
            raise RuntimeError("CUDA out of memory. Tried to allocate 32.00 GiB")
        return super().check(workload, tunables, phase, pace_ms)

    def validate(self, workload: Workload, tunables: Tunables, phase: Phase, part: tuple[int, int] = (0, 1)) -> Proven:
        if part[0] == 0 and self._refusals < 2:  # the second attempt of a worker is beside the pool, as the first
            self._refusals += 1
            raise RuntimeError("CUDA out of memory. Tried to allocate 32.00 GiB")
        return Proven(0.0)
