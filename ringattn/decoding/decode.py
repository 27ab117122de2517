"""Attends with the last positions of what a cache holds: one launch where a kernel reads caches, else block by block.

A plan's kernel may be one that does not read caches. It then has the steps that are one block to it, of sequences that
are equally long; the others are left to one that reads caches, unless the kernel was asked for by name.

Legend: B batch, Sq queries, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ringattn.autograd.transforms import transforms_active
from ringattn.distributed.chunk_rows import merge_block
from ringattn.dtypes import DTYPE_NAMES, TORCH_DTYPES
from ringattn.errors import InputError
from ringattn.kernels.contract import CachedForward, CachedRows
from ringattn.kernels.registry import KERNELS
from ringattn.planning.plan import Plan, combinations, kernel_needs, kernel_rejections
from ringattn.runtime.executor import Executor
from ringattn.runtime.inputs import check_inputs, check_length
from ringattn.runtime.loading import bind
from ringattn.runtime.merge import accumulator_dtype

from .blocks import Extent
from .cache import KVCache
from .cross import FEW_QUERIES, CrossModule, program_for, program_of
from .kernel_choice import rounded
from .one_block import OneBlock
from .order import order_of
from .program import CrossProgram

Results = tuple[Tensor, Tensor]
Counts = Sequence[int] | None

_MOST_STEPS = 256


class Step:
    """Ready to attend with few or many queries over a cache: a kernel that reads caches, or a program for blocks.

    With ``stands_in`` the kernel that reads caches is not the plan's, which has what is one block.
    """

    def __init__(
        self, module: CrossModule, cached: CachedForward | None, blocks: CrossProgram, plan: Plan, stands_in: bool
    ) -> None:
        self.cached, self.dtype, self.blocks, self.plan = cached, TORCH_DTYPES[plan.tunables.dtype], blocks, plan
        self.stands_in, self._scale = stands_in, module.scale
        self._one_block: OneBlock | None = None
        self.attend = module.counted(_attend, plan)

    def over_all(self, q: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
        """Return out and lse of one query of each sequence over all that is cached, which is one block."""
        length = cache.lengths[0]
        k, v = cache.rows(length)
        if self._one_block is None:
            extent = Extent(length - 1, 1, 0, length)
            self._one_block = OneBlock(self.blocks.at(extent), self._scale, q, k.shape[2])
        return _run(self._one_block, q, k, v)


def decode(module: CrossModule, q: Tensor, cache: KVCache, counts: Counts, kept: Tensor | None) -> Results:
    """Return out (B, Sq, H, D) and lse (B, H, Sq) of the last Sq positions; see ``RingAttention.decode``."""
    return _outside_graphs(module, _decode, q, cache, counts, kept)


def prefill(
    module: CrossModule, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, counts: Counts, kept: Tensor | None
) -> Results:
    """Append k and v to the cache and return the same of the positions that were appended."""
    return _outside_graphs(module, _prefill, q, k, v, cache, counts, kept)


def _outside_graphs(module: CrossModule, call: Callable[..., Results], *arguments: Any) -> Results:
    """Make a call that torch.compile leaves alone; over several ranks an error in it is reported to the others."""
    if torch.compiler.is_compiling():
        call = torch.compiler.disable(call)  # type: ignore[no-untyped-call]
    if module._ring is None:
        return call(module, *arguments)
    with module._ring.call():
        return call(module, *arguments)


def _prefill(
    module: CrossModule, q: Tensor, k: Tensor, v: Tensor, cache: KVCache, counts: Counts, kept: Tensor | None
) -> Results:
    _check(module, q, cache)  # before the cache changes
    if isinstance(k, Tensor) and k.dim() == 4 and k.shape[1] != q.shape[1]:
        raise InputError(f"q has {q.shape[1]} positions and k {k.shape[1]}; they must be equal")
    order = order_of(cache, q.shape[1], counts, kept)
    if order.moves:
        cache.check_new(k, v, order.counts)
        q, k, v = order.in_front(q, k, v)
    _check_lengths(module, map(operator.add, cache.lengths, order.counts))
    cache.append(k, v, order.counts)
    return order.back(*_attend_first(module, q, cache, order.counts))


def _decode(module: CrossModule, q: Tensor, cache: KVCache, counts: Counts, kept: Tensor | None) -> Results:
    _check(module, q, cache)
    order = order_of(cache, q.shape[1], counts, kept)
    _check_lengths(module, cache.lengths)  # positions may have been appended without the module
    (q,) = order.in_front(q)
    return order.back(*_attend_first(module, q, cache, order.counts))


def _attend_first(module: CrossModule, q: Tensor, cache: KVCache, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Attend with the first ``counts[b]`` queries of sequence b, its last positions."""
    queries = q.shape[1]
    if not _capturing(q):  # in which the host does not see what is appended
        cache.check_held(counts)
    step = step_of(module, q, cache)
    ring = module._ring
    if ring is None:
        return step.attend(module, step, q, cache, counts)
    ring.enter_as(
        ("decode", q.shape, q.dtype),
        lambda: f"decodes {queries} positions of {q.shape[0]} sequences of {max(cache.lengths)}",
    )
    out, lse = step.attend(module, step, q, cache, counts)
    parts = ring.gather_alike(
        torch.cat((out.to(lse.dtype), lse.transpose(1, 2)[..., None]), -1),
        lambda: f"a cache of {list(cache.lengths)} positions, of which {list(counts)} attend",
    )
    return _merged(torch.stack(parts), q.dtype)


