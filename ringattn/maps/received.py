"""Sums the columns of the softmax P: the attention that every key received.

With v and dout as ever, dv = P^T dout, so a dout of ones makes dv the column sums of P: one backward of any kernel has
them exactly, in the memory of a training step. The query heads of a group share dv; each has its one in a column of its
own there, and so they stay apart.

Legend: B batch, S length, H query heads, Hkv key/value heads, G = H / Hkv, D head dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from ringattn.errors import InputError
from ringattn.runtime.executor import Executor, Triple
from ringattn.runtime.graphed import GraphedProgram
from ringattn.runtime.merge import accumulator_dtype

if TYPE_CHECKING:
    from ringattn.distributed.context import RingContext

Reduce = Literal["sum", "mean"]


def check_arguments(q: Tensor, reduce: Reduce, queries: Tensor | None, lse: Tensor | None) -> None:
    """Raise InputError where an argument of ``received`` does not fit q (B, S, H, D)."""
    if reduce not in get_args(Reduce):
        raise InputError(f"reduce is {reduce!r}; use one of {', '.join(get_args(Reduce))}")
    batch, length, heads, _ = q.shape
    if queries is not None:
        _check_tensor("queries", queries, q, torch.bool)
        if tuple(queries.shape) not in ((length,), (batch, length)):
            raise InputError(
                f"queries has shape {tuple(queries.shape)}; it must be (sequence,) or (batch, sequence), "
                f"({length},) or ({batch}, {length})"
            )
    if lse is not None:
        _check_tensor("lse", lse, q, accumulator_dtype(q.dtype))
        if tuple(lse.shape) != (batch, heads, length):
            raise InputError(
                f"lse has shape {tuple(lse.shape)}; it must be (batch, heads, sequence), {(batch, heads, length)}"
            )


def _check_tensor(name: str, x: object, q: Tensor, dtype: torch.dtype) -> None:
    if not isinstance(x, Tensor):
        raise InputError(f"{name} is a {type(x).__name__}; it must be a tensor")
    if x.dtype is not dtype:
        raise InputError(f"{name} is {x.dtype}; it must be {dtype}")
    if x.device != q.device:
        raise InputError(f"{name} is on {x.device} and q on {q.device}; move it there")


def received(
    program: Executor,
    inputs: Triple,
    total_length: int,
    ring: RingContext | None,
    reduce: Reduce,
    queries: Tensor | None,
    lse: Tensor | None,
) -> Tensor:
    """Return (B, H, S), float32 (float64 for float64): what each key received, summed or averaged over queries.

    ``inputs`` are q, k and v; ``queries``, bool (S,) or (B, S), the rows that count, all of them if None; ``lse``
    (B, H, S) that of a forward, or None to run one. Over ranks S is local, and the queries of all ranks count.
    """
    if isinstance(program, GraphedProgram):
        program = program.without_graphs()  # its graphs tell a call by the addresses of the forward's results
    q, k, v = inputs
    if lse is None:
        _, lse = program.attend(q, k, v)
    wide = lse.dtype
    # No sum of a column exceeds the number of queries, which float16 cannot hold beyond 65504.
    one = 2.0 ** (15 - (total_length - 1).bit_length())
    weight_BS = torch.full((1, q.shape[1]), one, dtype=q.dtype, device=q.device)
    if queries is not None:
        weight_BS = weight_BS * queries.reshape(-1, q.shape[1])
    sums_BHS = _sums(program, inputs, lse, weight_BS).to(wide).div_(one)
    if reduce == "sum":
        return sums_BHS
    if queries is None:
        return sums_BHS.div_(total_length)
    count_B = queries.reshape(-1, q.shape[1]).sum(-1)
    if ring is not None:
        count_B = torch.stack(ring.gather_equal(count_B)).sum(0)
    return sums_BHS.div_(count_B.clamp(min=1)[:, None, None])


def _sums(program: Executor, inputs: Triple, lse: Tensor, weight_BS: Tensor) -> Tensor:
    """Return the column sums (B, H, S) of P, its rows weighted: one backward for as many heads of a group as fit D."""
    q, k, v = inputs
    heads, kv_heads, head_dim = q.shape[2], k.shape[2], v.shape[3]
    group = heads // kv_heads
    # Only dq and dk depend on out, which are not wanted.
    dout = q.new_zeros((*q.shape[:3], head_dim))
    out = q.new_zeros(()).expand(dout.shape)
    found = []
    for first in range(0, group, head_dim):
        members = min(head_dim, group - first)
        columns = torch.unflatten(dout, 2, (kv_heads, group))[:, :, :, first : first + members, :members]
        columns.diagonal(dim1=3, dim2=4).copy_(weight_BS[:, :, None, None])
        _, _, dv = program.gradients(dout, (*inputs, out, lse), (False, False, True))
        assert dv is not None
        found.append(dv[..., :members])
        columns.zero_()
    sums_BSKG = found[0] if len(found) == 1 else torch.cat(found, -1)
    return sums_BSKG.flatten(2).transpose(1, 2)
