"""Runs the "triton" kernel under Triton's interpreter, in a process of its own: the switch is read at import.

``python interpreted_triton.py CALLS RESULTS``: CALLS is a ``torch.save`` of a list of ``Call``, RESULTS of the
(out, lse, dq, dk, dv) of each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Call(NamedTuple):
    """One forward, then a backward against ``out`` and ``lse`` if given, else against the forward's own.

    ``limits`` replaces constants of ``kernels.triton``, or what its functions give; ``grads`` are written into.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    config: dict[str, Any]
    out: Tensor | None = None
    lse: Tensor | None = None
    grads: tuple[Tensor, Tensor, Tensor] | None = None
    limits: dict[str, Any] | None = None


def run_interpreted(calls: list[Call], folder: Path) -> list[tuple[Tensor, ...]]:
    """The results of ``calls``, computed on the CPU by the real kernels in another process."""
    given, made = folder / "calls.pt", folder / "results.pt"
    torch.save([tuple(call) for call in calls], given)
    root = Path(__file__).parents[3]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, __file__, given, made], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    results: list[tuple[Tensor, ...]] = torch.load(made)
    return results


def _run(call: Call) -> tuple[Tensor, ...]:
    from ringattn.kernels import triton as kernels_triton
    from ringattn.kernels.contract import KernelConfig

    limits = call.limits or {}
    usual = {name: getattr(kernels_triton, name) for name in limits}
    for name, value in limits.items():
        setattr(kernels_triton, name, (lambda *_, fixed=value: fixed) if callable(usual[name]) else value)
    kernel = kernels_triton.load(KernelConfig(**call.config))
    out, lse = kernel.forward(call.q, call.k, call.v)
    against = out if call.out is None else call.out, lse if call.lse is None else call.lse
    grads = kernel.backward(call.dout, call.q, call.k, call.v, *against, grads=call.grads)
    for name, value in usual.items():
        setattr(kernels_triton, name, value)
    return (out, lse, *grads)


if __name__ == "__main__":
    torch.save([_run(Call(*call)) for call in torch.load(sys.argv[1])], sys.argv[2])
