"""What a call with dropout must be: the weights that it turns out to have kept, and the float64 result of these.

Values that are columns of the identity show the weights, and the same random numbers drop the same ones of any values.

Legend: B batch, S length, H query heads, Hkv key/value heads, D head dimension.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from oracle import Case
from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def seeded(call: Callable[[], Tensor], seed: int = 7) -> Tensor:
    torch.manual_seed(seed)
    return call()


def kept_by(attend: Attend, case: Case, q: Tensor, k: Tensor, seed: int = 7) -> Tensor:
    """Which weights (B, H, S, S) the call of this seed keeps."""
    columns = []
    for first in range(0, case.length, case.value_dim):
        values = torch.zeros(*k.shape[:3], case.value_dim, dtype=k.dtype, device=k.device)
        count = min(case.value_dim, case.length - first)
        for column in range(count):
            values[:, first + column, :, column] = 1.0
        with torch.no_grad():
            out = seeded(lambda values=values: attend(q, k, values), seed)
        columns.append(out[..., :count].transpose(1, 2) > 0)
    return torch.cat(columns, -1)


def seen_by(case: Case, device: str | torch.device = "cpu") -> Tensor:
    """Which keys (S, S) a query may see."""
    seen = torch.ones(case.length, case.length, dtype=torch.bool, device=device)
    seen = seen.tril() if case.causal else seen
    return seen.triu(1 - case.window) if case.window else seen


@dataclass(frozen=True)
class Exact:
    """The float64 result of a call whose weights ``kept`` (B, H, S, S) says."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def exact_of(
    case: Case, q: Tensor, k: Tensor, v: Tensor, dout: Tensor, kept: Tensor, p: float, sinks: Tensor | None = None
) -> Exact:
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    group = case.heads // case.kv_heads
    query, key, value = (x.transpose(1, 2) for x in (leaves[0], *(x.repeat_interleave(group, 2) for x in leaves[1:])))
    logits = query @ key.transpose(-1, -2) * (case.head_dim**-0.5 if case.scale is None else case.scale)
    if case.softcap:
        logits = case.softcap * torch.tanh(logits / case.softcap)
    logits = logits.masked_fill(~seen_by(case, q.device), -torch.inf)
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*logits.shape[:3], 1)
        weights = torch.cat((logits, column), -1).softmax(-1)[..., :-1]
    else:
        weights = logits.softmax(-1)
    out = ((weights * kept / (1.0 - p)) @ value).transpose(1, 2)
    return Exact(out.detach(), *torch.autograd.grad(out, leaves, dout.double()))
