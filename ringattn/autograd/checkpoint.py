"""Saves for the backward what the plan's checkpoint says, and restores it there.

| mode | kept on the device | paid in the backward |
|---|---|---|
| none | q, k, v, out, lse and the gathered rows | nothing |
| selective | q, k, v, out, lse | rows are gathered again |
| full | q, k, v | the forward runs again |
| offload | nothing: q, k, v, out, lse wait in pinned host memory | the copy back |

Of a plan with dropout each keeps the state of its kernel as well, and full that of torch's random numbers, by which the
forward that runs again drops the same.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from ringattn.errors import DeviceError, RingAttentionError, one_line
from ringattn.random_state import RandomState
from ringattn.runtime.executor import Executor, Kept


class Saved(NamedTuple):
    """Tensors that autograd keeps for a backward, and those kept on the host (offload)."""

    tensors: tuple[Tensor, ...]
    on_host: HostCopies | None = None
    random: RandomState | None = None


def checkpoint_of(program: Executor) -> str:
    return program.plan.tunables.checkpoint


def forward(program: Executor, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Saved]:
    """Run the forward of a call; return out, lse and what to keep for its backward."""
    mode = checkpoint_of(program)
    random = RandomState.now(q.device) if program.draws and mode == "full" else None
    rows: Kept | None = [] if mode == "none" or program.draws else None
    out, lse = program.attend(q, k, v, rows)
    if mode == "full":
        return out, lse, Saved((q, k, v), random=random)
    if mode == "offload":
        return out, lse, Saved(tuple(rows or ()), HostCopies.of((q, k, v, out, lse)))
    return out, lse, Saved((q, k, v, out, lse, *(rows or ())))


def restore(
    program: Executor, tensors: Sequence[Tensor], on_host: HostCopies | None, random: RandomState | None
) -> Sequence[Tensor]:
    """Return q, k, v, out, lse and gathered rows of a forward from what was kept of it."""
    if on_host is not None:
        return *on_host.fetch(), *tensors
    if checkpoint_of(program) != "full":
        return tensors
    q, k, v = tensors
    if random is None:
        return q, k, v, *program.attend(q, k, v)
    state: Kept = []
    with random.again():
        out, lse = program.attend(q, k, v, state)
    return q, k, v, out, lse, *state


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
