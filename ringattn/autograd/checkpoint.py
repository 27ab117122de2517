"""What a training forward leaves for its backward: the four checkpoint modes, each a pair of functions.

| mode | kept on the device | paid in the backward |
|---|---|---|
| none | q, k, v, out, lse and the gathered rows | nothing |
| selective | q, k, v, out, lse | rows are gathered again |
| full | q, k, v | the forward runs again |
| offload | nothing: q, k, v, out, lse wait in pinned host memory | the copy back |
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from torch import Tensor

from ringattn.errors import DeviceError, RingAttentionError, one_line
from ringattn.runtime.program import Grads, Kept, Program, Wanted

if TYPE_CHECKING:
    from ringattn.distributed.program import RingProgram

AnyProgram: TypeAlias = "Program | RingProgram"


class OutputGrads(NamedTuple):
    """The gradients of out and lse; None where nothing depends on one."""

    dout: Tensor | None
    dlse: Tensor | None


class Saved(NamedTuple):
    """What autograd keeps, and what is kept elsewhere (offload)."""

    tensors: tuple[Tensor, ...]
    elsewhere: HostCopies | None = None


class Mode(NamedTuple):
    """``forward`` gives out, lse and what to save; ``backward`` takes their gradients, what was saved, and which
    gradients to give."""

    forward: Callable[[AnyProgram, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Saved]]
    backward: Callable[[AnyProgram, OutputGrads, Sequence[Tensor], HostCopies | None, Wanted], Grads]


def _keep_all(program: AnyProgram, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
    kept: Kept = []
    out, lse = program.attend(q, k, v, kept)
    return out, lse, Saved((q, k, v, out, lse, *kept))


def _keep_selected(program: AnyProgram, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
    out, lse = program.attend(q, k, v)
    return out, lse, Saved((q, k, v, out, lse))


def _keep_inputs(program: AnyProgram, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
    out, lse = program.attend(q, k, v)
    return out, lse, Saved((q, k, v))


def _keep_on_host(program: AnyProgram, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
    out, lse = program.attend(q, k, v)
    return out, lse, Saved((), HostCopies.of((q, k, v, out, lse)))


def _from_saved(
    program: AnyProgram,
    output_grads: OutputGrads,
    saved: Sequence[Tensor],
    elsewhere: HostCopies | None,
    wanted: Wanted,
) -> Grads:
    q, k, v, out, lse, *kept = saved
    return program.gradients(output_grads.dout, q, k, v, out, lse, kept, wanted, output_grads.dlse)


def _from_rerun(
    program: AnyProgram,
    output_grads: OutputGrads,
    saved: Sequence[Tensor],
    elsewhere: HostCopies | None,
    wanted: Wanted,
) -> Grads:
    q, k, v = saved
    out, lse = program.attend(q, k, v)
    return program.gradients(output_grads.dout, q, k, v, out, lse, wanted=wanted, dlse=output_grads.dlse)


def _from_host(
    program: AnyProgram,
    output_grads: OutputGrads,
    saved: Sequence[Tensor],
    elsewhere: HostCopies | None,
    wanted: Wanted,
) -> Grads:
    assert elsewhere is not None
    q, k, v, out, lse = elsewhere.fetch()
    return program.gradients(output_grads.dout, q, k, v, out, lse, wanted=wanted, dlse=output_grads.dlse)


MODES = {
    "none": Mode(_keep_all, _from_saved),
    "selective": Mode(_keep_selected, _from_saved),
    "full": Mode(_keep_inputs, _from_rerun),
    "offload": Mode(_keep_on_host, _from_host),
}


@dataclass(frozen=True, slots=True)
class HostCopies:
    """Tensors copied to pinned host memory on a stream of their own, beside whatever runs next.

    The originals may be freed meanwhile (the allocator waits for the copy), but not written to: that is noticed
    as autograd notices it for the tensors it saves.
    """

    copies: tuple[Tensor, ...]
    originals: tuple[tuple[weakref.ref[Tensor], int], ...]
    device: torch.device

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> HostCopies:
        device = tensors[0].device
        stream = _copy_stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        copies = []
        with torch.cuda.stream(stream):
            for tensor in tensors:
                copy = _pinned_like(tensor)
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(stream)
                copies.append(copy)
        originals = tuple((weakref.ref(tensor), tensor._version) for tensor in tensors)
        return cls(tuple(copies), originals, device)

    def fetch(self) -> list[Tensor]:
        for original, version in self.originals:
            tensor = original()
            if tensor is not None and tensor._version != version:
                raise RingAttentionError(
                    "a tensor that the backward needs was modified in place after the forward; "
                    "clone it before, or use another checkpoint than 'offload'"
                )
        stream = _copy_stream(self.device)
        current = torch.cuda.current_stream(self.device)
        stream.wait_stream(current)  # memory handed out on the copy stream may still be in use on the current one
        with torch.cuda.stream(stream):
            fetched = [copy.to(self.device, non_blocking=True) for copy in self.copies]
        current.wait_stream(stream)
        for tensor in fetched:
            tensor.record_stream(current)
        return fetched


def _pinned_like(tensor: Tensor) -> Tensor:
    """Pinned host memory for a tensor; DeviceError where there is none to be had."""
    try:
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        raise DeviceError(
            f"checkpoint 'offload' wants {tensor.nbytes} bytes of pinned host memory, which cannot be had "
            f"({one_line(str(error).partition(chr(10))[0])}); use another checkpoint"
        ) from error


_copy_streams: dict[torch.device, torch.cuda.Stream] = {}


def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    stream = _copy_streams.get(device)
    if stream is None:
        stream = _copy_streams[device] = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return stream
