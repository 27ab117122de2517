"""Runs the "triton" kernel under Triton's interpreter, in a process of its own: the switch is read at import.

``python interpreted_triton.py CALLS RESULTS``: CALLS is a ``torch.save`` of a list of ``Call``, RESULTS of the
(out, lse, dq, dk, dv) of each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
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


def interpreted(script: str, *arguments: object) -> str:
    """What a script printed that ran under the interpreter; it calls ``patch_once`` before any kernel."""
    here = Path(__file__).parent
    paths = os.pathsep.join(map(str, (here.parents[3], here.parent, here)))
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *map(str, arguments)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-4000:]
    return run.stdout


def patch_once() -> None:
    """Have Triton's interpreter replace the functions of ``triton.language`` once, not in every function of a kernel.

    That was half of its time. Nothing but kernels may use ``triton.language`` in this process from now on. Sums of
    int32 are not made in int64 beside it, since nothing looks at those outside of Triton's debug mode.
    """
    from triton.runtime import interpreter

    patch, nothing_to_restore = interpreter._patch_lang, interpreter._LangPatchScope()
    patched: set[object] = set()

    def patch_new(fn: Any) -> Any:
        if fn not in patched:
            patched.add(fn)
            used = (interpreter.tl, interpreter.tl.core)
            languages = frozenset(name for name, x in fn.__globals__.items() if any(x is each for each in used))
            if languages not in patched:
                patched.add(languages)
                patch(fn)
        return nothing_to_restore

    interpreter._patch_lang = patch_new
    np_dtype, known = interpreter._get_np_dtype, {}

    def np_dtype_once(dtype: Any) -> Any:
        """It makes a table of all dtypes, each time: a tenth of the time."""
        if (name := str(dtype)) not in known:
            known[name] = np_dtype(dtype)
        return known[name]

    interpreter._get_np_dtype = np_dtype_once
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = replace(builder.options, sanitize_overflow=False)


def run_interpreted(calls: list[Call], folder: Path) -> list[tuple[Tensor, ...]]:
    """The results of ``calls``, computed on the CPU by the real kernels in another process."""
    given, made = folder / "calls.pt", folder / "results.pt"
    torch.save([tuple(call) for call in calls], given)
    interpreted(__file__, given, made)
    results: list[tuple[Tensor, ...]] = torch.load(made)
    return results


def _run(call: Call) -> tuple[Tensor, ...]:
    from ringattn.kernels.contract import KernelConfig
    from ringattn.kernels.own import triton as kernels_triton

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
    patch_once()
    torch.save([_run(Call(*call)) for call in torch.load(sys.argv[1])], sys.argv[2])
