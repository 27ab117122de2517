"""Five kinds of invented machine, each hard in a way of its own; instances of a kind are drawn from its number."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from autotune.measure.simulated import Part, Row
from autotune.search.deciding.choose import distance
from autotune.space.space import Machine, Space, build_space, decode
from ringattn.workload import BranchTunables, ParamValue, Pattern, Tunables, Workload

from .parts_machine import PartsMachine, Together
from .two_optima import TwoOptima

INSTANCES = 8  # of a kind
KERNELS = ("cudnn", "flash", "flash-attn-4", "triton")  # their names say nothing: an instance deals the roles anew
SLOW = "math"
PARAMS: Mapping[str, tuple[ParamValue, ...]] = {"tile": ("64x64", "64x128", "128x64", "128x128"), "stages": (2, 3, 4)}
RATES = ((1, 2, 4), (2, 4, 8), (1, 4, 16))
FAR_SHARE = 0.6  # of the knobs differ at least between two optima
NEAR_STEPS = 2
LONG = 65536  # tokens, at which a kernel that holds the scores runs out of memory


class InventedMachine(Protocol):
    """A machine whose best plan is known."""

    @property
    def space(self) -> Space: ...

    def row(self, workload: Workload, plan: Tunables) -> Row: ...

    def is_right(self, plan: Tunables) -> bool: ...

    def best_ms(self) -> float: ...


# --- cells -----------------------------------------------------------------------------------------------------------


def cell_of(number: int, *, dilated: bool | None = None, train: bool | None = None, seq_len: int = LONG) -> Workload:
    """Return a cell, dense or dilated, of inference or training in turn, where nothing else is asked for."""
    if dilated if dilated is not None else bool(number & 2):
        rates = RATES[number // 2 % len(RATES)]
        pattern = Pattern.of([seq_len // 8, seq_len // 4, seq_len // 2], list(rates))
    else:
        pattern = Pattern()
    trains = train if train is not None else bool(number & 1)
    return Workload("train" if trains else "infer", True, seq_len, 16, 128, "bf16", pattern=pattern)


def space_of(cell: Workload, kernels: tuple[str, ...], default: str) -> Space:
    """Return all plans of these kernels; the last but one has parameters. Refused is only what would have no effect."""

    def reasons(workload: Workload, plan: Tunables) -> tuple[str, ...]:
        views = all(branch.gather == "view" for branch in plan.branches)
        return ("nothing is gathered that could be kept",) if plan.checkpoint == "none" and views else ()

    def params(workload: Workload, kernel: str, dtype: str) -> Mapping[str, tuple[ParamValue, ...]]:
        return PARAMS if kernel == kernels[-2] else {}

    machine = Machine(kernels, reasons, lambda workload, plan: plan, params)
    backward = default if cell.train else ""
    branches = tuple(BranchTunables(default, backward) for _ in cell.pattern.resolved(cell.seq_len))
    space = build_space(cell, machine, Tunables("bf16", branches), ("bf16",))
    if not cell.pattern.dense:
        return space
    # A dense plan has no workspace to pool.
    pooled = ("pool_threshold_mib", "pool_strategy")
    return replace(space, knobs={name: v[:1] if name in pooled else v for name, v in space.knobs.items()})


@dataclass(frozen=True, slots=True)
class Deal:
    """Start of every kind: kernels in their roles, the default's first, and numbers to draw more from."""

    space: Space
    kernels: tuple[str, ...]
    rng: np.random.Generator

    @classmethod
    def of(cls, kind: int, number: int, cell: Workload) -> Deal:
        rng = np.random.default_rng((kind, number))
        kernels = tuple(map(str, rng.permutation(KERNELS)))
        return cls(space_of(cell, (*kernels, SLOW), kernels[0]), kernels, rng)

    def parts(self, base_ms: float, speeds: Mapping[Part, float], number: int) -> PartsMachine:
        """Make a machine; kernels without a speed of their own are somewhat slower than the default's."""
        branches = len(self.space.default.branches)
        shares = self.rng.dirichlet([4.0] * branches) if branches > 1 else [1.0]
        drawn = {(k, d): self.rng.uniform(1.02, 1.5) for k in self.kernels for d in ("forward", "backward")}
        slow = {(SLOW, direction): 8.0 for direction in ("forward", "backward")}
        same = {(self.kernels[0], direction): 1.0 for direction in ("forward", "backward")}
        tuned = {
            (f"param:{self.kernels[-1]}.{name}", value): float(self.rng.uniform(0.93, 1.1))
            for name, values in PARAMS.items()
            for value in values[1:]
        }
        return PartsMachine(
            self.space,
            number,
            base_ms,
            tuple(map(float, shares)),
            drawn | slow | same | dict(speeds),
            {kernel: float(self.rng.uniform(0.98, 1.1)) for kernel in self.kernels},
            dict.fromkeys((*self.kernels, SLOW), 20.0),
            tuned=tuned,
            too_large=SLOW if self.space.workload.seq_len >= LONG else None,
        )


