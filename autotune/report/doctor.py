"""Diagnose this machine: run every kernel that can run once, and say what keeps the others from running."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from autotune.report.numerics.numerics_map import Attempt, Shape, attempt_of
from ringattn.kernels.registry import KERNELS

if TYPE_CHECKING:
    from ringattn.hardware.facts import HardwareFacts
    from ringattn.hardware.kernel_faults import Verdict
    from ringattn.kernels.contract import BlockKernel

State = Literal["works", "broken", "wrong", "unavailable"]
Run = Callable[[Sequence[Attempt]], Mapping[Attempt, "Verdict"]]

HEAD_DIM, ROWS = 64, 64
TRIED_DTYPES = ("bf16", "fp16", "fp32")
KNOWN_ARCHES = ("sm_60", "sm_61", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_103", "sm_120")
NOTES = {
    "xformers": "the kernels of 0.0.35 are torch's own (FlashAttention 2, CUTLASS), plus split-K and merges",
    "flash": "torch's FlashAttention 2, unless torch was told to put another in its place",
}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One kernel on this machine. ``detail`` says what ran or why not, ``remedy`` what would make it run."""

    kernel: str
    state: State
    detail: str
    remedy: str = ""
    note: str = ""


def diagnose(facts: HardwareFacts, run: Run) -> tuple[Diagnosis, ...]:
    """Diagnose every kernel of the table in its order; ``run`` tries those whose checks allow it."""
    asked = {name: attempts_for(kernel, facts) for name, kernel in KERNELS.items()}
    verdicts = run([attempt for group in asked.values() for attempt in group])
    return tuple(
        _from_verdicts(kernel, {attempt: verdicts[attempt] for attempt in asked[name]})
        if asked[name]
        else _unavailable(kernel, facts)
        for name, kernel in KERNELS.items()
    )


def attempts_for(kernel: BlockKernel, facts: HardwareFacts) -> tuple[Attempt, ...]:
    """Return a forward in the first dtype that this kernel runs here, and its backward if it has one; else nothing."""
    both = [tuple(_attempt(kernel, facts, dtype, backward) for backward in (False, True)) for dtype in TRIED_DTYPES]
    for forward, backward in both:
        if forward.runs and backward.runs:
            return forward, backward
    return next(((forward,) for forward, _ in both if forward.runs), ())


def _attempt(kernel: BlockKernel, facts: HardwareFacts, dtype: str, backward: bool) -> Attempt:
    return attempt_of(facts, kernel.name, Shape(HEAD_DIM, dtype, True, False, ROWS), backward=backward)


def _from_verdicts(kernel: BlockKernel, verdicts: Mapping[Attempt, Verdict]) -> Diagnosis:
    note = NOTES.get(kernel.name, "")
    if raised := [verdict.message for verdict in verdicts.values() if verdict.message]:
        return Diagnosis(kernel.name, "broken", raised[0], kernel.remedy, note)
    errors = [max(f.error for f in verdict.figures if f.name != "lse") for verdict in verdicts.values()]
    ran = "forward and backward" if len(errors) > 1 else "forward only, it has no backward here"
    dtype = next(iter(verdicts)).shape.dtype
    detail = f"ran {ran} in {dtype}; relative error {' and '.join(f'{error:.1e}' for error in errors)}"
    if wrong := [str(f) for verdict in verdicts.values() for f in verdict.figures if not f.passes]:
        return Diagnosis(kernel.name, "wrong", f"{detail}; {wrong[0]}", kernel.remedy, note)
    return Diagnosis(kernel.name, "works", detail, note=note)


def _unavailable(kernel: BlockKernel, facts: HardwareFacts) -> Diagnosis:
    rules = [_attempt(kernel, facts, dtype, False).rule for dtype in TRIED_DTYPES]
    fewest = min(rules, key=lambda rule: rule.count("; "))
    return Diagnosis(kernel.name, "unavailable", fewest, remedy_for(kernel, facts), NOTES.get(kernel.name, ""))


def remedy_for(kernel: BlockKernel, facts: HardwareFacts) -> str:
    """Return what would make a kernel run, found by asking its own checks about other machines than this one."""
    with_package = replace(facts, packages=(*facts.packages, kernel.package)) if kernel.package else facts
    if attempts_for(kernel, with_package):
        return kernel.remedy
    if attempts_for(kernel, replace(with_package, vendor="cpu", arch="x86_64")):
        return "use --device cpu"
    served = [a for a in KNOWN_ARCHES if attempts_for(kernel, replace(with_package, vendor="nvidia", arch=a))]
    if not served:
        return ""
    newest = served[-1] == KNOWN_ARCHES[-1]
    machine = f"an NVIDIA GPU of {served[0]}" + (
        " or newer" if newest and len(served) > 1 else f" to {served[-1]}" if len(served) > 1 else ""
    )
    missing = kernel.package and kernel.package not in facts.packages and kernel.remedy
    return f"needs {machine}" + (f"; then: {kernel.remedy}" if missing else "")