def _merged(parts_RBSHD: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Merge what all ranks found: out (B, Sq, H, D) beside its lse, R times."""
    lses = parts_RBSHD[..., -1:]
    peak = lses.amax(0)
    peak = peak.masked_fill(peak == -torch.inf, 0.0)  # -inf - -inf is no number
    weights = torch.exp(lses - peak)
    total = weights.sum(0)  # 1 or more, but 0 where no rank has a key
    out = (parts_RBSHD[..., :-1] * (weights / total.clamp(min=1.0))).sum(0)
    return out.to(dtype), (peak + total.log()).squeeze(-1).transpose(1, 2).contiguous()


def _check(module: CrossModule, q: Tensor, cache: KVCache) -> None:
    """Raise InputError where q does not fit the module, or the cache does not; once for those that look alike."""
    if transforms_active() or torch.compiler.is_exporting():
        raise InputError("torch.export and torch.func take no cache")
    if not isinstance(cache, KVCache):
        raise InputError(f"cache is a {type(cache).__name__}; make one with kv_cache()")
    if isinstance(q, Tensor) and q.requires_grad and torch.is_grad_enabled():
        raise InputError("q requires a gradient, and what a cache holds has none; call under torch.no_grad()")
    looks = ("checked", type(q), getattr(q, "shape", None), getattr(q, "dtype", None), cache.signature)
    if looks in module.cross_programs and q.device == cache.device:
        return
    _check_anew(module, q, cache)
    module.cross_programs[looks] = True


def _check_lengths(module: CrossModule, lengths: Iterable[int]) -> None:
    """Raise InputError where a sequence is longer than the module's limit, if it has one."""
    if module.shape.max_seq_len is not None:
        check_length(max(lengths), module.shape.max_seq_len)


def _check_anew(module: CrossModule, q: Tensor, cache: KVCache) -> None:
    shape = module.shape
    like = q.new_empty(q.shape[0], 1, shape.kv_heads, shape.head_dim) if isinstance(q, Tensor) and q.dim() == 4 else q
    check_inputs(q, like, like, shape, module.device, cross=True)
    own = {
        "num_kv_heads": (cache.num_kv_heads, shape.kv_heads),
        "head_dim": (cache.head_dim, shape.head_dim),
        "pattern": (str(cache.pattern), str(shape.pattern)),
        "device": (cache.device, module.device),
        "ranks": (cache.world, shape.world),
    }
    for name, (there, here) in own.items():
        if there != here:
            raise InputError(f"the cache has {name} {there} and the module {here}; make it with kv_cache()")
    if shape.window and cache.window != shape.window:
        raise InputError(f"the cache has window {cache.window} and the module {shape.window}; make it with kv_cache()")
    if cache.window is not None and not shape.causal:
        raise InputError(f"the cache has window {cache.window}, which is for a causal module, and this is not one")
    if q.shape[0] != cache.batch or q.dtype is not cache.dtype:
        raise InputError(
            f"q has batch size {q.shape[0]} and is {q.dtype}; the cache has {cache.batch} sequences in {cache.dtype}"
        )


def _capturing(q: Tensor) -> bool:
    return q.is_cuda and torch.cuda.is_current_stream_capturing()


# --- the plan ----------------------------------------------------------------------------------------------------


def step_of(module: CrossModule, q: Tensor, cache: KVCache) -> Step:
    """Return what runs queries like these over as many positions, which are rounded up: plans are alike nearby."""
    capturing = _capturing(q)
    longest = rounded(cache.capacity if capturing else max(cache.lengths))
    key = ("decode", q.shape[:2], q.dtype, longest)
    step = module.cross_programs.get(key)
    if step is None:
        if len(module.cross_programs) >= _MOST_STEPS:
            module.cross_programs.clear()
        step = module.cross_programs[key] = new_step(module, q, longest)
    return step


def new_step(module: CrossModule, q: Tensor, longest: int) -> Step:
    """Return what runs queries like q (B, Sq, H, D) over sequences of at most ``longest`` positions."""
    batch, queries = q.shape[:2]
    if queries > FEW_QUERIES:
        return Step(module, None, *program_of(module, batch, longest, DTYPE_NAMES[q.dtype], "infer"), False)
    while True:
        row = module.plan.decode_at(longest, DTYPE_NAMES[q.dtype], batch)
        plan = row.runnable()
        cached = _cached(module, plan, queries)
        if cached is None or _validated(module, plan):
            break
    stand_in = None
    if cached is None and plan.workload.pattern.dense and not module.plan.wishes.forward:
        stand_in = _stand_in(module, plan, queries)
    return Step(module, cached or stand_in, program_for(module, plan), module.served(row), stand_in is not None)


def _validated(module: CrossModule, plan: Plan) -> bool:
    return module.validate_kernels(
        combinations(plan.workload, plan.tunables, module.plan.facts, conditions=plan.conditions)
    )


def _stand_in(module: CrossModule, plan: Plan, queries: int) -> CachedForward | None:
    """Return the first kernel that reads caches and can run the plan's steps in the place of its own; None without."""
    for name in KERNELS:
        if KERNELS[name].reads_caches:
            branches = tuple(replace(branch, forward=name) for branch in plan.tunables.branches)
            other = replace(plan, tunables=replace(plan.tunables, branches=branches))
            cached = _cached(module, other, queries)
            if cached is not None and _validated(module, other):
                return cached
    return None


def _cached(module: CrossModule, plan: Plan, queries: int) -> CachedForward | None:
    """Return the plan's kernel if it reads caches, and all branches in one call; else None."""
    names = {branch.forward for branch in plan.tunables.branches}
    if len(names) > 1:
        return None
    (name,) = names
    facts, params = module.plan.facts, plan.tunables.params_of(name)
    for branch in range(len(plan.tunables.branches)):
        needs = kernel_needs(plan.workload, plan.tunables, branch, facts, backward=False, conditions=plan.conditions)
        if kernel_rejections(name, tuple(replace(need, queries=queries) for need in needs), facts, params):
            return None
    return bind(plan, name, module.scale).cached if KERNELS[name].reads_caches else None


# --- the call ----------------------------------------------------------------------------------------------------


def _attend(module: CrossModule, step: Step, q: Tensor, cache: KVCache, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return out and lse over what this rank holds, of all queries."""
    plain, capturing = cache.pattern.dense and cache.window is None, _capturing(q)
    reads = step.cached is not None and (cache.world == 1 or (plain and q.shape[1] == 1))
    if reads and step.stands_in and not capturing:  # one query of equal sequences is one block to the plan's own kernel
        alike = next(cache.alike(counts)) == (0, cache.batch) and cache.begins[0] == 0 and counts[0] == 1
        if plain and cache.world == 1 and q.shape[1] == 1 and alike:
            return step.over_all(q, cache)
    if reads:
        assert step.cached is not None
        return _read_cache(step.cached, step.dtype, q, cache, counts)
    if capturing:
        raise InputError("the plan of this call cuts the cache in blocks by its length, which no CUDA graph can follow")
    return _by_blocks(module, step.blocks, q, cache, counts)


def _read_cache(
    cached: CachedForward, dtype: torch.dtype, q: Tensor, cache: KVCache, counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    (k, v), q = cache.rows(), q if q.stride(-1) == 1 else q.contiguous()
    lengths, begins, on_device = cache.device_rows(counts, q.shape[1])
    if cache.world > 1:  # every key here is before the query, or it: which one it is does not matter
        lengths = cache.held_on_device()
        begins = None
    # As many splits as memory was taken for at once, so that a graph has those of the calls before it.
    most = k.shape[1] if cache.max_length is not None else cache.most_rows
    rows = CachedRows(cache.pattern, most, lengths, begins, on_device, cache.window)
    if dtype is q.dtype:
        return cached(q, k, v, rows)
    out, lse = cached(q.to(dtype), k.to(dtype), v.to(dtype), rows)
    return out.to(q.dtype), lse


def _by_blocks(
    module: CrossModule, program: CrossProgram, q: Tensor, cache: KVCache, counts: Sequence[int]
) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    wide = accumulator_dtype(q.dtype)
    found: tuple[Tensor, Tensor] | None = None
    for first, end in cache.alike(counts):
        count = counts[first]
        parts = _parts(module, cache, first, count) if count else ()
        for extent, row in parts:
            k, v = (x[first:end, row : row + extent.keys] for x in cache.rows())
            out, lse = _run(program.at(extent), q[first:end, :count], k, v)
            if found is None and (first, end, count, cache.world) == (0, batch, queries, 1):
                return out, lse
            if found is None:
                found = q.new_zeros(q.shape, dtype=wide), q.new_full((batch, queries, heads), -torch.inf, dtype=wide)
            merge_block(found[0][first:end, :count], found[1][first:end, :count], out, lse.transpose(1, 2))
    if found is None:
        return torch.zeros_like(q), q.new_full((batch, heads, queries), -torch.inf, dtype=wide)
    return found[0].to(q.dtype), found[1].transpose(1, 2).contiguous()


def _run(program: Executor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
        return program.attend(q if q.stride(-1) == 1 else q.contiguous(), k, v)


def _parts(module: CrossModule, cache: KVCache, sequence: int, count: int) -> Iterator[tuple[Extent, int]]:
    """Yield where queries and keys that lie in consecutive rows of this rank are, and the first of these rows."""
    length = cache.lengths[sequence]
    begin, first = length - count, cache.begins[sequence]
    if cache.world > 1 and cache.pattern.dense and cache.window is None:
        # All keys before the queries are alike: positions that stand for theirs make one block of them.
        past = cache.held(sequence, begin if module.shape.causal else None)
        if past:
            yield Extent(past, count, 0, past), 0
        first = begin if module.shape.causal else length
    for run in cache.runs(sequence, first, length):
        yield Extent(begin, count, run.begin, run.end - run.begin, cache.window), run.row
