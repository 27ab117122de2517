"""What a rank does in the tests of peers' configurations: transformers' attention function against float64.

Legend: B batch, S positions over all ranks, H query heads, Hkv key/value heads, D head dimension, Dv that of values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from cross_oracle import attend
from document_cases import DocumentsCase
from oracle import Case, assert_equal_to, exact, laid_out
from ring_cases import RingCase, run_ring
from torch import Tensor, nn

from ringattn import RingAttention
from ringattn.decoding import cache as caches
from ringattn.errors import InputError
from ringattn.integrations.transformers import _attention
from ringattn.modules.pool import AttentionPool
from ringattn.reference import dilated_attention_reference

TOLERANCE = 1e-10
_RESULTS = ("out", "dq", "dk", "dv", "dsinks")  # the last of configurations with sinks alone


class Exchange(NamedTuple):
    """How ranks exchange keys, and the layout of their sequences."""

    schedule: str
    spread: str = "zigzag"
    ulysses: int = 0


@dataclass(frozen=True)
class PeerCase:
    """A configuration of a peer's test: ``case``, and what it has beyond heads, lengths and causality.

    ``value_dim`` is Dv, 0 for D; ``window`` the positions before and after a query that it sees, -1 for all; ``bias``
    the shape of a bias on the logits; ``sinks`` a learnable logit more per head. ``bounds`` are those of packed
    documents, of which those numbered in ``padding`` are padding. ``refused`` is how the error begins, if there is one.
    """

    case: Case
    value_dim: int = 0
    window: tuple[int, int] = (-1, -1)
    bias: tuple[int, ...] = ()
    sinks: bool = False
    bounds: tuple[int, ...] | None = None
    padding: tuple[int, ...] = ()
    refused: str = ""

    def inputs(self) -> tuple[Tensor, ...]:
        """q, k, v and dout, without gradients at padding."""
        q, k, v = (x.detach() for x in self.case.inputs())
        width = self.value_dim or self.case.head_dim
        v, dout = v[..., :width], self.case.dout()[..., :width].clone()
        return q, k, laid_out(v, self.case.layout), dout.masked_fill(~self.kept()[:, None, None], 0.0)

    def kept(self) -> Tensor:
        """(S,): False at padding."""
        kept = torch.ones(self.case.length, dtype=torch.bool)
        if self.bounds is not None:
            kept[self.bounds[-1] :] = False
            for number in self.padding:
                kept[self.bounds[number] : self.bounds[number + 1]] = False
        return kept

    def expected(self, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
        """out and the gradients in float64, also of sinks, straight from a mask of S x S."""
        at = torch.arange(self.case.length)
        seen = self.kept()[:, None] & self.kept()
        if self.case.causal:
            seen = seen & (at <= at[:, None])
        if self.case.window is not None:
            seen = seen & (at > at[:, None] - self.case.window)
        if self.bounds is not None:
            number = torch.bucketize(at, torch.tensor(self.bounds), right=True)
            seen = seen & (number == number[:, None])
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = attend(*leaves, seen.double().expand(self.case.heads, -1, -1))
        if self.sinks:
            sinks = self.logits_of_sinks()
            leaves.append(sinks)
            empty = lse == -torch.inf
            share = torch.sigmoid(lse.masked_fill(empty, 0.0) - sinks[:, None])
            out = out * share.masked_fill(empty, 0.0).transpose(1, 2).unsqueeze(-1)
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    def logits_of_sinks(self) -> Tensor:
        """(H,): a logit for each head."""
        return torch.linspace(-1.0, 1.0, self.case.heads, dtype=torch.float64).requires_grad_()

    def call(
        self, pool: AttentionPool, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, sinks: Tensor | None = None
    ) -> Tensor:
        """Call the attention function as a model does over ranks, with tensors of this rank's positions (S,)."""
        given: dict[str, Any] = {"position_ids": positions[None]}
        if self.bounds is not None:
            bounds = torch.tensor(self.bounds, dtype=torch.int32)
            starts = bounds[torch.bucketize(positions, bounds, right=True).clamp(max=len(bounds) - 1) - 1]
            given = {"position_ids": (positions - starts)[None], "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
        if self.window != (-1, -1):
            given["sliding_window"] = self.window[0] + 1  # which counts the position itself
        if sinks is not None:
            given["s_aux"] = sinks
        mask = torch.ones(self.bias, dtype=q.dtype) if self.bias else None
        given |= {"is_causal": self.case.causal, "total_length": self.case.length}
        given["scaling"] = 1 / math.sqrt(self.case.head_dim)
        out, _ = _attention(pool, True, None, nn.Identity(), *(x.transpose(1, 2) for x in (q, k, v)), mask, **given)
        return out


def refusal_of(each: PeerCase) -> str:
    """What a group of one rank says of the configuration; a longer one says the same, and ends."""
    q, k, v, _ = each.inputs()
    try:
        each.call(AttentionPool(profile=None), q.requires_grad_(), k, v, torch.arange(each.case.length))
    except InputError as error:
        return str(error)
    return ""


def check_peers(cases: list[PeerCase], exchange: Exchange) -> int:
    """float64: every result of the ranks equals the definition to 1e-10; ranks take turns with comparing them."""
    world = dist.get_world_size()
    for number, each in enumerate(cases):
        case = each.case
        spread = exchange.spread if case.window is None else "contiguous"  # the only layout of a window in a ring
        ring = RingCase(case, exchange.schedule, spread, exchange.ulysses)
        documents = None if each.bounds is None else DocumentsCase(ring, each.bounds)
        profile = ring.profile(world) if documents is None else documents.profile(world)
        pool = AttentionPool(profile=profile, process_group=dist.group.WORLD, layout=spread)
        q, k, v, dout = each.inputs()
        module = pool.module_for(q, k, case.causal, 1 / math.sqrt(case.head_dim), window=case.window)
        cut = {"cu_seqlens": each.bounds}
        leaves = [laid_out(module.shard(x, **cut), case.layout).requires_grad_() for x in (q, k, v)]
        sinks = each.logits_of_sinks() if each.sinks else None
        out = each.call(pool, *leaves, module.positions(case.length, **cut), sinks)
        leaves += [sinks] if sinks is not None else []
        results = [out.detach(), *torch.autograd.grad(out, leaves, module.shard(dout, **cut).contiguous())]
        whole = [module.unshard(x, case.length, **cut) for x in results[:4]]
        for dsinks in results[4:]:  # over the queries of this rank, as a weight's
            dist.all_reduce(dsinks)
            whole.append(dsinks)
        (program,) = module._programs.values()
        assert program.plan.tunables.schedule == exchange.schedule, program.plan
        if number % world != dist.get_rank():
            continue
        for name, x, x64 in zip(_RESULTS, whole, each.expected(q, k, v, dout), strict=False):
            x, x64 = (t if name == "dsinks" else t[:, each.kept()] for t in (x, x64))
            error = (x - x64).abs().max().item()
            assert error <= TOLERANCE * max(1.0, x64.abs().max().item()), f"{each}, {exchange}: {name} {error:.1e}"
    return len(cases)


def packed(each: PeerCase, lengths: tuple[int, ...], apart: int) -> PeerCase:
    """The configuration with all sequences in one row: documents of these lengths, each padded to ``apart``."""
    bounds, padding = [0], []
    for length in lengths:
        bounds.append(bounds[-1] + length)
        if pad := -length % apart:
            padding.append(len(bounds) - 1)
            bounds.append(bounds[-1] + pad)
    case = replace(each.case, batch=1, length=each.case.batch * each.case.length)
    return replace(each, case=case, bounds=tuple(bounds), padding=tuple(padding))


def check_forwards(rings: list[RingCase]) -> int:
    """float64, without gradients: what ranks find equals the definition; they take turns with comparing it."""
    for number, ring in enumerate(rings):
        q, k, v = (x.detach() for x in ring.case.inputs())
        module = ring.module(train=False)
        out = module.unshard(module(*map(module.shard, (q, k, v))), ring.case.length)
        if number % dist.get_world_size() == dist.get_rank():
            expected, _ = dilated_attention_reference(q, k, v, ring.case.pattern, ring.case.causal)
            torch.testing.assert_close(out, expected, rtol=0, atol=TOLERANCE)
    return len(rings)


def check_pairs(rings: list[RingCase]) -> int:
    """Every two ranks hold a batch of their own: the results of each pair equal the definition."""
    groups = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    pair = dist.get_rank() // 2
    for ring in rings:
        own = replace(ring, case=replace(ring.case, seed=pair))
        inputs = (*own.case.inputs(), own.case.dout())
        assert_equal_to(run_ring(own, own.module(group=groups[pair]), *inputs), exact(own.case, *inputs))
    return len(rings)


def call_with_batches(batches: tuple[int, ...]) -> None:
    """A call of ranks whose batches have these sizes."""
    module = RingAttention(8, 8, profile=None, device="cpu", process_group=dist.group.WORLD)
    x = torch.zeros(batches[dist.get_rank()], 16, 8, 8)
    module(x, x, x)


def check_decode_step(cases: list[Case]) -> int:
    """One query over a cache that the ranks hold together, its positions 8 by 8, equals the definition."""
    usual, caches.STRIPE = caches.STRIPE, 8
    try:
        for case in cases:
            q, k, v = (x.detach() for x in case.inputs())
            module = RingAttention(
                case.heads, case.head_dim, profile=None, device="cpu", process_group=dist.group.WORLD
            )
            cache = module.kv_cache(case.batch, dtype=torch.float64)
            cache.append(k, v)
            expected, _ = attend(q[:, -1:], k, v, torch.ones(case.heads, 1, case.length, dtype=torch.float64))
            torch.testing.assert_close(module.decode(q[:, -1:], cache), expected, rtol=0, atol=TOLERANCE)
    finally:
        caches.STRIPE = usual
    return len(cases)
