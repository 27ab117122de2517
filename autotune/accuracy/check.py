"""The accuracy check: a kernel's rows against float64, on inputs that break kernels.

A candidate may err a few times as much as the modelled roundings of a right kernel do, never by a fixed and therefore
generous tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ringattn.wording import plural

from .arithmetic import UNIT_ROUNDOFF
from .sampled_rows import Expected, Rows

SLACK = 4.0  # a right kernel may err this many times as much as the modelled roundings
UNITS = 3.0  # and by so many units of its dtype beside: some accumulate a sum over blocks in it


@dataclass(frozen=True, slots=True)
class CheckResult:
    """Largest relative 2-norm over out and the gradients; ``fault`` is one line, or empty."""

    error: float
    fault: str = ""


def check_rows(expected: Expected, got: Rows, whole: Sequence[tuple[str, Tensor]]) -> CheckResult:
    """Compare rows with the expected ones; ``whole`` are complete results, which must be finite everywhere."""
    for name, tensor in whole:
        finite = torch.isfinite(tensor) if name != "lse" else ~torch.isnan(tensor) & (tensor != math.inf)
        if not bool(finite.all()):
            bad = int((~finite).sum())
            return CheckResult(math.inf, f"{name} holds {plural(bad, 'value')} not finite, of {tensor.numel()}")
    errors = []
    exact_rows, rounded_rows = dict(expected.exact.tensors), dict(expected.rounded.tensors)
    for name, tensor in got.tensors:
        error, fault = _compare(name, tensor.double(), exact_rows[name], rounded_rows[name].double(), expected)
        if fault:
            return CheckResult(error, fault)
        errors.append(error)
    fault = _compare_lse(got.lse.double(), expected)
    return CheckResult(max(errors), fault)


def _compare(name: str, got: Tensor, exact: Tensor, rounded: Tensor, expected: Expected) -> tuple[float, str]:
    """Compare the 2-norm of all rows, and of each row alone: a single wrong row must not drown in the sum."""
    unit = _unit(expected)
    norm = float(exact.norm())
    error, modelled_error = float((got - exact).norm()), float((rounded - exact).norm())
    relative = error / norm if norm else error
    if error > SLACK * modelled_error + UNITS * unit * norm:
        return relative, (
            f"{name} errs by {relative:.1e} (2-norm, relative to float64), a right kernel by about "
            f"{modelled_error / norm if norm else modelled_error:.1e}"
        )
    size_R = exact.norm(dim=-1) + norm / math.sqrt(max(1, len(exact)))
    if norm:
        row_R, model_R = ((x - exact).norm(dim=-1) / size_R for x in (got, rounded))
        worst = float(row_R.max())
        if worst > SLACK * (float(model_R.max()) + unit):
            return relative, (
                f"{name} has a row that errs by {worst:.1e} of its size, a right kernel's worst by "
                f"{float(model_R.max()):.1e}"
            )
    return relative, ""


def _unit(expected: Expected) -> float:
    """Return the relative error of one weight that no kernel can avoid: exp(logit - lse) is as exact as those."""
    finite = expected.exact.lse[torch.isfinite(expected.exact.lse)]
    largest = float(finite.abs().max()) if len(finite) else 0.0
    accumulator = UNIT_ROUNDOFF["fp64" if expected.compute_dtype == "fp64" else "fp32"]
    coarsest = max(UNIT_ROUNDOFF[expected.compute_dtype], UNIT_ROUNDOFF[expected.input_dtype])
    return coarsest + accumulator * largest


def _compare_lse(got: Tensor, expected: Expected) -> str:
    exact, rounded = expected.exact.lse, expected.rounded.lse.double()
    empty = exact == -math.inf
    if bool((empty != (got == -math.inf)).any()):
        return "lse is not -inf exactly where nothing is selected"
    if bool(empty.all()):
        return ""
    difference = (got - exact)[~empty].abs()
    model = float((rounded - exact)[~empty].abs().max())
    narrow = expected.compute_dtype in ("bf16", "fp16", "tf32")
    unit = UNIT_ROUNDOFF[expected.compute_dtype]
    allowed = SLACK * model + (1e-4 if narrow else 32 * unit * (1 + float(exact[~empty].abs().max())))
    worst = float(difference.max())
    return f"lse is off by {worst:.1e}, allowed is {allowed:.1e}" if worst > allowed else ""
