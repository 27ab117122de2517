"""Chooses the kernels of blocks that a plan has no word on: the plan's own where they can, else the policy's first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

from ringattn.errors import PlanError
from ringattn.hardware.kernel_faults import Combination
from ringattn.kernels.contract import BoundKernel, KernelNeed
from ringattn.planning.plan import Direction, Plan, combination_of, kernel_needs, kernel_rejections
from ringattn.planning.table import PlanTable
from ringattn.runtime.loading import bind

from .blocks import Block

# Whether kernels may run, after every check of them that this machine still lacks.
Validate = Callable[[Iterable[Combination]], bool]

_MOST_REMEMBERED = 4096  # blocks of a cache that grows by a position are new at every step


def rounded(length: int) -> int:
    """Return the next length of three significant binary digits, four to an octave: plans are alike nearby."""
    shift = max(0, length.bit_length() - 3)
    return max(1, -(-length >> shift) << shift)


class BlockKernels:
    """Kernels of the blocks of one plan, chosen when a block of a new shape is met.

    A plan was made for blocks of as many rows as keys, and of one kind. Others ask more of a kernel: what it lacks for
    a block with as many rows, or as many keys, it lacks here. Keys are rounded up, as a cache has more at every step,
    but for the rules of backwards, some of which are about exact numbers.
    """

    def __init__(self, plan: Plan, table: PlanTable, scale: float, validate: Validate) -> None:
        self._plan, self._table, self._scale, self._validate = plan, table, scale, validate
        self._bound: dict[tuple[str, bool], BoundKernel] = {}
        self._chosen: dict[tuple[int, bool, bool, int, int, int, int], tuple[str, BoundKernel]] = {}

    def __call__(self, block: Block, backward: bool, row_elements: int) -> BoundKernel:
        return self.named(block, backward, row_elements)[1]

    def named(self, block: Block, backward: bool, row_elements: int) -> tuple[str, BoundKernel]:
        """Return the name of the kernel of a block, and the kernel; PlanError where none can run it."""
        keys = block.k.count if backward or block.causal else rounded(block.k.count)
        key = (block.branch, backward, block.causal, block.q.count, keys, block.heads.count, row_elements)
        chosen = self._chosen.get(key)
        if chosen is None:
            name = self._name(block, keys, backward, row_elements)
            full = not block.causal
            if (name, full) not in self._bound:
                self._bound[name, full] = bind(self._plan, name, self._scale, full=full)
            if len(self._chosen) >= _MOST_REMEMBERED:
                self._chosen.clear()
            bound = self._bound[name, full]
            if block.q.count == 1 and bound.one_query is not None and not backward:
                bound = bound._replace(forward=bound.one_query)
            chosen = self._chosen[key] = name, bound
        return chosen

    def _name(self, block: Block, keys: int, backward: bool, row_elements: int) -> str:
        """Return the kernel of a block; PlanError with every candidate's reasons where none can."""
        plan, wishes = self._plan, self._table.wishes
        branch = plan.tunables.branches[block.branch]
        direction: Direction = "backward" if backward else "forward"
        own, wish = (branch.backward, wishes.backward) if backward else (branch.forward, wishes.forward)
        policy = self._table.policy.kernels_for(direction, plan.tunables.dtype, math.inf)
        needs = self._needs(block, keys, backward, row_elements)
        rejected: dict[str, tuple[str, ...]] = {}
        for name in dict.fromkeys((own,) if wish else (own, *policy)):
            params = plan.tunables.params_of(name)
            rejected[name] = kernel_rejections(name, needs, self._table.facts, params)
            if not rejected[name]:
                asked = () if name == "math" else [combination_of(name, need, params) for need in needs[:1]]
                if self._validate(asked):
                    return name
                rejected[name] = ("its numbers are wrong on this machine",)
        rows = f"{block.q.count} rows by {block.k.count} keys"
        raise PlanError(f"no kernel can run {plan.workload}, blocks of {rows}, {direction}", rejected)

    def _needs(self, block: Block, keys: int, backward: bool, row_elements: int) -> tuple[KernelNeed, ...]:
        plan, facts = self._plan, self._table.facts
        (need,) = kernel_needs(
            plan.workload, plan.tunables, block.branch, facts, backward=backward, conditions=plan.conditions
        )
        group = plan.workload.heads // plan.workload.kv_heads
        need = replace(
            need,
            rows=block.q.count,
            blocks=plan.workload.batch * block.q.segments,
            causal=block.causal,
            heads=block.heads.count * group,
            kv_heads=block.heads.count,
            row_elements=row_elements,
            queries=0 if block.causal else block.q.count,
        )
        of_keys = replace(need, rows=keys)
        return (of_keys,) if need.queries == 1 and not backward else (need, of_keys)
