"""Holds a kernel against float64 on a small input: what a program asks of a kernel that nobody validated here.

The input is one that faults have shown on: more than one tile of rows and a ragged last one, and a backward that is
given the out and LSE of this block *and* another one, merged, as a ring or a pattern does. Right kernels were 2 to
3e-3 off in bf16, the wrong ones that were met 0.13 and more.

Legend: N blocks, M rows, H query heads, K key/value heads, D head dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ringattn.device_errors import is_out_of_memory, is_sticky
from ringattn.dtypes import TORCH_DTYPES
from ringattn.errors import one_line
from ringattn.hardware.kernel_faults import Combination, Figure, Verdict
from ringattn.kernels import math as kernels_math
from ringattn.kernels.contract import BoundDropout, BoundKernel, BoundVarlen, Grads, KernelConfig, Sequences
from ringattn.kernels.registry import KERNELS

from .dropout_check import DROPOUT, exact_results

ROWS = 200  # several tiles of every kernel (they have up to 192 rows), and 8 or 72 rows of a last one
KV_HEADS, GROUP = 2, 2
WINDOW = 77  # its two edges lie in different tiles, and neither at the end of one
SOFTCAP = 2.0  # of logits that are normal: a third of them loses a tenth and more

# Relative 2-norms: 8 roundings of 16-bit kernels and of TF32, whose P and dS are rounded once and twice. Float32
# kernels sum in other orders, and some split each product in three of TF32.
_BOUND = {"bf16": 8 * 2.0**-8, "fp16": 8 * 2.0**-11, "tf32": 8 * 2.0**-11, "fp32": 256 * 2.0**-24}
# Largest difference of the LSE, whose logits are sums in float32 of exact products, but for TF32.
_LSE_BOUND = {"bf16": 2e-3, "fp16": 2e-3, "tf32": 8e-3, "fp32": 2e-5}

_MESSAGE_LIMIT = 300
_HOST = torch.device("cpu")

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Case:
    """Inputs of one block, on the device and in the compute dtype, with what float64 makes of them.

    q, dout, out (N, M, H, D), k, v (N, M, K, D), lse (N, H, M) float32. ``out`` and ``lse`` are the merged ones that
    the backward is given, ``exact`` holds the block's own out and lse, and its dq, dk, dv for the merged ones.
    ``cancelling`` is how much larger dP and delta are than their difference, dS: near 1 but for a handful of keys.
    """

    inputs: tuple[Tensor, Tensor, Tensor]
    dout: Tensor
    out: Tensor
    lse: Tensor
    exact: dict[str, Tensor]
    cancelling: float


def make_case(
    head_dim: int,
    dtype: str,
    *,
    causal: bool,
    grouped: bool,
    rows: int,
    device: torch.device,
    exact_on: torch.device = _HOST,
    seed: int = 0,
    window: int = 0,
    softcap: float = 0.0,
    head_dim_v: int = 0,
) -> Case:
    """Return the case of these shapes, the same for a seed. Float64 runs ``exact_on`` one device or the other."""
    generator = torch.Generator().manual_seed(seed)
    heads, scale = KV_HEADS * (GROUP if grouped else 1), head_dim**-0.5

    def normal(count: int, size: int) -> Tensor:
        """Return values of the compute dtype, in float64."""
        shape = (1, rows, count, size)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(exact_on, TORCH_DTYPES[dtype]).double()

    value_dim = head_dim_v or head_dim
    q, dout = normal(heads, head_dim), normal(heads, value_dim)
    k, v, other_k, other_v = (normal(KV_HEADS, size) for size in (head_dim, value_dim) * 2)
    own_out, own_lse = kernels_math.forward(q, k, v, causal, scale, window, softcap)
    other_out, other_lse = kernels_math.forward(q, other_k, other_v, False, scale, softcap=softcap)
    lse = torch.logaddexp(own_lse, other_lse).float()
    shares = [(part - lse.double()).exp().transpose(1, 2)[..., None] for part in (own_lse, other_lse)]
    out = (shares[0] * own_out + shares[1] * other_out).to(TORCH_DTYPES[dtype])
    grads = kernels_math.backward(dout, q, k, v, out.double(), lse.double(), causal, scale, window, softcap)
    there = [x.to(device, TORCH_DTYPES[dtype]) for x in (q, k, v, dout, out)]
    exact = {"out": own_out, "lse": own_lse, **dict(zip(("dq", "dk", "dv"), grads, strict=True))}
    cancelling = _cancelling(q, k, v, dout, out.double(), lse.double(), causal, scale, window, softcap)
    return Case((there[0], there[1], there[2]), there[3], there[4], lse.to(device), exact, cancelling)


def _cancelling(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float,
    window: int,
    softcap: float,
) -> float:
    """Return the norm of P (|dP| + |delta|) over that of P |dP - delta|."""
    group = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
    scores = torch.einsum("nqhd,nkhd->nhqk", q, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    p = torch.exp(scores - lse[..., None])
    p = p.tril() if causal else p
    p = p.triu(1 - window) if window else p
    dp = torch.einsum("nqhd,nkhd->nhqk", dout, v)
    delta = (dout * out).sum(-1).transpose(1, 2)[..., None]
    return float((p * (dp.abs() + delta.abs())).norm() / (p * (dp - delta)).norm())


def hold(kernel: BoundKernel, case: Case, dtype: str, *, backward: bool, one_query: bool = False) -> Verdict:
    """Return the kernel's results on a case, or on the last query of it; whatever it raises is raised."""
    if backward:
        results = kernel.backward(case.dout, *case.inputs, case.out, case.lse)
        named = dict(zip(("dq", "dk", "dv"), results, strict=True))
    else:
        q, k, v = case.inputs
        forward = kernel.forward
        if one_query:
            q, forward = q[:, -1:], kernel.one_query or kernel.forward
            exact = {"out": case.exact["out"][:, -1:], "lse": case.exact["lse"][:, :, -1:]}
            case = replace(case, exact=exact)
        named = dict(zip(("out", "lse"), forward(q, k, v), strict=True))
    return Verdict(tuple(_figure(name, found, case, dtype) for name, found in named.items()))


