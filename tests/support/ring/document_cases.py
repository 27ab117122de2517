"""What a rank does in the tests of documents over ranks: the ring module against the oracle, document by document."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from oracle import Results, assert_equal_to, cpu, exact_over, lists_of
from ring_cases import RingCase
from torch import Tensor

from ringattn import Profile, RingAttention
from ringattn.runtime.packed.documents import documents_of


@dataclass(frozen=True)
class DocumentsCase:
    """``ring`` with documents: ``cu_seqlens``, or where it is None ``lengths``."""

    ring: RingCase
    cu_seqlens: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None

    @property
    def documents(self) -> dict[str, Any]:
        return {"cu_seqlens": self.cu_seqlens} if self.cu_seqlens is not None else {"lengths": self.lengths}

    def profile(self, world: int) -> Profile:
        """A profile of this one plan, for these documents."""
        ring, case = self.ring, self.ring.case
        count, longest, positions = documents_of(self.cu_seqlens, self.lengths).sizes(case.batch, case.length)
        share = max(2, -(-longest // world))
        tokens = min(count * share, max(share + count - 1, -(-positions // world)))
        workload = replace(case.workload(), seq_len=share, batch=count, packed_tokens=tokens, world=world)
        return Profile.single(cpu(), workload, ring.tunables("fp64", "math", "math"))

    def module(self) -> RingAttention:
        """A module that obeys exactly this schedule, for these documents."""
        ring, case = self.ring, self.ring.case
        profile = self.profile(dist.get_world_size())
        lists = {} if case.pattern.dense else lists_of(case.pattern)
        return RingAttention(
            case.heads, case.head_dim, case.kv_heads, causal=case.causal, scale=case.scale, profile=profile,
            device="cpu", process_group=dist.group.WORLD, layout=ring.spread, **lists,
        )  # fmt: skip


def run_documents(each: DocumentsCase, module: RingAttention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Results:
    """The whole results, from every rank's shard."""
    total, cu_seqlens = each.ring.case.length, each.cu_seqlens
    leaves = [module.shard(x.detach(), cu_seqlens=cu_seqlens).clone().requires_grad_() for x in (q, k, v)]
    out, lse = module(*leaves, return_lse=True, total_length=total, **each.documents)
    grads = torch.autograd.grad(out, leaves, module.shard(dout, cu_seqlens=cu_seqlens).contiguous())
    whole = [module.unshard(x.detach(), total, cu_seqlens=cu_seqlens) for x in (out, *grads)]
    return Results(whole[0], module.unshard(lse, total, dim=2, cu_seqlens=cu_seqlens), *whole[1:])


def check_documents(cases: list[DocumentsCase]) -> int:
    """float64: every result equals the oracle's of each document alone to 1e-10.

    Every rank has the whole results; ranks take turns with comparing them.
    """
    for number, each in enumerate(cases):
        case = each.ring.case
        q, k, v = case.inputs()
        module = each.module()
        try:
            results = run_documents(each, module, q, k, v, case.dout())
            (program,) = module._programs.values()
            assert program.plan.tunables.schedule == each.ring.schedule, program.plan
            if number % dist.get_world_size() != dist.get_rank():
                continue
            placed = documents_of(each.cu_seqlens, each.lengths).placed(case.batch, case.length)
            assert_equal_to(results, exact_over(case, placed, q, k, v, case.dout()))
        except AssertionError as error:
            raise AssertionError(f"{each}: {error}") from error
    return len(cases)


def positions_here(layout: str, causal: bool, total: int, cu_seqlens: tuple[int, ...]) -> list[int]:
    """The positions of this rank's rows."""
    module = RingAttention(
        2, 4, causal=causal, profile=None, device="cpu", process_group=dist.group.WORLD, layout=layout
    )
    found: list[int] = module.positions(total, cu_seqlens=cu_seqlens).tolist()
    return found


def call_with(cu_seqlens: tuple[tuple[int, ...], ...], length: int, total: int | None) -> None:
    """A call with ``length`` rows here, and what each rank takes for the documents."""
    module = RingAttention(2, 4, causal=True, profile=None, device="cpu", process_group=dist.group.WORLD)
    x = torch.zeros(1, length, 2, 4)
    module(x, x, x, cu_seqlens=cu_seqlens[dist.get_rank()], total_length=total)
