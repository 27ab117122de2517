"""Map of where kernels are right: attempts at head dimensions, verdicts on them, and lines of the map. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import Combination, Figure, Verdict
from ringattn.kernels.registry import KERNELS, KernelNeed

State = Literal["ok", "wrong", "fails", "refused", "refused, but right", "not tried"]
STATES: tuple[State, ...] = ("wrong", "fails", "refused, but right", "not tried", "refused", "ok")

HEAD_DIMS = tuple(range(8, 257, 8))
LENGTHS = (1, 63, 88, 704)  # one row; less than a tile; a ragged one; many tiles, 64 beyond a multiple of 128
DTYPES = ("bf16", "fp16", "fp32", "tf32")
_IN_TURN = ("bf16", "fp32", "tf32", "fp16")  # where time runs out: fp16 runs the code of bf16
HEADS, GROUP = 2, 2


class Shape(NamedTuple):
    """Shape of one float64 reference; kernels and directions share it."""

    head_dim: int
    dtype: str
    causal: bool
    grouped: bool
    rows: int


@dataclass(frozen=True, slots=True)
class Attempt:
    """A kernel, a direction and a shape. ``rule`` is why the table refuses it; ``runs``: it is tried all the same."""

    kernel: str
    backward: bool
    shape: Shape
    rule: str
    runs: bool

    @property
    def combination(self) -> Combination:
        s = self.shape
        return Combination(self.kernel, s.head_dim, s.dtype, self.backward, s.causal, s.grouped)


@dataclass(frozen=True, slots=True)
class Finding:
    """State of one combination after all its lengths, and in words why."""

    combination: Combination
    state: State
    detail: str = ""


def need_of(facts: HardwareFacts, kernel: str, shape: Shape, *, backward: bool) -> KernelNeed:
    """Return what a kernel is asked; of one that reads caches for few queries, though its numbers are tried on many."""
    heads = HEADS * (GROUP if shape.grouped else 1)
    return KernelNeed(
        vendor=facts.vendor,
        arch=facts.arch,
        dtype=shape.dtype,
        head_dim=shape.head_dim,
        heads=heads,
        kv_heads=HEADS,
        rows=shape.rows,
        blocks=1,
        causal=shape.causal,
        backward=backward,
        row_elements=heads * shape.head_dim,
        queries=int(KERNELS[kernel].reads_caches),
    )


def attempts(
    facts: HardwareFacts, kernels: Sequence[str], head_dims: Sequence[int], *, try_refused: bool = False
) -> list[Attempt]:
    """List every kernel that runs on this machine in every dtype it has here, the most telling first."""
    shapes = [
        Shape(head_dim, dtype, causal, grouped, rows)
        for dtype in _IN_TURN
        for head_dim in sorted(head_dims, key=lambda d: (-math.gcd(d, 64), d))
        for causal in (True, False)
        for grouped in (False, True)
        for rows in LENGTHS
    ]
    has = {(name, dtype) for name in kernels for dtype in DTYPES if _has(facts, name, dtype)}
    return [
        attempt_of(facts, name, shape, backward=backward, try_refused=try_refused)
        for shape in shapes
        for name in kernels
        for backward in (False, True)
        if (name, shape.dtype) in has
    ]


def _has(facts: HardwareFacts, name: str, dtype: str) -> bool:
    """Return whether a kernel computes in this dtype here, at any head dimension."""
    return any(
        not KERNELS[name].unsupported_reasons(
            need_of(facts, name, Shape(d, dtype, True, False, 88), backward=False), facts
        )
        for d in HEAD_DIMS
    )


def attempt_of(facts: HardwareFacts, name: str, shape: Shape, *, backward: bool, try_refused: bool = False) -> Attempt:
    """Return the attempt at one kernel, direction and shape, which runs where no rule refuses it."""
    kernel, need = KERNELS[name], need_of(facts, name, shape, backward=backward)
    rule = "; ".join(kernel.unsupported_reasons(need, facts))
    return Attempt(name, backward, shape, rule, runs=not rule or (try_refused and not kernel.reads_out_of_bounds(need)))


def findings(tried: Iterable[Attempt], verdicts: Mapping[Attempt, Verdict]) -> list[Finding]:
    """Return one finding for each combination, in the order of ``tried``."""
    by_combination: dict[Combination, list[Attempt]] = {}
    for attempt in tried:
        by_combination.setdefault(attempt.combination, []).append(attempt)
    return [_finding(asked, group, verdicts) for asked, group in by_combination.items()]


def _finding(asked: Combination, group: Sequence[Attempt], verdicts: Mapping[Attempt, Verdict]) -> Finding:
    """Judge a combination by the lengths that rules allow, or by all where they allow none."""
    allowed = [attempt for attempt in group if not attempt.rule]
    known = [(attempt, verdicts[attempt]) for attempt in allowed or group if attempt in verdicts]
    failed = [(attempt, verdict) for attempt, verdict in known if not verdict.passes]
    detail = f"{_worst(failed)} with {failed[0][0].shape.rows} rows" if failed else ""
    if not allowed:
        right = bool(known) and not failed
        rule = group[0].rule
        return Finding(asked, "refused, but right" if right else "refused", f"{rule} ({detail})" if detail else rule)
    if failed:
        return Finding(asked, "fails" if failed[0][1].message else "wrong", detail)
    return Finding(asked, "ok" if known else "not tried")


def _worst(failed: Sequence[tuple[Attempt, Verdict]]) -> str:
    figures = [figure for _, verdict in failed for figure in verdict.figures if not figure.passes]
    return str(max(figures, key=_excess)) if figures else failed[0][1].message


def _excess(figure: Figure) -> float:
    return math.inf if math.isnan(figure.error) else figure.error / figure.bound if figure.bound else math.inf


def verdicts_to_remember(tried: Iterable[Attempt], verdicts: Mapping[Attempt, Verdict]) -> dict[Combination, Verdict]:
    """Return the worst figure of each result, of combinations whose allowed lengths were all tried."""
    found: dict[Combination, list[Verdict | None]] = {}
    for attempt in tried:
        if not attempt.rule:
            found.setdefault(attempt.combination, []).append(verdicts.get(attempt))
    return {
        asked: _joined([verdict for verdict in group if verdict is not None])
        for asked, group in found.items()
        if None not in group
    }


def _joined(group: Sequence[Verdict]) -> Verdict:
    message = next((verdict.message for verdict in group if verdict.message), "")
    worst: dict[str, Figure] = {}
    for figure in (figure for verdict in group for figure in verdict.figures):
        if figure.name not in worst or _excess(figure) > _excess(worst[figure.name]):
            worst[figure.name] = figure
    return Verdict((), message) if message else Verdict(tuple(worst.values()))


class Line(NamedTuple):
    """Part of the map: head dimensions of one state, and the variants of a kernel and direction it is true of."""

    kernel: str
    direction: str
    variants: str
    state: State
    head_dims: str
    detail: str


def lines(found: Sequence[Finding]) -> list[Line]:
    """Return the map by kernel and direction; variants (dtype, causal, grouped) that agree are one line."""
    made: list[Line] = []
    for kernel, backward in dict.fromkeys((f.combination.kernel, f.combination.backward) for f in found):
        own = [f for f in found if (f.combination.kernel, f.combination.backward) == (kernel, backward)]
        alike: dict[tuple[tuple[State, str, str], ...], list[tuple[str, bool, bool]]] = {}
        for variant in dict.fromkeys(_variant(f.combination) for f in own):
            alike.setdefault(_row([f for f in own if _variant(f.combination) == variant]), []).append(variant)
        everything = [_variant(f.combination) for f in own]
        for row, variants in alike.items():
            label = _label(variants, everything)
            made += [
                Line(kernel, "backward" if backward else "forward", label, state, head_dims, detail)
                for state, head_dims, detail in row
            ]
    return made


def _variant(asked: Combination) -> tuple[str, bool, bool]:
    return asked.dtype, asked.causal, asked.grouped


def _row(found: Sequence[Finding]) -> tuple[tuple[State, str, str], ...]:
    """Return (state, head dimensions, why) of one variant; a state's first reason stands for all."""
    row = []
    for state in STATES:
        own = sorted((f for f in found if f.state == state), key=lambda f: f.combination.head_dim)
        if own:
            row.append((state, ranges([f.combination.head_dim for f in own]), _detail(own)))
    return tuple(row)


