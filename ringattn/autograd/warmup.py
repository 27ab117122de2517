"""Makes first calls ahead of the calls that matter, and times them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ringattn.planning.table import ModuleShape


def first_calls_ms(
    forward: Callable[[Tensor, Tensor, Tensor], object],
    shape: ModuleShape,
    device: torch.device,
    lengths: Iterable[int],
    dtype: torch.dtype,
    batch: int,
    train: bool,
) -> dict[int, float]:
    """Call ``forward`` once per length on normal q, k and v, and back if ``train``; return the milliseconds of each."""
    took_ms = {}
    generator = torch.Generator(device)  # its own: a warm-up leaves the process's random numbers alone
    for length in lengths:
        begin = time.perf_counter()
        q, k, v = (
            torch.zeros(batch, length, heads, shape.head_dim, dtype=dtype, device=device)
            .normal_(generator=generator)
            .requires_grad_(train)
            for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
        )
        with torch.set_grad_enabled(train):
            out = forward(q, k, v)
            assert isinstance(out, Tensor)
            if train:
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took_ms[length] = (time.perf_counter() - begin) * 1e3
    return took_ms
