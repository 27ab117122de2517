"""Makes first calls ahead of the calls that matter, and times them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from ringattn.arguments import input_dtype, integer
from ringattn.dtypes import TORCH_DTYPES
from ringattn.errors import InputError
from ringattn.planning.table import ModuleShape
from ringattn.random_state import RandomState
from ringattn.runtime.inputs import check_length


def first_calls_ms(
    forward: Callable[[Tensor, Tensor, Tensor], object],
    shape: ModuleShape,
    device: torch.device,
    lengths: Iterable[int] | int,
    dtype: torch.dtype | str,
    batch: int,
    train: bool,
) -> dict[int, float]:
    """Call ``forward`` once per length on normal q, k and v, and back if ``train``; return the milliseconds of each.

    InputError for arguments that make no sense, before the first is run.
    """
    given = lengths if isinstance(lengths, Iterable) and not isinstance(lengths, str) else [lengths]
    lengths = [integer("the sequence length", length) for length in given]
    for length in lengths:
        check_length(length, shape.max_seq_len)
    batch, dtype = integer("batch_size", batch), TORCH_DTYPES[input_dtype(dtype)]
    if not isinstance(train, bool):
        raise InputError(f"train is {train!r}; it must be True or False")
    took_ms = {}
    generator = torch.Generator(device)  # its own: a warm-up leaves the process's random numbers alone
    for length in lengths:
        begin = time.perf_counter()
        q, k, v = (
            torch.zeros(batch, length, heads, size, dtype=dtype, device=device)
            .normal_(generator=generator)
            .requires_grad_(train)
            for heads, size in (
                (shape.heads, shape.head_dim),
                (shape.kv_heads, shape.head_dim),
                (shape.kv_heads, shape.value_dim),
            )
        )
        with torch.set_grad_enabled(train), RandomState.now(device).again():
            out = forward(q, k, v)
            assert isinstance(out, Tensor)
            if train:
                torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        took_ms[length] = (time.perf_counter() - begin) * 1e3
    return took_ms