def _figure(name: str, found: Tensor, case: Case, dtype: str) -> Figure:
    exact = case.exact[name]
    if found.shape != exact.shape:
        return Figure(name, math.inf, 0.0)
    difference = found.detach().to(exact.device).double() - exact
    if name == "lse":
        return Figure(name, float(difference.abs().max()), _LSE_BOUND[dtype])
    bound = _BOUND[dtype] * (case.cancelling if name in ("dq", "dk") else 1.0)
    return Figure(name, float(difference.norm() / exact.norm()), bound)


def config_of(combination: Combination) -> KernelConfig:
    return KernelConfig(
        causal=combination.causal,
        scale=combination.head_dim**-0.5,
        deterministic=combination.deterministic,
        params=dict(combination.params),
        dtype=combination.dtype,
        window=WINDOW if combination.window else 0,
        softcap=SOFTCAP if combination.softcap else 0.0,
        dropout=DROPOUT if combination.dropout else 0.0,
    )


def check(combination: Combination, case: Case) -> Verdict:
    """Return the verdict on a combination. A kernel's error is one; that of the device or of its loading is raised."""
    kernel, config = KERNELS[combination.kernel], config_of(combination)
    if combination.packed:
        assert kernel.load_varlen is not None, "rejection_reasons refuses it"
        return verdict_on(_as_block(kernel.load_varlen(config)), combination, case)
    if combination.dropout:
        assert kernel.load_dropout is not None, "rejection_reasons refuses it"
        dropping = kernel.load_dropout(config)
        return _verdict_of(lambda: hold_dropping(dropping, config, case, combination))
    return verdict_on(kernel.load(config), combination, case)