def _detail(own: Sequence[Finding]) -> str:
    reasons = list(dict.fromkeys(f.detail for f in own if f.detail))
    if not reasons:
        return ""
    return reasons[0] + (f", and {len(reasons) - 1} more like it" if len(reasons) > 1 else "")


def _label(variants: Sequence[tuple[str, bool, bool]], everything: Iterable[tuple[str, bool, bool]]) -> str:
    """Return ``bf16, fp16`` for all of these dtypes; else with causal or full, grouped or not."""
    every = set(everything)
    dtypes = [dtype for dtype in DTYPES if any(v[0] == dtype for v in variants)]
    if all(v in variants for v in every if v[0] in dtypes):
        return ", ".join(dtypes)
    parts = []
    for dtype in dtypes:
        own = [v for v in variants if v[0] == dtype]
        kinds = [f"{'causal' if causal else 'full'}{' grouped' if grouped else ''}" for _, causal, grouped in own]
        parts.append(dtype if len(own) == sum(v[0] == dtype for v in every) else f"{dtype} ({', '.join(kinds)})")
    return ", ".join(parts)


def ranges(head_dims: Sequence[int]) -> str:
    """Format 8, 16, ... 64 and 96 as ``8-64 96``."""
    texts: list[str] = []
    begin = end = head_dims[0]
    for head_dim in (*head_dims[1:], 0):
        if head_dim == end + 8:
            end = head_dim
            continue
        texts.append(str(begin) if begin == end else f"{begin}-{end}")
        begin = end = head_dim
    return " ".join(texts)
