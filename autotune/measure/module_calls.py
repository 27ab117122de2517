"""Build the module that a plan is measured through, and the calls of it that are timed and checked."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from autotune.accuracy.inputs import Inputs
from ringattn.attention import RingAttention
from ringattn.errors import InputError
from ringattn.kernels.torch_entry import torch_kernel
from ringattn.profile.schema import Profile
from ringattn.runtime.graphed import CALLS_BEFORE_REPLAY, GraphedProgram
from ringattn.workload import Tunables, Workload

Result = TypeVar("Result")


def build_module(
    workload: Workload,
    *,
    profile: Profile | str | None,
    device: torch.device,
    dtype: str | torch.dtype | None = None,
    group: Any = None,
    layout: str = "auto",
) -> RingAttention:
    """Return RingAttention for a workload, planned by ``profile``."""
    if workload.not_probed:  # a row that a profile was given by hand
        raise InputError(f"{workload}: {workload.not_probed}")
    branches = workload.pattern.branches
    return RingAttention(
        workload.heads,
        workload.head_dim,
        num_kv_heads=workload.kv_heads,
        segment_lengths=[b.segment for b in branches] or None,
        dilation_rates=[b.rate for b in branches] or None,
        causal=workload.causal,
        head_offset=workload.pattern.head_offset,
        profile=profile,
        dtype=dtype,
        device=device,
        process_group=group,
        layout=layout,
    )


def settled(call: Callable[[], Result], tunables: Tunables) -> Result:
    """Call until a plan launched from CUDA graphs is replayed, other plans once; return what the last call did."""
    for _ in range(CALLS_BEFORE_REPLAY if tunables.launch == "graph" else 0):
        call()
    return call()


def graph_bytes(module: RingAttention) -> int:
    """Return the bytes that the CUDA graphs of a module keep between calls."""
    programs = module._programs.values()
    return sum(program.held_bytes() for program in programs if isinstance(program, GraphedProgram))


def torch_name(workload: Workload, inputs: Inputs) -> str:
    """Return the kernel that torch's own function runs for dense attention on one rank; empty for any other."""
    if not workload.pattern.dense or workload.world > 1 or workload.packed or workload.decode:
        return ""
    tensors = (x.detach().requires_grad_(workload.train) for x in (inputs.q, inputs.k, inputs.v))
    return torch_kernel(workload.causal, *tensors)


def with_documents(module: Callable[..., Any], inputs: Inputs) -> Callable[..., Any]:
    """Return the module as it is called on such inputs."""
    return module if inputs.documents is None else partial(module, cu_seqlens=inputs.documents)


def decoding(module: RingAttention, inputs: Inputs) -> Callable[[], tuple[Tensor, Tensor]]:
    """Return a step of decoding: the last query of each sequence over a cache of all its keys, out and lse."""
    batch, length = inputs.k.shape[:2]
    cache, last = module.kv_cache(batch, length, dtype=inputs.k.dtype), inputs.q[:, -1:]
    cache.append(inputs.k, inputs.v)
    return lambda: module.decode(last, cache, return_lse=True)  # type: ignore[return-value]


def caller(module: RingAttention, inputs: Inputs, workload: Workload) -> Callable[[], None]:
    """Return the call that is timed: one forward, in training with the backward to q, k and v, or a decoding step."""
    if workload.decode:
        decode = decoding(module, inputs)

        def step_once() -> None:
            with torch.no_grad():
                decode()

        return step_once
    attend = with_documents(module, inputs)
    if not workload.train:

        def infer() -> None:
            with torch.no_grad():
                attend(inputs.q, inputs.k, inputs.v)

        return infer
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))

    def step() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), inputs.dout)

    return step


def results_of(
    module: Callable[..., Any],
    inputs: Inputs,
    workload: Workload,
    before_backward: Callable[[], None] = lambda: None,
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return out, lse and the gradients (none for inference), those of training on the path that is timed.

    A call that returns the lse is another one to autograd, which differentiates it, too. Decoding: of the last row.
    ``before_backward`` is called between the two passes.
    """
    if workload.decode:
        assert isinstance(module, RingAttention)
        with torch.no_grad():
            out, lse = decoding(module, inputs)()
        return out, lse, ()
    module = with_documents(module, inputs)
    if not workload.train:
        with torch.no_grad():
            out, lse = module(inputs.q, inputs.k, inputs.v, return_lse=True)
        return out, lse, ()
    q, k, v = (x.detach().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    out = module(q, k, v)
    before_backward()
    grads = torch.autograd.grad(out, (q, k, v), inputs.dout)
    _, lse = module(q, k, v, return_lse=True)
    return out.detach(), lse.detach(), grads