def _as_block(varlen: BoundVarlen) -> BoundKernel:
    """Return an entry for packed sequences as a block kernel: of two sequences the second, which begins in a tile."""

    def packed(x: Tensor) -> Tensor:
        return torch.cat((x[0, : ROWS // 2], x[0]))

    def sequences_of(q: Tensor) -> Sequences:
        bounds = (0, ROWS // 2, ROWS // 2 + q.shape[1])
        return Sequences(bounds, q.shape[1], torch.tensor(bounds, dtype=torch.int32, device=q.device))

    def forward(q: Tensor, k: Tensor, v: Tensor, /) -> tuple[Tensor, Tensor]:
        out, lse = varlen.forward(packed(q), packed(k), packed(v), sequences_of(q))
        return out[None, ROWS // 2 :], lse[None, :, ROWS // 2 :]

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, /) -> Grads:
        inputs, lse_HT = (packed(q), packed(k), packed(v)), packed(lse.transpose(1, 2)).T.contiguous()
        dq, dk, dv = varlen.backward(packed(dout), *inputs, packed(out), lse_HT, sequences_of(q))
        return dq[None, ROWS // 2 :], dk[None, ROWS // 2 :], dv[None, ROWS // 2 :]

    return BoundKernel(forward, backward)


def verdict_on(kernel: BoundKernel, combination: Combination, case: Case) -> Verdict:
    """Return the same for a kernel that is loaded."""
    asked = {"backward": combination.backward, "one_query": combination.one_query}
    return _verdict_of(lambda: hold(kernel, case, combination.dtype, **asked))


def hold_dropping(kernel: BoundDropout, config: KernelConfig, case: Case, combination: Combination) -> Verdict:
    """Return the results of a kernel with dropout, for the weights that it kept, and how many these are."""
    exact_on = case.exact["out"].device
    found, exact, share = exact_results(kernel, config, *case.inputs, case.dout, exact_on)
    names = ("dq", "dk", "dv") if combination.backward else ("out", "lse")
    figures = [_figure(name, found[name], replace(case, exact=exact), combination.dtype) for name in names]
    return Verdict((*figures, share))


def _verdict_of(results: Callable[[], Verdict]) -> Verdict:
    try:
        return results()
    except Exception as error:
        if is_out_of_memory(error) or is_sticky(error):
            raise
        return Verdict(message=one_line(f"{type(error).__name__}: {error}")[:_MESSAGE_LIMIT])


def check_all(combinations: Sequence[Combination], device: torch.device) -> dict[Combination, Verdict]:
    """Return the verdict on each, in a thread of its own: a program is made amid whatever its caller does."""
    return _apart(lambda: _check_here(combinations, device), device)


def _check_here(combinations: Sequence[Combination], device: torch.device) -> dict[Combination, Verdict]:
    cases: dict[Combination, Case] = {}
    found = {}
    for asked in combinations:
        shape = replace(
            asked, kernel="", backward=False, deterministic=False, params=(), packed=False, dropout=False,
            one_query=False,
        )  # fmt: skip
        if shape not in cases:
            cases[shape] = case_of(shape, device)
        found[asked] = check(asked, cases[shape])
    return found


def case_of(asked: Combination, device: torch.device) -> Case:
    """Return the case that a combination is checked on."""
    config = config_of(asked)
    return make_case(
        asked.head_dim,
        asked.dtype,
        causal=asked.causal,
        grouped=asked.grouped,
        rows=ROWS,
        device=device,
        window=config.window,
        softcap=config.softcap,
        head_dim_v=asked.head_dim_v,
    )


def _apart(work: Callable[[], Result], device: torch.device) -> Result:
    """Run ``work`` in a new thread and on a stream of its own.

    Autocast, grad mode, torch's function and dispatch modes (FakeTensorMode, a default device, what functorch and
    torch.compile trace with) are the thread's that set them.
    """

    def run() -> Result:
        with ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            if device.type == "cuda":
                stack.enter_context(torch.cuda.device(device))
                stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
                stack.enter_context(torch.cuda.stream(stream))
                stack.callback(stream.synchronize)
            return work()

    with ThreadPoolExecutor(1, thread_name_prefix="ringattn-check") as thread:
        return thread.submit(run).result()