# --- kinds -----------------------------------------------------------------------------------------------------------


def launch_bound(number: int) -> PartsMachine:
    """Make short calls: the host's time hides that of the device for most plans, so that most look alike."""
    deal = Deal.of(1, number, cell_of(number, seq_len=2048))
    rng = deal.rng
    launch_us = {kernel: float(us) for kernel, us in zip(deal.kernels, rng.permutation([25, 38, 45, 60]), strict=True)}
    launch_us[deal.kernels[0]] += 15.0
    machine = replace(deal.parts(1.0, {}, number), launch_us=launch_us | {SLOW: 150.0}, host_us=40.0)
    _, host_us = machine.total(machine.space.default)
    return replace(machine, base_ms=host_us / 1e3 * float(rng.uniform(0.3, 0.5)))


def pays_together(number: int) -> PartsMachine:
    """Make a window, a backward kernel and a checkpoint mode that pay together, and cost something each alone."""
    deal = Deal.of(2, number, cell_of(number, dilated=True, train=True))
    backward = deal.kernels[1 + number % 3]
    windows = [window for window in deal.space.knobs["window_tokens"] if window is not None]
    together = Together(
        window_tokens=int(str(deal.rng.choice(windows))),
        checkpoint=str(deal.rng.choice(["offload", "full"])),
        backward=backward,
    )
    machine = deal.parts(_base_ms(deal.rng), {(backward, "backward"): 1.1}, number)
    return replace(machine, together=together, recomputed=0.12)


def two_optima(number: int) -> TwoOptima:
    """Make two plans 1 % apart that have little in common; the slower is a step or two from the default."""
    deal = Deal.of(3, number, cell_of(number))
    space, rng = deal.space, deal.rng
    near = space.default
    for _ in range(NEAR_STEPS):
        moves = [move.tunables for move in space.neighbours(near) if SLOW not in move.tunables.kernels]
        near = moves[rng.integers(len(moves))]
    while True:
        values = {name: all_of[rng.integers(len(all_of))] for name, all_of in space.knobs.items()}
        far = decode(space.workload, values)
        away = min(_share_apart(space, far, near), _share_apart(space, far, space.default))
        if SLOW not in far.kernels and space.valid(far) and away >= FAR_SHARE:
            return TwoOptima(space, _base_ms(rng), near, far)


def slow_default(number: int) -> PartsMachine:
    """Make a default six times too slow; the best is a kernel that looks hopeless until its rows are gathered."""
    deal = Deal.of(4, number, cell_of(number, dilated=True))
    hopeless = deal.kernels[1 + number % 3]
    speeds = {}
    for kernel in deal.kernels[1:]:
        low, high = (0.13, 0.15) if kernel == hopeless else (0.4, 0.7)
        speeds |= {(kernel, d): float(deal.rng.uniform(low, high)) for d in ("forward", "backward")}
    machine = deal.parts(6 * _base_ms(deal.rng), speeds, number)
    strided = {**machine.strided, hopeless: float(deal.rng.uniform(12, 20))}
    return replace(machine, strided=strided, copied=0.015)


def traps(number: int) -> PartsMachine:
    """Make traps: the fastest kernel is wrong, the next wrong at other lengths, the next hangs in one direction."""
    deal = Deal.of(5, number, cell_of(number))
    default, wrong, unproven, hanging = deal.kernels
    train = deal.space.workload.train
    trapped = "backward" if train else "forward"
    speeds = {(wrong, d): 0.5 for d in ("forward", "backward")}
    speeds |= {(unproven, trapped): 0.6, (hanging, trapped): 0.65}
    if train:
        speeds |= {(unproven, "forward"): 0.85, (hanging, "forward"): 0.75}
    machine = deal.parts(_base_ms(deal.rng), speeds, number)
    return replace(machine, wrong=wrong, unproven=(unproven, trapped), hangs=(hanging, trapped))


KINDS: Mapping[str, Callable[[int], InventedMachine]] = {
    "launch-bound": launch_bound,
    "together": pays_together,
    "two-optima": two_optima,
    "slow-default": slow_default,
    "traps": traps,
}


def _base_ms(rng: np.random.Generator) -> float:
    return float(np.exp(rng.uniform(np.log(0.5), np.log(4.0))))


def _share_apart(space: Space, plan: Tunables, other: Tunables) -> float:
    free = sum(len(values) > 1 for values in space.knobs.values())
    return distance(space.workload, plan, other) / free
