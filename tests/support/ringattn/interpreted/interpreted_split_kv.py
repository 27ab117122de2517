"""Runs "split-kv" under Triton's interpreter, in a process of its own; see ``interpreted_triton``.

``python interpreted_split_kv.py CALLS RESULTS``: a ``torch.save`` of a list of ``CachedCall``, and of (out, lse) each.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from interpreted_triton import interpreted, patch_once
from torch import Tensor


class CachedCall(NamedTuple):
    """q (B, Sq, H, D) over a cache k, v (B, S, K, D); ``rows`` are the arguments of ``CachedRows``, None a full block.

    ``limits`` replaces constants of ``kernels.split_kv``, or what its functions give.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    config: dict[str, Any]
    rows: dict[str, Any] | None = None
    pattern: tuple[list[int], list[int], str] | None = None
    limits: dict[str, Any] | None = None


def run_interpreted(calls: list[CachedCall], folder: Path) -> list[tuple[Tensor, Tensor]]:
    """(out, lse) of each call, computed on the CPU by the real kernels in another process."""
    given, made = folder / "calls.pt", folder / "results.pt"
    torch.save([tuple(call) for call in calls], given)
    interpreted(__file__, given, made)
    results: list[tuple[Tensor, Tensor]] = torch.load(made)
    return results


def _run(call: CachedCall) -> tuple[Tensor, Tensor]:
    from ringattn import Pattern
    from ringattn.kernels.contract import CachedRows, KernelConfig
    from ringattn.kernels.own import split_kv

    limits = call.limits or {}
    usual = {name: getattr(split_kv, name) for name in limits}
    for name, value in limits.items():
        setattr(split_kv, name, value)
    kernel = split_kv.load(KernelConfig(**call.config))
    if call.rows is None:
        result = kernel.forward(call.q, call.k, call.v)
    else:
        assert kernel.cached is not None
        pattern = Pattern() if call.pattern is None else Pattern.of(*call.pattern)
        result = kernel.cached(call.q, call.k, call.v, CachedRows(pattern, call.k.shape[1], **call.rows))
    for name, value in usual.items():
        setattr(split_kv, name, value)
    return result


if __name__ == "__main__":
    patch_once()
    torch.save([_run(CachedCall(*call)) for call in torch.load(sys.argv[1])], sys.argv[2])
