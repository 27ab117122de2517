"""Makes a step of a batch whose sequences lie in rows of one tensor, each from a row and to a row of its own: one call.

Legend: B batch, Sk rows of keys, L rows that any sequence may have, H query heads, Hkv key/value heads,
D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ringattn.autograd.out_of_memory import note_plan
from ringattn.kernels.contract import CachedForward, CachedRows
from ringattn.runtime.inputs import check_inputs
from ringattn.workload import Pattern

from .cross import CrossModule
from .decode import new_step
from .kernel_choice import rounded
from .one_block import flash_cpu_through_torch


class Spans:
    """Rows ``firsts`` to ``ends`` (B,) of keys that each sequence of a batch has, one at least, of ``length`` rows."""

    def __init__(self, firsts: Sequence[int], ends: Sequence[int], length: int) -> None:
        self.firsts, self.ends, self.length = firsts, ends, length
        self._rows: dict[torch.device, CachedRows] = {}
        self._masks: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def rows_on(self, device: torch.device) -> CachedRows:
        """Return the same as positions: row ``first`` is position 0, and those before it have none."""
        rows = self._rows.get(device)
        if rows is None:
            bounds = torch.tensor([self.firsts, self.ends], dtype=torch.int32).to(device)
            rows = CachedRows(Pattern(), self.length, bounds[1] - bounds[0], -bounds[0])
            self._rows[device] = rows
        return rows

    def mask_on(self, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return what is added to logits (B, 1, 1, L): 0 at keys and -inf elsewhere."""
        mask = self._masks.get((device, dtype))
        if mask is None:
            at = torch.arange(self.length, device="cpu")
            firsts, ends = (torch.tensor(x, device="cpu")[:, None] for x in (self.firsts, self.ends))
            mask = torch.where((firsts <= at) & (at < ends), 0.0, -torch.inf)[:, None, None].to(device, dtype)
            self._masks[device, dtype] = mask
        return mask


SpanStep = Callable[[Tensor, Tensor, Tensor, Spans], Tensor | None]


def run_over_spans(module: CrossModule, query: Tensor, key: Tensor, value: Tensor, spans: Spans) -> SpanStep | None:
    """Return the function of steps like this one, one query (B, H, 1, D) of each sequence over its span of keys.

    key and value are (B, Hkv, Sk, D), and it gives out (B, 1, H, D), or None where only a call for each sequence keeps
    out what is no number. None in its place where no kernel of the plan takes the batch in one call.
    """
    longest, most = rounded(spans.length), module.shape.max_seq_len
    if module.shape.world > 1 or not module.shape.pattern.dense or (most is not None and longest > most):
        return None
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    check_inputs(q, k, v, module.shape, module.device, cross=True)
    if not q.stride(3) == k.stride(3) == v.stride(3) == 1:
        return None
    step = new_step(module, q, longest)
    kernels = {branch.forward for branch in step.plan.tunables.branches}
    if step.cached is not None:
        run = _of_kernel(step.cached, step.dtype)
    elif q.dtype is step.dtype and kernels == {"flash-cpu"}:
        run = _of_flash_cpu(module.scale, query, key)
    else:
        return None

    def attend(query: Tensor, key: Tensor, value: Tensor, spans: Spans) -> Tensor | None:
        try:
            return run(query, key, value, spans)
        except Exception as error:
            note_plan(error, step.blocks, query.transpose(1, 2))
            raise

    return module.counted(attend, step.plan)


def _of_kernel(cached: CachedForward, dtype: torch.dtype) -> SpanStep:
    def run(query: Tensor, key: Tensor, value: Tensor, spans: Spans) -> Tensor:
        q, k, v = (x.transpose(1, 2).to(dtype) for x in (query, key[:, :, : spans.length], value[:, :, : spans.length]))
        return cached(q, k, v, spans.rows_on(query.device))[0].to(query.dtype)

    return run


def _of_flash_cpu(scale: float, query: Tensor, key: Tensor) -> SpanStep:
    """Return torch's function with a mask, by which it runs flash-cpu.

    A mask is added to logits, so that keys that are no numbers get through; nor does flash-cpu give NaN for all rows
    that have one. These are looked for in the result, whose sum is finite and which has no zero else.
    """
    sdpa = flash_cpu_through_torch(scale, query, key)

    def run(query: Tensor, key: Tensor, value: Tensor, spans: Spans) -> Tensor | None:
        mask = spans.mask_on(query.device, query.dtype)
        out = sdpa(query, key[:, :, : spans.length], value[:, :, : spans.length], mask)
        if int(torch.count_nonzero(out)) != out.numel() or not math.isfinite(out.sum(dtype=torch.float32)):
            return None
        return out

    return run
