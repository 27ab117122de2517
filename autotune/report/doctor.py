"""What this machine can run: every kernel, available or why not, tried where it can be, and what would change it."""

from __future__ import annotations

import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts
    from ringattn.kernels.contract import BlockKernel, KernelNeed

State = Literal["works", "broken", "wrong", "unavailable"]

CHECK_COMMAND = (sys.executable, "-m", "autotune.report.kernel_check")
KERNEL_TIMEOUT_S = 180.0  # a first call may compile
TRIED_DTYPES = ("bf16", "fp16", "fp32")
ERROR_BOUND = {"bf16": 2e-2, "fp16": 3e-3, "fp32": 1e-5}  # generous: this asks whether it works, not how well
KNOWN_ARCHES = ("sm_60", "sm_61", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
NOTES = {
    "xformers": "the kernels of 0.0.35 are torch's own (FlashAttention 2, CUTLASS), plus split-K and merges",
    "flash": "torch's FlashAttention 2, unless torch was told to put another in its place",
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One kernel to be run once."""

    kernel: str
    dtype: str
    backward: bool


@dataclass(frozen=True, slots=True)
class TrialResult:
    """What came of it: the largest relative errors against float64, or why there are none."""

    error: str = ""
    out: float = math.nan
    grads: float | None = None


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One kernel on this machine. ``detail`` says what ran or why not, ``remedy`` what would make it run."""

    kernel: str
    state: State
    detail: str
    remedy: str = ""
    note: str = ""


def diagnose(facts: HardwareFacts, run: Callable[[Sequence[Trial]], dict[str, TrialResult]]) -> tuple[Diagnosis, ...]:
    """Every kernel of the table in its order; ``run`` tries those that say they can."""
    from ringattn.kernels.registry import KERNELS

    trials = {name: trial for name, kernel in KERNELS.items() if (trial := trial_for(kernel, facts)) is not None}
    results = run(tuple(trials.values()))
    return tuple(
        _from_result(kernel, trials[name], results[name]) if name in trials else _unavailable(kernel, facts)
        for name, kernel in KERNELS.items()
    )


def trial_for(kernel: BlockKernel, facts: HardwareFacts) -> Trial | None:
    """The first dtype this kernel runs here, with its backward if it has one; None when it runs in no dtype."""
    for backward in (True, False):
        for dtype in TRIED_DTYPES:
            if not kernel.unsupported_reasons(tiny_need(facts, dtype, backward), facts):
                return Trial(kernel.name, dtype, backward)
    return None


def tiny_need(facts: HardwareFacts, dtype: str, backward: bool) -> KernelNeed:
    """What the tiny input of ``kernel_check`` asks of a kernel."""
    from ringattn.kernels.registry import KernelNeed

    from .kernel_check import HEAD_DIM, HEADS, ROWS

    return KernelNeed(
        vendor=facts.vendor,
        arch=facts.arch,
        dtype=dtype,
        head_dim=HEAD_DIM,
        heads=HEADS,
        kv_heads=HEADS,
        rows=ROWS,
        blocks=1,
        causal=True,
        backward=backward,
    )


def _from_result(kernel: BlockKernel, trial: Trial, result: TrialResult) -> Diagnosis:
    note = NOTES.get(kernel.name, "")
    if result.error:
        return Diagnosis(kernel.name, "broken", result.error, kernel.remedy, note)
    ran = "forward and backward" if result.grads is not None else "forward only, it has no backward here"
    errors = [result.out] if result.grads is None else [result.out, result.grads]
    detail = f"ran {ran} in {trial.dtype}; relative error {' and '.join(f'{error:.1e}' for error in errors)}"
    bound = ERROR_BOUND[trial.dtype]
    if not all(error <= bound for error in errors):  # NaN is not below anything
        return Diagnosis(kernel.name, "wrong", f"{detail}, above {bound:.0e}", kernel.remedy, note)
    return Diagnosis(kernel.name, "works", detail, note=note)


def _unavailable(kernel: BlockKernel, facts: HardwareFacts) -> Diagnosis:
    found = [kernel.unsupported_reasons(tiny_need(facts, dtype, False), facts) for dtype in TRIED_DTYPES]
    fewest = min(len(reasons) for reasons in found)
    reasons = "; ".join(next(reasons for reasons in found if len(reasons) == fewest))
    return Diagnosis(kernel.name, "unavailable", reasons, remedy_for(kernel, facts), NOTES.get(kernel.name, ""))


def remedy_for(kernel: BlockKernel, facts: HardwareFacts) -> str:
    """What would make a kernel run, asked of its own checks with other machines in place of this one."""
    with_package = replace(facts, packages=(*facts.packages, kernel.package)) if kernel.package else facts
    if trial_for(kernel, with_package) is not None:
        return kernel.remedy
    if trial_for(kernel, replace(with_package, vendor="cpu", arch="x86_64")) is not None:
        return "use --device cpu"
    served = [
        arch
        for arch in KNOWN_ARCHES
        if trial_for(kernel, replace(with_package, vendor="nvidia", arch=arch)) is not None
    ]
    if not served:
        return ""
    newest = served[-1] == KNOWN_ARCHES[-1]
    machine = f"an NVIDIA GPU of {served[0]}" + (
        " or newer" if newest and len(served) > 1 else f" to {served[-1]}" if len(served) > 1 else ""
    )
    missing = kernel.package and kernel.package not in facts.packages and kernel.remedy
    return f"needs {machine}" + (f"; then: {kernel.remedy}" if missing else "")


def run_trials(trials: Sequence[Trial], device: str, timeout_s: float = KERNEL_TIMEOUT_S) -> dict[str, TrialResult]:
    """Each trial once, in child processes: one that kills or hangs its process loses only itself."""
    results: dict[str, TrialResult] = {}
    remaining = list(trials)
    while remaining:
        results |= _run_until_death(remaining, device, timeout_s)
        undone = [trial for trial in remaining if trial.kernel not in results]
        assert len(undone) < len(remaining), "every round settles at least one kernel"
        remaining = undone
    return results


def _run_until_death(trials: Sequence[Trial], device: str, timeout_s: float) -> dict[str, TrialResult]:
    arguments = [f"{t.kernel}:{t.dtype}:{'both' if t.backward else 'forward'}" for t in trials]
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        child = subprocess.Popen(
            [*CHECK_COMMAND, device, *arguments],
            stdout=subprocess.PIPE,
            stderr=complaints,
            stdin=subprocess.DEVNULL,
            text=True,
            env=child_environment(),
        )
        try:
            results, running, late = _listen(child, timeout_s)
        finally:
            child.kill()
            child.wait()
        complaints.seek(0)
        said = complaints.read().strip().splitlines()
    if len(results) < len(trials):
        lost = running or next(t.kernel for t in trials if t.kernel not in results)
        fate = f"did not end in {timeout_s:.0f} s" if late else death(child.returncode)
        results[lost] = TrialResult(error=": ".join(filter(None, (fate, said[-1] if said else ""))))
    return results


def _listen(child: subprocess.Popen[str], timeout_s: float) -> tuple[dict[str, TrialResult], str, bool]:
    """Results as they come, the kernel that was running at the end, and whether it took too long."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert child.stdout is not None
        for line in child.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    results: dict[str, TrialResult] = {}
    running = ""
    while True:
        try:
            line = lines.get(timeout=timeout_s)
        except queue.Empty:
            return results, running, True
        if line is None:
            child.wait()
            return results, running, False
        if not line.startswith("{"):
            continue  # a library that prints to stdout
        message = json.loads(line)
        if "begin" in message:
            running = message["begin"]
        else:
            name = message.pop("end")
            results[name] = TrialResult(**message)
            running = ""


def torch_device(vendor: str, device: str | None) -> str:
    """The device string for a child process: what was asked for, or what detection settled on."""
    return device or ("cpu" if vendor == "cpu" else "cuda")


def child_environment() -> dict[str, str]:
    """This process's, with the package where the child finds it."""
    path = os.pathsep.join(filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path}


def death(returncode: int | None) -> str:
    """How a child process ended."""
    if returncode is not None and returncode < 0:
        return f"its process died of {signal.Signals(-returncode).name}"
    return f"its process ended with exit code {returncode}"
