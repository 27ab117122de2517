"""Registers the module's two operators for torch.compile and torch.export, so that no graph breaks around it.

Eager calls take the autograd Function or an operator of torch instead: a custom op costs three times as much host time
as the Function (22 against 7 microseconds a call on a CPU).

A graph holds no Python objects, so the operators know a module by a name. Under torch.compile that is the digest of its
configuration: modules of one configuration share it, so that the layers of a model share what was compiled for the
first of them, and a cached graph means the same in every process. Under torch.export it is the configuration itself.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ringattn.errors import RingAttentionError
from ringattn.planning.module_setup import say_once
from ringattn.planning.table import ModuleShape
from ringattn.runtime.graphed import GraphedProgram
from ringattn.runtime.packed.documents import TENSORS_ALONE, Extent, extent_of

from .checkpoint import checkpoint_of
from .exported import ExportedAttention, configuration_text
from .function import unit_stride_rows

if TYPE_CHECKING:
    from ringattn.planning.table import ModuleShape, PlanTable
    from ringattn.runtime.executor import Executor

# Shapes whose program or runner is remembered; who meets more forgets them all and looks them up again.
MOST_SHAPES = 4096

_lock = threading.Lock()
_texts: dict[Hashable, str] = {}
_modules: dict[str, weakref.WeakSet[Module]] = {}
_loaded: dict[tuple[str, torch.device], ExportedAttention] = {}


class ProgramSource(Protocol):
    """Source of the operators' programs: a module, or what stands for it in a loaded program."""

    traced: dict[Any, Any]

    def program_for(self, q: Tensor, k: Tensor, v: Tensor, train: bool, extent: Extent, /) -> Executor: ...


class Module(ProgramSource, Protocol):
    """Protocol of ``RingAttention``, which imports this file."""

    scale: float
    device: torch.device
    shape: ModuleShape
    digest: str
    configuration: str

    @property
    def plan(self) -> PlanTable: ...


def register(module: Module) -> tuple[str, str]:
    """Return the digest of a module's configuration, known while it or an equal one lives, and the configuration."""
    question = (module.plan.question, module.scale)
    with _lock:
        text = _texts.get(question)
        if text is None:
            text = _texts[question] = configuration_text(module.plan, module.scale)
        digest = f"{hashlib.sha256(text.encode()).hexdigest()[:16]}@{module.device}"
        _modules.setdefault(digest, weakref.WeakSet()).add(module)
    return digest, text


def _program_source(module: str, device: torch.device) -> ProgramSource:
    if not module.startswith("{"):
        source = next(iter(_modules.get(module, ())), None)
        if source is None:
            raise RingAttentionError(
                "a compiled graph runs a RingAttention that this process does not hold; build the module and keep it, "
                "or save the model with torch.export"
            )
        return source
    loaded = _loaded.get((module, device))
    if loaded is None:
        with _lock:
            loaded = _loaded[module, device] = ExportedAttention(module, device)
    return loaded


def traced_program(
    source: ProgramSource, q: Tensor, k: Tensor, v: Tensor, train: bool, extent: Extent = TENSORS_ALONE
) -> Executor:
    """Return ``program_for``, remembered, for a caller that decides itself what is kept for the backward."""
    key = (q.shape, k.shape, v.shape, q.dtype, k.dtype, v.dtype, q.device, k.device, v.device, train, extent)
    program: Executor | None = source.traced.get(key)
    if program is None:
        if len(source.traced) >= MOST_SHAPES:
            source.traced.clear()
        program = source.program_for(q, k, v, train, extent)
        if isinstance(program, GraphedProgram):
            program = program.without_graphs()  # a compiled graph has its own way to launch
        source.traced[key] = program
        if train and not program.plan.tunables.keeps_inputs_and_results:
            say_once(
                logging.WARNING,
                f"{ModuleShape.of(program.plan.workload)}: under torch.compile and torch.func the plan does not decide "
                f"what is kept for the backward: its checkpoint {checkpoint_of(program)} is not followed",
            )
    return program


def _extent(documents: Tensor | None, padded: bool) -> Extent:
    if documents is None:
        return TENSORS_ALONE
    return extent_of(None, *((None, documents) if padded else (documents, None)))


@torch.library.custom_op("ringattn::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    module: str,
    train: bool,
    documents: Tensor | None = None,
    padded: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return out (B, S, H, D) and lse (B, H, S), contiguous, of the module with this digest or configuration.

    ``documents`` are cu_seqlens, or the lengths of sequences where these are ``padded``.
    """
    program = traced_program(_program_source(module, q.device), q, k, v, train, _extent(documents, padded))
    out, lse = program.attend(*unit_stride_rows(q, k, v))
    return out.contiguous(), lse.contiguous()


@attend.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    module: str,
    train: bool,
    documents: Tensor | None = None,
    padded: bool = False,
) -> tuple[Tensor, Tensor]:
    batch, length, heads, _ = q.shape
    wide = torch.float64 if q.dtype is torch.float64 else torch.float32
    return q.new_empty((batch, length, heads, v.shape[3])), q.new_empty((batch, heads, length), dtype=wide)


@torch.library.custom_op("ringattn::attend_backward", mutates_args=())
def attend_backward(
    dout: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    module: str,
    dlse: Tensor | None = None,
    documents: Tensor | None = None,
    padded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, contiguous."""
    program = traced_program(_program_source(module, q.device), q, k, v, True, _extent(documents, padded))
    dq, dk, dv = program.gradients(dout, (*unit_stride_rows(q, k, v), out, lse), dlse=dlse)
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
    module: str,
    dlse: Tensor | None = None,
    documents: Tensor | None = None,
    padded: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, module, _, documents, padded = inputs
    ctx.save_for_backward(q, k, v, *output, documents)
    ctx.set_materialize_grads(False)  # None, not zeros, of an lse that nothing depends on: it costs a backward
    ctx.module, ctx.padded = module, padded


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None and dlse is None:
        return (None,) * 7
    *saved, documents = ctx.saved_tensors
    return (*attend_backward(dout, *saved, ctx.module, dlse, documents, ctx.padded), *(None,) * 4)


attend.register_autograd(_backward, setup_context=_setup_context)
