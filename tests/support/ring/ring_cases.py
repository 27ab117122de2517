"""What a rank does in the tests of numerics: the ring module against the one-rank module on the same sequence."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from oracle import (
    DENSE,
    NAMES,
    UNIT_ROUNDOFF,
    Case,
    Results,
    absolute_norms,
    assert_equal_to,
    assert_lse_within_rule,
    cpu,
    exact,
    found,
    laid_out,
    lists_of,
)
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
    exchange: str = ""

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
            exchange=self.exchange,
        )

    def profile(
        self,
        world: int,
        dtype: torch.dtype = torch.float64,
        compute: str = "fp64",
        kernels: tuple[str, str] = ("math", "math"),
        train: bool = True,
    ) -> Profile:
        """A profile of this one plan, for inputs of ``dtype``."""
        workload = replace(
            self.case.workload(NAMES[dtype], "train" if train else "infer"),
            seq_len=-(-self.case.length // world),
            world=world,
        )
        return Profile.single(cpu(), workload, self.tunables(compute, *kernels, train))

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
        profile = self.profile(group.size(), dtype, compute, kernels, train)
        lists = {} if self.case.pattern.dense else lists_of(self.case.pattern)
        return RingAttention(
            self.case.heads, self.case.head_dim, self.case.kv_heads, causal=self.case.causal, scale=self.case.scale,
            profile=profile, device="cpu", process_group=group, layout=self.spread,
            window=self.case.window, softcap=self.case.softcap, **lists, **arguments,
        )  # fmt: skip


def run_here(ring: RingCase, module: RingAttention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    """This rank's rows of the results of the ring module."""
    leaves = [laid_out(module.shard(x.detach()), ring.case.layout).requires_grad_() for x in (q, k, v)]
    out, lse = module(*leaves, return_lse=True, total_length=ring.case.length if ring.ragged else None)
    grads = torch.autograd.grad(out, leaves, module.shard(dout).contiguous())
    batch, length, heads, _ = out.shape
    assert lse.shape == (batch, heads, length)
    return Results(out.detach(), lse, *grads)


def run_ring(ring: RingCase, module: RingAttention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    """The whole results of the ring module, from every rank's shard."""
    total = ring.case.length
    out, lse, *grads = run_here(ring, module, q, k, v, dout)
    return Results(
        module.unshard(out, total), module.unshard(lse, total, dim=2), *(module.unshard(x, total) for x in grads)
    )


def assert_keeps_the_rule(
    ring: RingCase, results: Results, inputs: tuple[Tensor, ...], compute: torch.dtype, kernel: str
) -> None:
    """The whole results pass the rule of accuracy (see ``oracle``) against one dense call of the kernel on one rank.

    ``inputs`` are q, k, v and dout.
    """
    case, dtype = ring.case, inputs[0].dtype
    expected = exact(case, *inputs)
    dense = replace(case, pattern=DENSE)
    dense_results = found(dense.module(backend=(kernel, kernel), dtype=compute), *inputs)
    dense_expected = exact(dense, *inputs)
    norms = absolute_norms(case, *inputs)
    for name in ("out", "dq", "dk", "dv"):
        x, x64 = getattr(results, name), getattr(expected, name)
        assert x.dtype is dtype, name
        error = (x.double() - x64).norm().item()
        dense_error = (getattr(dense_results, name).double() - getattr(dense_expected, name)).norm().item()
        bound = max(1.5 * dense_error, 4 * UNIT_ROUNDOFF[dtype] * norms[name])
        assert error <= bound, f"{ring} {name}: error {error:.3e}, allowed {bound:.3e} (dense call {dense_error:.3e})"
    lse_error = (dense_results.lse.double() - dense_expected.lse).abs().max().item()
    assert_lse_within_rule(results.lse, expected.lse, lse_error, dtype)


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


def check_keys_that_are_none(rings: list[RingCase], kernel: str, dtype: torch.dtype) -> int:
    """Keys of -inf, of one rank or of part of two, have no part in any result: the logits of a block are all -inf.

    q > 0, so that they are -inf and not +inf; gradients are math's alone, since others multiply 0 by infinity.
    """
    name = NAMES[dtype]
    for ring in rings:
        case = ring.case
        q, k, v = (x.detach().to(dtype) for x in case.inputs())
        q = q.abs() + 0.1
        for where in (slice(0, case.length // 2), slice(case.length // 2, None), slice(3, -5), slice(None)):
            k_here = k.clone()
            k_here[:, where] = -torch.inf
            inputs, dout = (q, k_here, v), case.dout(dtype)
            module = ring.module(dtype, name, (kernel, kernel))
            found_here, expected = run_ring(ring, module, *inputs, dout), exact(case, *inputs, dout)
            compared = 5 if kernel == "math" else 2
            tolerance = 1e-10 if dtype is torch.float64 else 1e-5
            try:
                for x, x64 in list(zip(found_here, expected, strict=True))[:compared]:
                    torch.testing.assert_close(x.double(), x64, rtol=tolerance, atol=tolerance)
            except AssertionError as error:
                raise AssertionError(f"{ring}, {where}: {error}") from error
    return len(rings)
