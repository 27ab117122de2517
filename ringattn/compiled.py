"""The module under torch.compile: two registered operators, so that no graph breaks around it.

Eager calls take the autograd Function or an operator of torch instead: a custom op costs three times as much host time
as the Function (22 against 7 microseconds a call on a CPU).

A module is known to the operators by a number, its handle, because a graph holds no Python objects. Modules of one
configuration share a handle, so that the layers of a model share what was compiled for the first of them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .attention import RingAttention

_lock = threading.Lock()
_handles: dict[Hashable, int] = {}
_modules: dict[int, weakref.WeakSet[RingAttention]] = {}


def register(module: RingAttention) -> int:
    """The handle of ``module``, valid as long as it or an equal one lives."""
    configuration = (module.plan.question, module.scale, module.device)
    with _lock:
        handle = _handles.setdefault(configuration, len(_handles) + 1)
        _modules.setdefault(handle, weakref.WeakSet()).add(module)
    return handle


def _module(handle: int) -> RingAttention:
    module = next(iter(_modules[handle]), None)
    assert module is not None, "the RingAttention of a compiled graph is gone"
    return module


def rows_of(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inputs with rows in one piece, copied where they are not.

    Kernels take any strides but the last: flash-cpu reads garbage there, the CUDA ones copy one by one.
    """
    return _in_rows(q), _in_rows(k), _in_rows(v)


def _in_rows(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


@torch.library.custom_op("ringattn::attend", mutates_args=())
def attend(q: Tensor, k: Tensor, v: Tensor, handle: int, train: bool) -> tuple[Tensor, Tensor]:
    """out (B, S, H, D) and lse (B, H, S), both contiguous, for the module with this handle."""
    program = _module(handle).traced_program(q, k, v, train)
    out, lse = program.attend(*rows_of(q, k, v))
    return out.contiguous(), lse.contiguous()


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, handle: int, train: bool) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty(q.shape), q.new_empty((batch, heads, length), dtype=wide)


@torch.library.custom_op("ringattn::attend_backward", mutates_args=())
def attend_backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: int,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous, for the module with this handle."""
    program = _module(handle).traced_program(q, k, v, True)
    dq, dk, dv = program.gradients(dout, *rows_of(q, k, v), out, lse, dlse=dlse)
    assert dq is not None
    assert dk is not None
    assert dv is not None
    return dq.contiguous(), dk.contiguous(), dv.contiguous()


@attend_backward.register_fake
def _(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    handle: int,
    dlse: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, handle, _ = inputs
    ctx.save_for_backward(q, k, v, *output)
    ctx.set_materialize_grads(False)  # None, not zeros, of an lse that nothing depends on: it costs a backward
    ctx.handle = handle


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 5
    return (*attend_backward(dout, *ctx.saved_tensors, ctx.handle, dlse), None, None)


attend.register_autograd(_backward, setup_context=_setup_context)
