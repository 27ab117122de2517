"""Our Triton kernel without a GPU: its numbers under Triton's interpreter, its table of tiles, its reasons.

What it computes on a GPU is in test_kernels_triton_gpu.py. Bfloat16 is there alone: the interpreter multiplies the
bits of bfloat16 tensors as integers.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from interpreted_triton import Call, run_interpreted
from oracle import laid_out
from torch import Tensor

from ringattn.errors import PlanError
from ringattn.kernels.contract import KernelConfig, KernelNeed
from ringattn.kernels.own.triton import load, params, reasons
from ringattn.kernels.own.triton_tiles import SMALLEST_BLOCK, Step, Tile, parse, tiles
from ringattn.kernels.registry import KERNELS

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs the triton package")

HOPPER = KernelNeed("nvidia", "sm_90", "bf16", 128, 16, 16, 4096, 1, causal=True, backward=True)
TILES = {"forward_tile": "32x16-w4-s1", "dq_tile": "16x32-w4-s1", "dkdv_tile": "32x16-w4-s1"}
EXACT = {torch.float32: 1e-6, torch.float16: 1e-3}  # relative 2-norms; measured 3e-7 and 3e-4


# --- numbers -----------------------------------------------------------------------------------------------------


def call(
    rows: int,
    heads: int = 2,
    kv_heads: int = 2,
    head_dim: int = 16,
    blocks: int = 1,
    keys: int | None = None,
    dtype: torch.dtype = torch.float32,
    causal: bool = True,
    scale: float = 0.3,
    layout: str = "plain",
    size: float = 1.0,
    chosen: dict[str, str] = TILES,
    window: int = 0,
    softcap: float = 0.0,
    **rest: Any,
) -> Call:
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, heads), (keys or rows, kv_heads), (keys or rows, kv_heads), (rows, heads)]
    q, k, v, dout = (torch.randn(blocks, m, h, head_dim, generator=generator).to(dtype) for m, h in shapes)
    config = {"causal": causal, "scale": scale, "params": chosen, "window": window, "softcap": softcap}
    return Call(*(laid_out(x, layout) for x in (q * size, k * size, v)), dout, config, **rest)


def merged(made: Call) -> Call:
    """The call with the LSE and out of a longer row: as if other keys had been seen elsewhere."""
    out, lse, *_ = exact(made)
    return made._replace(out=(out * 0.7).to(made.q.dtype), lse=torch.logaddexp(lse, lse + 0.3).float())


def writing_in_place(made: Call) -> Call:
    heads_first = [laid_out(torch.full_like(x, math.nan), "heads_first") for x in (made.q, made.k, made.v)]
    return made._replace(grads=tuple(heads_first))


def exact(made: Call) -> tuple[Tensor, ...]:
    """out, lse, dq, dk and dv by float64 matrix products."""
    kernel = KERNELS["math"].load(KernelConfig(**made.config | {"params": {}}))
    q, k, v, dout = (x.double() for x in (made.q, made.k, made.v, made.dout))
    out, lse = kernel.forward(q, k, v)
    against = (out, lse) if made.out is None or made.lse is None else (made.out.double(), made.lse.double())
    return (out, lse, *kernel.backward(dout, q, k, v, *against))


def _terms(made: Call) -> float:
    """The size of the terms of a gradient that is 0, as one row's dq is: what remains is two sums' rounding."""
    return made.dout.double().norm().item() * made.v.double().norm().item() * made.config["scale"]


CALLS = {
    "causal": call(37),
    "one row": call(1),
    "rows of exactly a tile": call(32),
    "keys in larger tiles than rows": call(50, chosen=dict.fromkeys(TILES, "16x64-w4-s1")),
    "rows in larger tiles than keys": call(50, chosen=dict.fromkeys(TILES, "64x16-w4-s1")),
    "full, more keys than rows": call(20, keys=53, causal=False),
    "full, fewer keys than rows": call(53, keys=7, causal=False),
    "grouped heads": call(20, 4, 2, blocks=2),
    "grouped heads, full": call(33, 4, 1, keys=18, causal=False),
    "head_dim below the tile": call(20, head_dim=20, causal=False),
    "odd head_dim": call(20, head_dim=7),
    "heads first": call(30, blocks=2, layout="heads_first"),
    "packed": call(30, layout="packed"),
    "every second row": call(30, layout="every_second", causal=False),
    "unaligned rows": call(30, layout="wide_rows"),
    "negative scale": call(40, scale=-0.4),
    "scale of 0": call(20, scale=0.0),
    "sections of pairs": call(20, 3, 3, blocks=2, limits={"_section": 4}),
    "rows far apart": call(40, limits={"_MAX_ROW_STRIDE": 0}),
    "half precision": call(20, 2, 1, head_dim=24, blocks=2, dtype=torch.float16),
    "half precision, full": call(24, keys=39, dtype=torch.float16, causal=False),
    "merged": merged(call(30, 2, 1)),
    "merged, half precision": merged(call(30, 2, 1, dtype=torch.float16)),
    "expanded gradient": call(20)._replace(dout=torch.ones(()).expand(1, 20, 2, 16)),
    "gradients in place": writing_in_place(call(12, 4, 2)),
    "tiles of their own": call(40, chosen={}),
    "window within a tile": call(50, window=5),
    "window of one key": call(40, 1, 1, window=1),
    "window of a tile": call(90, 1, 1, window=32),
    "window over tiles, keys in larger ones": call(150, 1, 1, window=70, chosen=dict.fromkeys(TILES, "16x64-w4-s1")),
    "window over tiles, rows in larger ones": call(150, 1, 1, window=33, chosen=dict.fromkeys(TILES, "64x16-w4-s1")),
    "window beyond the rows": call(40, 1, 1, window=64),
    "window, grouped heads": call(40, 2, 1, blocks=2, window=18),
    "window, half precision": call(50, 2, 1, dtype=torch.float16, window=18),
    "window, merged": merged(call(50, 2, 1, window=18)),
    "softcap": call(40, 1, 1, softcap=0.5),
    "softcap far from the logits": call(40, 1, 1, softcap=50.0),
    "softcap, full": call(40, 1, 1, keys=53, causal=False, softcap=1.0),
    "softcap, negative scale": call(40, 1, 1, scale=-0.4, softcap=1.0),
    "softcap, scale of 0": call(20, 1, 1, scale=0.0, softcap=1.0),
    "softcap and window, half precision": call(50, 2, 1, dtype=torch.float16, softcap=2.0, window=20),
    "softcap and window, merged": merged(call(50, 2, 1, softcap=2.0, window=20)),
}
_NEGATIVE = -3e38  # times 1e3 it is -inf in float32


def _some_keys_at_minus_infinity() -> Call:
    made = call(40, 1, 1, causal=False, scale=1.0)
    made.q.round_(), made.k.round_()  # so that no order of additions rounds a logit
    made.k[:, :20, :, 0] = _NEGATIVE
    made.q[:, :, :, 0] = 1e3
    return made


def _whole_numbers(q_factor: float, k_factor: float, dtype: torch.dtype = torch.float32) -> Call:
    """Products and sums of small whole numbers times powers of two: no order of additions rounds a logit.

    With random numbers the logits of two passes differ by more than 1 from 1e7 on, and no kernel that recomputes them
    in float32 can be right: which of them were, depended on the machine's BLAS.
    """
    made = call(48, scale=0.25, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    while True:
        q, k = (torch.randint(-16, 17, made.q.shape, generator=generator).to(dtype) for _ in range(2))
        first, second = torch.einsum("bihd,bjhd->bhij", q.double(), k.double()).topk(2).values.unbind(-1)
        if bool((first > second).all()):  # a tie's ln 2 is lost in the rounding of so large an LSE
            return made._replace(q=q * q_factor, k=k * k_factor)


EXTREME = {
    # one key takes all: every weight is 0 or 1
    "logits of 1e4": _whole_numbers(2.0**7, 1.0),
    "logits of 1e10": _whole_numbers(2.0**14, 2.0**13),
    "logits of 1e6 in half precision": _whole_numbers(2.0**7, 2.0**7, torch.float16),
    "some keys at -inf": _some_keys_at_minus_infinity(),
    "all keys at -inf": _some_keys_at_minus_infinity(),
    "not a number": call(40),
    "saw nothing anywhere": merged(call(40)),
}
EXTREME["all keys at -inf"].k[..., 0] = _NEGATIVE
EXTREME["not a number"].q[0, 20, 0, 3] = math.nan
_lse = EXTREME["saw nothing anywhere"].lse
assert _lse is not None
_lse[0, 0, 5] = -math.inf


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, ...]]:
    calls = CALLS | EXTREME
    results = run_interpreted(list(calls.values()), tmp_path_factory.mktemp("interpreted"))
    return dict(zip(calls, results, strict=True))


@needs_triton
@pytest.mark.parametrize("name", CALLS)
def test_it_computes_attention_and_its_gradients(name: str, found: dict[str, tuple[Tensor, ...]]) -> None:
    made = CALLS[name]
    results, expected = found[name], exact(made)
    for x, x64, like in zip(results, expected, (made.q, expected[1], made.q, made.k, made.v), strict=True):
        assert x.shape == like.shape
        if x is not results[1]:
            assert x.dtype is made.q.dtype
            size = norm if (norm := x64.norm().item()) > 1e-9 else _terms(made)
            assert (x.double() - x64).norm() <= EXACT[made.q.dtype] * max(size, 1e-3)
    lse, lse64 = results[1], expected[1]
    assert lse.dtype is torch.float32
    assert bool(((lse - lse64).abs() <= 2e-6 * (1 + lse64.abs())).all())


@needs_triton
@pytest.mark.parametrize("name", ["logits of 1e4", "logits of 1e10", "logits of 1e6 in half precision"])
def test_huge_logits_choose_one_key(name: str, found: dict[str, tuple[Tensor, ...]]) -> None:
    made = EXTREME[name]
    (out, lse, dq, dk, dv), expected = found[name], exact(made)
    precision = EXACT[made.q.dtype]
    assert (out.double() - expected[0]).norm() <= precision * expected[0].norm()
    assert (lse - expected[1]).abs().max() <= 2e-6 * expected[1].abs().max()
    assert (dv.double() - expected[4]).norm() <= precision * expected[4].norm()
    # the true dq and dk are 0: what remains is the rounding of one product against another, times the other operand
    rounding = 4 * precision * made.dout.double().norm() * made.v.double().norm() * 0.25
    assert dq.double().norm() <= rounding * made.k.double().norm()
    assert dk.double().norm() <= rounding * made.q.double().norm()


@needs_triton
def test_keys_at_minus_infinity_weigh_nothing(found: dict[str, tuple[Tensor, ...]]) -> None:
    out, lse, dq, dk, dv = found["some keys at -inf"]
    expected = exact(EXTREME["some keys at -inf"])
    assert (out.double() - expected[0]).norm() <= 1e-6 * expected[0].norm()
    assert not lse.isnan().any()
    assert (dv.double() - expected[4]).norm() <= 1e-6 * expected[4].norm()
    assert bool((dv[:, :20] == 0).all())
    assert not any(grad.isnan().any() for grad in (dq, dk))


@needs_triton
def test_a_row_of_minus_infinities_gives_0_and_minus_infinity(found: dict[str, tuple[Tensor, ...]]) -> None:
    out, lse, *grads = found["all keys at -inf"]
    assert bool((out == 0).all())
    assert bool(lse.isneginf().all())
    assert all(bool((grad == 0).all()) for grad in grads)


@needs_triton
def test_a_row_that_saw_nothing_anywhere_has_no_gradient(found: dict[str, tuple[Tensor, ...]]) -> None:
    dq = found["saw nothing anywhere"][2]
    assert bool((dq[0, 5, 0] == 0).all())
    assert bool((dq[0, 5, 1] != 0).any())
    assert not any(grad.isnan().any() for grad in found["saw nothing anywhere"][2:])


@needs_triton
def test_no_number_stays_no_number(found: dict[str, tuple[Tensor, ...]]) -> None:
    out, lse, dq, dk, dv = found["not a number"]
    assert bool(out[0, 20, 0].isnan().all())
    assert bool(lse[0, 0, 20].isnan())
    assert bool(dq[0, 20, 0].isnan().all())
    assert bool(dk[0, :21, 0].isnan().all())
    assert bool(dv[0, :21, 0].isnan().all())
    others = (out[0, :20], dq[0, :20], out[0, :, 1], dq[0, :, 1], dk[0, :, 1], dv[0, :, 1])
    assert not any(x.isnan().any() for x in others)


@needs_triton
def test_gradients_are_written_where_they_are_wanted(found: dict[str, tuple[Tensor, ...]]) -> None:
    _, _, *grads = found["gradients in place"]
    wanted = CALLS["gradients in place"].grads
    assert wanted is not None
    assert [grad.stride() for grad in grads] == [grad.stride() for grad in wanted]
    assert not any(grad.is_contiguous() for grad in grads)


# --- tiles -------------------------------------------------------------------------------------------------------

STEPS: tuple[Step, ...] = ("forward", "dq", "dkdv")
DTYPES = ("bf16", "fp16", "fp32", "tf32")


@pytest.mark.parametrize("sm", [80, 86, 87, 89, 90, 100, 103, 120, 121])
def test_every_gpu_has_tiles_for_every_dtype_and_head_dim(sm: int) -> None:
    for step in STEPS:
        for dtype in DTYPES:
            for head_dim in (1, 64, 65, 128, 200, 256):
                found = tiles(step, sm, dtype, head_dim)
                assert found
                assert len(set(found)) == len(found)
                for tile in found:
                    assert parse(str(tile)) == tile
                    assert tile.block_m >= SMALLEST_BLOCK <= tile.block_n
                    assert all(size & (size - 1) == 0 for size in tile[:3])
                    assert bool(tile.precision) == (dtype == "fp32")
                assert dtype != "fp32" or found[0].precision == "tf32x3"


@given(st.builds(Tile, *[st.integers(1, 999)] * 4, st.sampled_from(("", "ieee", "tf32x3"))))
def test_a_tile_is_read_as_it_is_written(tile: Tile) -> None:
    assert parse(str(tile)) == tile


@pytest.mark.parametrize(
    "text", ["", "128x64", "128x64-w4", "128x64-w4-s2-tf32", "x64-w4-s2", " 16x16-w4-s1", "1x1-w1-s1-"]
)
def test_what_is_no_tile_is_refused(text: str) -> None:
    assert parse(text) is None


def test_small_gpus_get_small_tiles() -> None:
    large, small = tiles("dkdv", 80, "bf16", 256), tiles("dkdv", 86, "bf16", 256)
    assert set(small) < set(large)


# --- the row -----------------------------------------------------------------------------------------------------


def test_each_direction_lists_its_own_tiles() -> None:
    assert set(params(replace(HOPPER, backward=False))) == {"forward_tile"}
    assert set(params(HOPPER)) == {"dq_tile", "dkdv_tile"}
    fp32 = params(replace(HOPPER, dtype="fp32", backward=False))["forward_tile"]
    assert str(fp32[0]).endswith("-tf32x3")
    assert any(str(value).endswith("-ieee") for value in fp32)
    assert not any("-ieee" in str(v) or "tf32x3" in str(v) for v in params(replace(HOPPER, dtype="tf32"))["dq_tile"])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vendor": "cpu", "arch": "x86_64"}, "NVIDIA"),
        ({"arch": "sm_75", "dtype": "fp16"}, "sm_80"),
        ({"dtype": "fp64"}, "no fp64"),
        ({"head_dim": 257}, "head_dim 257"),
        ({"blocks": 2**20, "rows": 2**16}, "launch grid"),
    ],
)
def test_what_it_cannot_do_is_a_reason(changes: dict[str, Any], reason: str) -> None:
    need = replace(HOPPER, **changes)
    (why,) = reasons(need)
    assert reason in why
    assert "\n" not in why
    assert params(need) == {}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [1, 40, 80, 100, 128, 256])
def test_what_it_can_do_has_no_reason(dtype: str, head_dim: int) -> None:
    longest = replace(HOPPER, dtype=dtype, head_dim=head_dim, heads=32, kv_heads=1, rows=2**22, row_elements=2**30)
    assert reasons(longest) == ()
    assert reasons(replace(longest, deterministic=True)) == ()


@pytest.mark.parametrize(
    ("chosen", "fault"),
    [
        ({"block_m": 64}, "unknown parameter block_m"),
        ({"dq_tile": "64"}, "dq_tile is '64'"),
        ({"dq_tile": 64}, "is 64"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(chosen: dict[str, Any], fault: str) -> None:
    with pytest.raises(PlanError, match=fault) as caught:
        load(KernelConfig(True, 0.5, params=chosen))
    assert "\n" not in str(caught.value)


def test_a_missing_triton_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "ringattn.kernels.own.triton_device", raising=False)
    with pytest.raises(PlanError, match="import triton") as caught:
        load(KernelConfig(True, 0.5))
    assert "\n" not in str(caught.value)


# --- compilation, which needs no GPU -----------------------------------------------------------------------------


@needs_triton
def test_nothing_that_varies_from_call_to_call_starts_a_compilation() -> None:
    device_side = importlib.import_module("ringattn.kernels.own.triton_device")
    for name in ("forward_kernel", "dq_kernel", "dkdv_kernel"):
        kernel = getattr(device_side, name)
        tensors = {"q", "k", "v", "out", "dout", "lse", "delta", "dq", "dk", "dv"}
        varying = [p for p in kernel.params if not p.is_constexpr and p.name not in tensors]
        assert varying
        assert all(p.do_not_specialize for p in varying)
        strides = [p for p in varying if p.name[-2:] in ("_n", "_m", "_h")]
        assert strides
        assert all(p.annotation_type == "i64" for p in strides)


@needs_triton
@pytest.mark.parametrize(
    ("sm", "step", "dtype", "head_dim", "more"),
    [
        (80, "forward", "bf16", 128, {}),
        (90, "forward", "tf32", 128, {}),
        (80, "dq", "tf32", 96, {}),
        (90, "dkdv", "bf16", 64, {}),
        (90, "forward", "bf16", 128, {"WINDOW": True, "CAP": True}),
        (80, "dq", "bf16", 64, {"WINDOW": True, "CAP": True}),
        (90, "dkdv", "bf16", 64, {"WINDOW": True, "CAP": True}),
    ],
)
def test_the_default_tile_compiles_and_fits(
    sm: int,
    step: Step,
    dtype: str,
    head_dim: int,
    more: dict[str, object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_for(sm, step, dtype, head_dim, tiles(step, sm, dtype, head_dim)[0], **more)
    assert compiled.metadata.shared <= {80: 163, 90: 227}[sm] * 1024
    assert ("wgmma" if sm == 90 else "mma.sync") in compiled.asm["ptx"]
    assert ("cvt.rna.tf32" in compiled.asm["ptx"]) == (dtype == "tf32")


def compile_for(sm: int, step: Step, dtype: str, head_dim: int, tile: Tile, **more: object) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = getattr(importlib.import_module("ringattn.kernels.own.triton_device"), f"{step}_kernel")
    element = "fp32" if dtype == "tf32" else dtype
    constants = {
        "CAUSAL": True,
        "NEGATE": False,
        "HEAD_DIM": head_dim,
        "BLOCK_D": 64 if head_dim <= 64 else 128,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "ALIGN": 4 if dtype == "tf32" else 8,
        "WIDE": False,
        "PRECISION": "tf32" if dtype == "tf32" else "ieee",
        "ROUND": dtype == "tf32",
        "WINDOW": False,
        "CAP": False,
        **more,
    }
    signature, used, aligned = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], used[name] = "constexpr", constants[name]
        elif name in ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "lse", "delta"):
            signature[name] = "*fp32" if name in ("lse", "delta") else f"*{element}"
            aligned[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[name] = parameter.annotation_type or ("fp32" if "scale" in name else "i32")
    source = triton.compiler.ASTSource(kernel, signature, used, aligned)
    options = {"num_warps": tile.warps, "num_stages": tile.stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)
