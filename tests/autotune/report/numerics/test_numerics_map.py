"""What a sweep of kernels tries on invented machines, what it concludes, and the map it makes of that."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from machine_samples import H200

from autotune.report.numerics.numerics_map import (
    HEAD_DIMS,
    LENGTHS,
    Attempt,
    Finding,
    attempts,
    findings,
    lines,
    ranges,
    verdicts_to_remember,
)
from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import Figure, Verdict
from ringattn.kernels.registry import KERNELS

SOFTWARE = {"cudnn": "9.19.0", "torch": "2.11.0", "flash_attn.cute": "4.0.0b36"}
MACHINE = replace(H200, packages=("triton", "flash_attn.cute", "xformers"), software=tuple(sorted(SOFTWARE.items())))
RIGHT = Verdict((Figure("dq", 2e-3, 3e-2), Figure("dk", 2e-3, 3e-2)))
WRONG = Verdict((Figure("dq", 0.4, 3e-2), Figure("dk", 2e-3, 3e-2)))


def tried(
    kernel: str, verdict: Callable[[Attempt], Verdict], *, facts: HardwareFacts = MACHINE, try_refused: bool = False
) -> list[Finding]:
    asked = attempts(facts, (kernel,), HEAD_DIMS, try_refused=try_refused)
    return findings(asked, {attempt: verdict(attempt) for attempt in asked if attempt.runs})


def head_dims(found: list[Finding], state: str, *, backward: bool = True, dtype: str = "bf16") -> set[int]:
    return {
        f.combination.head_dim
        for f in found
        if (f.state, f.combination.backward, f.combination.dtype) == (state, backward, dtype)
    }


def test_every_combination_of_a_kernel_is_tried_in_the_dtypes_it_has() -> None:
    for kernel, dtypes in (("cudnn", 2), ("triton", 4), ("efficient", 3), ("math", 3)):
        asked = attempts(MACHINE, (kernel,), HEAD_DIMS)
        assert len(asked) == dtypes * len(HEAD_DIMS) * 2 * 2 * 2 * len(LENGTHS)
        assert len(set(asked)) == len(asked)
    assert attempts(MACHINE, ("flash-cpu", "flash-attn-2"), HEAD_DIMS) == []


def test_what_says_most_comes_first() -> None:
    order = list(dict.fromkeys((a.shape.dtype, a.shape.head_dim) for a in attempts(MACHINE, tuple(KERNELS), HEAD_DIMS)))
    assert [d for dtype, d in order if dtype == "bf16"][:6] == [64, 128, 192, 256, 32, 96]
    assert list(dict.fromkeys(dtype for dtype, _ in order)) == ["bf16", "fp32", "tf32", "fp16"]


def test_a_rule_refuses_and_is_believed_unless_refused_ones_are_to_be_tried() -> None:
    bad = {8, 16, 40, 48, 72, 80, 104, 112}
    found = tried("flash-attn-4", lambda attempt: RIGHT)
    assert head_dims(found, "refused") == bad
    assert head_dims(found, "ok") == set(HEAD_DIMS) - bad
    assert head_dims(found, "ok", backward=False) == set(HEAD_DIMS)
    found = tried("flash-attn-4", lambda attempt: RIGHT, try_refused=True)
    assert head_dims(found, "refused, but right") == bad
    found = tried("flash-attn-4", lambda a: WRONG if a.rule else RIGHT, try_refused=True)
    assert head_dims(found, "refused") == bad
    assert all("dq errs by 4.0e-01 (allowed 3.0e-02) with" in f.detail for f in found if f.state == "refused")


def test_what_strays_through_memory_is_never_tried() -> None:
    for kernel in ("flash", "xformers"):
        asked = [a for a in attempts(MACHINE, (kernel,), HEAD_DIMS, try_refused=True) if not a.runs]
        assert {a.shape.head_dim for a in asked} == set(range(136, 192, 8))
        assert all(a.backward for a in asked)
    assert all(a.runs for a in attempts(MACHINE, ("cudnn", "triton"), HEAD_DIMS, try_refused=True))


def test_one_wrong_length_makes_a_combination_wrong() -> None:
    found = tried("triton", lambda a: WRONG if a.backward and a.shape.rows == 88 else RIGHT)
    assert head_dims(found, "wrong") == set(HEAD_DIMS)
    assert head_dims(found, "wrong", backward=False) == set()
    assert found[1].detail == "dq errs by 4.0e-01 (allowed 3.0e-02) with 88 rows"


@pytest.mark.parametrize("figure", [Figure("dq", math.nan, 0.03), Figure("dq", math.inf, 0.0)])
def test_what_is_no_number_is_wrong(figure: Figure) -> None:
    found = tried("triton", lambda a: Verdict((Figure("dk", 9.0, 1.0), figure)) if a.shape.rows == 1 else RIGHT)
    assert {f.state for f in found} == {"wrong"}
    assert found[0].detail.startswith(f"dq errs by {figure.error}")


def test_lengths_that_a_rule_refuses_are_no_disagreement() -> None:
    """cudnn has no single row and no full blocks of 704 rows; programs run those on other kernels."""
    for try_refused in (False, True):
        found = tried("cudnn", lambda a: RIGHT, try_refused=try_refused)
        assert {f.state for f in found} == {"ok"}


def test_errors_and_time() -> None:
    assert {f.state for f in tried("triton", lambda a: Verdict(message="its process died of SIGSEGV"))} == {"fails"}
    asked = attempts(MACHINE, ("triton",), (64,))
    assert {f.state for f in findings(asked, {})} == {"not tried"}


def test_only_what_is_whole_and_allowed_is_remembered() -> None:
    asked = attempts(MACHINE, ("cudnn", "flash-attn-4"), (40, 64), try_refused=True)
    verdicts = {a: WRONG if a.shape.rows == 63 and a.backward else RIGHT for a in asked}
    kept = verdicts_to_remember(asked, verdicts)
    assert not [c for c in kept if (c.kernel, c.head_dim, c.backward) == ("flash-attn-4", 40, True)]
    assert len(kept) == (2 * 2 * 2 - 1) * 2 * 2 * 2
    assert {kept[c].passes for c in kept if c.backward} == {False}
    assert {kept[c].passes for c in kept if not c.backward} == {True}
    assert kept[next(c for c in kept if c.backward)].figures == WRONG.figures
    missing = next(a for a in asked if not a.rule)
    without = {a: v for a, v in verdicts.items() if a != missing}
    assert set(kept) - set(verdicts_to_remember(asked, without)) == {missing.combination}


def test_the_map_joins_what_agrees() -> None:
    found = tried(
        "flash-attn-4", lambda a: WRONG if a.shape.grouped and a.backward and a.shape.head_dim == 24 else RIGHT
    )
    made = [line[:5] for line in lines(found)]
    plain = "bf16 (causal, full), fp16 (causal, full)"
    grouped = "bf16 (causal grouped, full grouped), fp16 (causal grouped, full grouped)"
    refused = "8-16 40-48 72-80 104-112"
    assert made == [
        ("flash-attn-4", "forward", "bf16, fp16", "ok", "8-256"),
        ("flash-attn-4", "backward", plain, "refused", refused),
        ("flash-attn-4", "backward", plain, "ok", "24-32 56-64 88-96 120-256"),
        ("flash-attn-4", "backward", grouped, "wrong", "24"),
        ("flash-attn-4", "backward", grouped, "refused", refused),
        ("flash-attn-4", "backward", grouped, "ok", "32 56-64 88-96 120-256"),
    ]


def test_ranges() -> None:
    assert ranges([8]) == "8"
    assert ranges([8, 16, 24, 40, 256]) == "8-24 40 256"
