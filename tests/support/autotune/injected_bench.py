"""The real bench, real kernels and all, in which chosen plans go wrong in every way that plans have.

Times are invented, so that what wins does not depend on what else the machine does.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autotune.measure.bench import Phase
from autotune.measure.benchmark import DeviceBench
from autotune.measure.evaluator import Checked, Sample
from autotune.space.space import candidate_key
from ringattn import RingAttention
from ringattn.workload import Tunables, Workload

SCRIPT = "INJECTED_SCRIPT"  # names a file: {"wrongs": {plan: wrong}, "times_ms": {plan: milliseconds}}
TIME_MS = 10.0  # of any other plan


def write_script(path: Path, wrongs: Mapping[Tunables, str], times_ms: Mapping[Tunables, float]) -> dict[str, str]:
    """The environment of a worker that obeys."""
    script = {
        "wrongs": {candidate_key(plan): wrong for plan, wrong in wrongs.items()},
        "times_ms": {candidate_key(plan): ms for plan, ms in times_ms.items()},
    }
    path.write_text(json.dumps(script))
    return {SCRIPT: str(path), "PYTHONPATH": str(Path(__file__).parent)}


class InjectedBench(DeviceBench):
    """What a wrong does, it does at every call of its plan; those that end in "-once" do it once in a probe."""

    def _module(self, workload: Workload, tunables: Tunables) -> RingAttention:
        module = super()._module(workload, tunables)
        script_path = Path(os.environ[SCRIPT])
        script, key = json.loads(script_path.read_text()), candidate_key(tunables)
        wrong = script["wrongs"].get(key, "")

        def before(*_: Any) -> None:
            if wrong == "killed-once" and _first_time(script_path, wrong):
                os.kill(os.getpid(), signal.SIGKILL)
            elif wrong:
                go_wrong(wrong)

        def after(module: RingAttention, inputs: Any, result: Any) -> Any:
            factor = {"nan": math.nan, "wrong": 1.5}.get(wrong)
            if factor is None:
                return None
            return (result[0] * factor, result[1]) if isinstance(result, tuple) else result * factor

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        return module

    def check(self, workload: Workload, tunables: Tunables, phase: Phase, pace_ms: float | None) -> Checked:
        return replace(super().check(workload, tunables, phase, None), call_ms=_time_ms(tunables))

    def sample(self, workload: Workload, tunables: Tunables) -> Sample:
        """In the middle of a block somebody stops the worker, once."""
        path = Path(os.environ[SCRIPT])
        if "killed-once" in json.loads(path.read_text())["wrongs"].values() and _first_time(path, "stopped-once"):
            os.kill(os.getpid(), signal.SIGSTOP)
        super().sample(workload, tunables)
        return Sample(_time_ms(tunables), 10.0)

    def end_block(self) -> tuple[str, ...]:
        super().end_block()
        return ()


def _time_ms(tunables: Tunables) -> float:
    ms: float = json.loads(Path(os.environ[SCRIPT]).read_text())["times_ms"].get(candidate_key(tunables), TIME_MS)
    return ms


def _first_time(script: Path, what: str) -> bool:
    mark = script.with_name(what)
    first = not mark.exists()
    mark.touch()
    return first


def go_wrong(how: str) -> None:
    if how == "segfault":
        ctypes.string_at(0)
    elif how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "hang":
        time.sleep(3600)
    elif how == "oom":
        torch.empty(1 << 44, dtype=torch.uint8).fill_(1)
    elif how == "sticky":
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")
    elif how == "device-side assert":
        torch.zeros(4, device="cuda")[torch.tensor([7], device="cuda")].sum().item()
    elif how == "illegal memory access":
        nowhere = torch._C._construct_storage_from_data_pointer(1 << 20, torch.device("cuda", 0), 64)
        torch.empty(0, device="cuda").set_(nowhere).sum().item()
