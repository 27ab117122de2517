"""Saves for the backward what the plan's checkpoint says, and restores it there.

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
from ringattn.runtime.program import Kept, Program

if TYPE_CHECKING:
    from ringattn.distributed.program import RingProgram

AnyProgram: TypeAlias = "Program | RingProgram"


class Saved(NamedTuple):
    """Tensors that autograd keeps, and those kept on the host (offload)."""

    tensors: tuple[Tensor, ...]
    on_host: HostCopies | None = None


class Mode(NamedTuple):
    """One checkpoint mode.

    ``forward`` returns out, lse and what to save of a call with q, k and v; ``restore`` returns q, k, v, out, lse and
    gathered rows from what was saved.
    """

    forward: Callable[[AnyProgram, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Saved]]
    restore: Callable[[AnyProgram, Sequence[Tensor], HostCopies | None], Sequence[Tensor]]


def _keep_all(program: AnyProgram, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
    kept: Kept = []
    out, lse = program.attend(q, k, v, kept)
    return out, lse, Saved((q, k, v, out, lse, *kept))


def _keep_results(program: AnyProgram, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
    out, lse = program.attend(q, k, v)
    return out, lse, Saved((q, k, v, out, lse))


def _keep_inputs(program: AnyProgram, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
    out, lse = program.attend(q, k, v)
    return out, lse, Saved((q, k, v))


def _keep_on_host(program: AnyProgram, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
    out, lse = program.attend(q, k, v)
    return out, lse, Saved((), HostCopies.of((q, k, v, out, lse)))


def _from_saved(program: AnyProgram, saved: Sequence[Tensor], on_host: HostCopies | None) -> Sequence[Tensor]:
    return saved


def _from_rerun(program: AnyProgram, saved: Sequence[Tensor], on_host: HostCopies | None) -> Sequence[Tensor]:
    q, k, v = saved
    return q, k, v, *program.attend(q, k, v)


def _from_host(program: AnyProgram, saved: Sequence[Tensor], on_host: HostCopies | None) -> Sequence[Tensor]:
    assert on_host is not None
    return on_host.fetch()


MODES = {
    "none": Mode(_keep_all, _from_saved),
    "selective": Mode(_keep_results, _from_saved),
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
    """Allocate pinned host memory for a tensor; DeviceError where there is none to be had."""
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
