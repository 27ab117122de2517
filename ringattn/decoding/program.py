"""Runs a plan where queries have other positions than the keys: block by block, merged by their log-sum-exp.

The backward is that of every block against the final out and LSE, as everywhere.

Legend: B batch, S length, H query heads, Hkv key/value heads, D head dim; of a block: N segments times batch, M rows,
J key/value heads, G = H / Hkv.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor

from ringattn.distributed.chunk_rows import merge_of
from ringattn.kernels.contract import BoundKernel, not_differentiable
from ringattn.planning.plan import Plan
from ringattn.runtime.executor import ALL, Kept, Triple, Wanted
from ringattn.runtime.merge import accumulator_dtype
from ringattn.runtime.program import Program, TravelBackward, TravelForward

from .blocks import Block, Extent, Heads, Rows, blocks_of
from .kernel_choice import BlockKernels


class CrossProgram(Program):
    """Plan for queries at some positions and keys at others; ``at`` says which."""

    def __init__(self, plan: Plan, scale: float, kernel_of: BlockKernels) -> None:
        super().__init__(plan, scale)
        self._kernel_of = kernel_of
        self._merge = merge_of(plan)
        self._extent: Extent | None = None
        self._of_torch = ""  # torch's own function aligns a causal mask to the start
        self.differentiable = not_differentiable

    def at(self, extent: Extent) -> CrossProgram:
        """Return the program for queries and keys of these positions."""
        program = copy.copy(self)
        program._extent = extent
        return program

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, kept: Kept | None = None, travel: TravelForward | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return out (B, Sq, H, D) in the compute dtype and lse (B, H, Sq) of k and v (B, Sk, Hkv, D)."""
        kv_heads, wide = k.shape[2], accumulator_dtype(q.dtype)
        blocks = self._blocks(kv_heads)
        if blocks and _covers(blocks[0], q, kv_heads):
            out, lse = self._forward_block(blocks[0], q, k, v)
            if len(blocks) == 1:
                return out, lse
            blocks, total, total_BSH = blocks[1:], out.to(wide), lse.transpose(1, 2).contiguous()
        else:
            total = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=wide)
            total_BSH = q.new_full(q.shape[:3], -torch.inf, dtype=wide)
        for block in blocks:
            out, lse = self._forward_block(block, q, k, v)
            self._merge_into(block, kv_heads, total, total_BSH, out, lse)
        return total.to(q.dtype), total_BSH.transpose(1, 2).contiguous()

    def backward(
        self,
        dout: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kept: Iterable[Tensor] = (),
        wanted: Wanted = ALL,
        travel: TravelBackward | None = None,
    ) -> Triple:
        """Return dq, dk and dv in the compute dtype; shapes as in ``forward``."""
        kv_heads, wide = k.shape[2], accumulator_dtype(q.dtype)
        dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
        lse_BSH = lse.transpose(1, 2)
        for block in self._blocks(kv_heads):
            of_q = [self._taken(x, block, block.q, kv_heads) for x in (dout, q, out)]
            k_rows, v_rows = (self._taken(x, block, block.k, kv_heads) for x in (k, v))
            lse_rows = _folded(_turned(_view(lse_BSH[..., None], block.q, block.heads, kv_heads), block))
            kernel = self._kernel_of(block, True, of_q[1].stride(1))
            dout_rows, out_rows = of_q[0].contiguous(), of_q[2].contiguous()
            lse_rows = lse_rows.squeeze(-1).transpose(1, 2).contiguous()
            parts = kernel.backward(dout_rows, of_q[1], k_rows, v_rows, out_rows, lse_rows)
            for total, part, rows in zip((dq, dk, dv), parts, (block.q, block.k, block.k), strict=True):
                view = _view(total, rows, block.heads, kv_heads)
                view.add_(_turned(part.reshape(view.shape), block))
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def kernel_over_all(self, q: Tensor, kv_heads: int) -> tuple[str, BoundKernel]:
        """Return the kernel, and its name, of the one block that all queries and keys are: each sees every key."""
        (block,) = self._blocks(kv_heads)
        assert _covers(block, q, kv_heads)
        assert not block.causal
        return self._kernel_of.named(block, False, q.stride(1))

    def _blocks(self, kv_heads: int) -> tuple[Block, ...]:
        assert self._extent is not None
        return blocks_of(self._extent, self._pattern, self.plan.workload.causal, kv_heads)

    def _taken(self, x: Tensor, block: Block, rows: Rows, kv_heads: int) -> Tensor:
        """Return the rows and heads of a block as (N, M, J * G, D), in place where they lie evenly."""
        taken = _folded(_turned(_view(x, rows, block.heads, kv_heads), block))
        return taken.contiguous() if rows.step > 1 and self._gathers[block.branch] == "copy" else taken

    def _forward_block(self, block: Block, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        kv_heads = k.shape[2]
        q_rows = self._taken(q, block, block.q, kv_heads)
        k_rows, v_rows = (self._taken(x, block, block.k, kv_heads) for x in (k, v))
        return self._kernel_of(block, False, q_rows.stride(1)).forward(q_rows, k_rows, v_rows)

    def _merge_into(
        self, block: Block, kv_heads: int, total: Tensor, total_BSH: Tensor, out: Tensor, lse: Tensor
    ) -> None:
        batch, group = total.shape[0], total.shape[2] // kv_heads
        target = _view(total, block.q, block.heads, kv_heads)
        target_lse = _view(total_BSH[..., None], block.q, block.heads, kv_heads)
        out = _turned(out.reshape(target.shape), block)
        lse = _turned(lse.transpose(1, 2).reshape(target_lse.shape), block)
        if (batch == 1 or block.q.segments == 1) and (block.heads.step == 1 or group == 1):
            target, target_lse, out, lse = (_folded(x) for x in (target, target_lse, out, lse))
            self._merge(target, target_lse[..., 0], out, lse[..., 0])
            return
        for b in range(batch):  # these lie in place, but not as four even axes
            for j in range(block.heads.count):
                parts = (x[b, :, :, j] for x in (target, target_lse, out, lse))
                one, one_lse, one_out, part_lse = parts
                self._merge(one, one_lse[..., 0], one_out, part_lse[..., 0])


def _covers(block: Block, q: Tensor, kv_heads: int) -> bool:
    """Return whether the block is all heads of all rows of q, in order."""
    rows = block.q
    whole = (rows.first, rows.step, rows.count, rows.segments) == (0, 1, q.shape[1], 1)
    return whole and block.heads == Heads(0, 1, kv_heads) and not block.reverse


def _view(x_BSHD: Tensor, rows: Rows, heads: Heads, kv_heads: int) -> Tensor:
    """View rows and heads of x as (B, segments, M, J, G, D)."""
    if rows.segments == 1:
        x = x_BSHD[:, rows.first : rows.first + (rows.count - 1) * rows.step + 1 : rows.step].unsqueeze(1)
    else:
        x = x_BSHD[:, rows.begin : rows.begin + rows.segments * rows.length]
        x = torch.unflatten(x, 1, (rows.segments, rows.length))[:, :, rows.offset :: rows.step][:, :, : rows.count]
    x = torch.unflatten(x, 3, (kv_heads, -1))
    return x[:, :, :, heads.first : heads.first + (heads.count - 1) * heads.step + 1 : heads.step]


def _turned(x: Tensor, block: Block) -> Tensor:
    """Return rows (B, segments, M, ...) in the order that the block runs them in, or back."""
    return x.flip(2) if block.reverse else x


def _folded(x: Tensor) -> Tensor:
    """Return (B, segments, M, J, G, D) as (N, M, J * G, D); a view where it lies evenly."""
    return x.flatten(3, 4).flatten(0, 1)
