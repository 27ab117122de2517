"""What a rank does in the tests of numerics: the ring module against the one-rank module on the same sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from oracle import NAMES, Case, Results, assert_equal_to, cpu, exact, found, lists_of
from torch import Tensor

from ringattn import Profile, RingAttention
from ringattn.workload import BranchTunables, Tunables


@dataclass(frozen=True)
class RingCase:
    """``case.length`` positions in all, run by ``schedule`` over sequences in ``spread`` layout."""

    case: Case
    schedule: str
    spread: str
    ulysses: int = 0
    head_groups: int = 0
    checkpoint: str = "selective"
    grad_wire: str = ""
    ragged: bool = False

    def tunables(self, dtype: str, forward: str, backward: str, train: bool = True) -> Tunables:
        branch = BranchTunables(forward, backward if train else "")
        return Tunables(
            dtype,
            (branch,) * len(self.case.pattern.resolved(self.case.length)),
            checkpoint=self.checkpoint,
            schedule=self.schedule,
            layout=self.spread,
            ulysses=self.ulysses,
            head_groups=self.head_groups,
            grad_wire=self.grad_wire,
        )

    def module(
        self,
        dtype: torch.dtype = torch.float64,
        compute: str = "fp64",
        kernels: tuple[str, str] = ("math", "math"),
        group: Any = None,
        train: bool = True,
        **arguments: Any,
    ) -> RingAttention:
        """A module on all ranks that obeys exactly this schedule: its profile holds this one plan, and must run."""
        group = group or dist.group.WORLD
        world = group.size()
        workload = replace(
            self.case.workload(NAMES[dtype], "train" if train else "infer"),
            seq_len=-(-self.case.length // world),
            world=world,
        )
        profile = Profile.single(cpu(), workload, self.tunables(compute, *kernels, train))
        lists = {} if self.case.pattern.dense else lists_of(self.case.pattern)
        return RingAttention(
            self.case.heads, self.case.head_dim, self.case.kv_heads, causal=self.case.causal, scale=self.case.scale,
            profile=profile, device="cpu", process_group=group, layout=self.spread, **lists, **arguments,
        )  # fmt: skip


def run_ring(ring: RingCase, module: RingAttention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    """The whole results of the ring module, from every rank's share."""
    total = ring.case.length
    leaves = [module.shard(x.detach()).clone().requires_grad_() for x in (q, k, v)]
    out, lse = module(*leaves, return_lse=True, total_length=total if ring.ragged else None)
    assert out.shape == leaves[0].shape
    grads = torch.autograd.grad(out, leaves, module.shard(dout).contiguous())
    whole = [module.unshard(x.detach(), total) for x in (out, *grads)]
    return Results(whole[0], module.unshard(lse, total, dim=2), *whole[1:])


def check_exact(rings: list[RingCase]) -> int:
    """float64: every result equals the one-rank module's and the oracle's to 1e-10.

    Every rank has the whole results; ranks take turns with comparing them, as the oracle costs more than they do.
    """
    for number, ring in enumerate(rings):
        case = ring.case
        q, k, v = case.inputs()
        dout = case.dout()
        module = ring.module()
        world = dist.get_world_size()
        plan = module.plan_for(-(-case.length // world), torch.float64, True, case.batch)
        assert plan.tunables == ring.tunables("fp64", "math", "math"), plan
        try:
            results = run_ring(ring, module, q, k, v, dout)
            if number % world != dist.get_rank():
                continue
            assert_equal_to(results, found(case.module(), q, k, v, dout))
            assert_equal_to(results, exact(case, q, k, v, dout))
        except AssertionError as error:
            raise AssertionError(f"{ring}: {error}") from error
    return len(rings)
