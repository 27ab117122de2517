"""The kernel for a few queries over a cache: interpreted, against float64; what it refuses; compilation."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import cross_oracle
import interpreted_decoding
import pytest
import torch
from interpreted_split_kv import CachedCall, run_interpreted
from interpreted_triton import interpreted
from torch import Tensor

from ringattn import Pattern
from ringattn.errors import PlanError
from ringattn.kernels.contract import KernelConfig, KernelNeed
from ringattn.kernels.own.split_kv import _SLOTS_AT_A_TIME, jobs_of, load, params, reasons, tiles
from ringattn.kernels.own.triton_tiles import parse

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
EXACT = {torch.float32: 2e-6, torch.float16: 2e-3}
MANY_SPLITS = {"_WAVES": (64, 1)}
HOPPER = KernelNeed("nvidia", "sm_90", "bf16", 128, 32, 8, 131072, 1, True, False, queries=1)


def call(
    lengths: list[int],
    queries: int = 1,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    capacity: int = 64,
    dtype: torch.dtype = torch.float32,
    causal: bool = True,
    pattern: tuple[list[int], list[int], str] | None = None,
    begins: list[int] | None = None,
    counts: list[int] | None = None,
    window: int | None = None,
    heads_first: bool = True,
    limits: dict[str, Any] | None = None,
    params: dict[str, Any] | None = None,
) -> CachedCall:
    """A call of a cache of ``capacity`` rows; those that do not exist are NaN."""
    generator = torch.Generator().manual_seed(sum(lengths) + queries)
    batch = len(lengths)
    q = torch.randn(batch, queries, heads, head_dim, generator=generator, dtype=torch.float64).to(dtype)
    k, v = (
        torch.randn(batch, kv_heads, capacity, head_dim, generator=generator, dtype=torch.float64).to(dtype)
        for _ in range(2)
    )
    for b, length in enumerate(lengths):
        begin = begins[b] if begins else 0
        held = length - begin
        assert held <= capacity
        for x in (k, v):
            x[b, :, held:] = torch.nan
            x[b, :, : max(-begin, 0)] = torch.nan  # rows before position 0
    k, v = k.transpose(1, 2), v.transpose(1, 2)
    if not heads_first:
        k, v = k.contiguous(), v.contiguous()
    rows: dict[str, Any] = {"lengths": torch.tensor(lengths, dtype=torch.int32), "window": window}
    rows |= {"begins": None if begins is None else torch.tensor(begins, dtype=torch.int32)}
    rows |= {"counts": None if counts is None else torch.tensor(counts, dtype=torch.int32)}
    config = {"causal": causal, "scale": 0.3, "params": params or {}}
    return CachedCall(q, k, v, config, rows, pattern, limits)


def full(queries: int, keys: int, causal: bool = False, **arguments: Any) -> CachedCall:
    made = call([keys], queries, capacity=keys, causal=causal, **arguments)
    return made._replace(rows=None)


LONGNET = ([8, 16, 40], [1, 2, 5], "interleaved")
BLOCKED = ([6, 20, 33], [2, 3, 4], "blocked")
CALLS = {
    "one query": call([40]),
    "one key": call([1]),
    "lengths of their own": call([40, 7, 64, 1]),
    "many splits": call([40, 7, 64, 1], limits=MANY_SPLITS),
    "more splits than are merged at a time": call([8192], 1, 2, 1, capacity=8192, limits={"_WAVES": (99, 1)}),
    "one split of whole tiles": call([64], limits={"_WAVES": (1, 1)}),
    "several queries": call([40, 5, 64], 5),
    "several queries, many splits": call([40, 5, 64], 5, limits=MANY_SPLITS),
    "as many queries as keys": call([7], 7),
    "more queries than keys": call([3], 7),
    "more queries than keys, full": call([3], 7, causal=False),
    "queries that are not there": call([40, 33, 20], 4, counts=[4, 1, 0]),
    "one query that is not there": call([40, 33], 1, counts=[1, 0]),
    "rows of several tiles": call([50, 64], 16, heads=12, kv_heads=2),
    "not causal": call([40, 64], 3, causal=False),
    "eight heads a group": call([40], 1, heads=8, kv_heads=1, limits=MANY_SPLITS),
    "window": call([40, 7, 64], 1, window=10),
    "window, several queries": call([40, 7, 64], 6, window=10, limits=MANY_SPLITS),
    "window of one": call([40, 1], 3, window=1),
    "cache without its beginning": call([100, 70], 2, window=10, begins=[60, 20]),
    "rows before the first position": call([10, 40, 6], 1, begins=[-3, 0, -7]),
    "rows before the first position, several queries": call([10, 9, 6], 3, begins=[-3, 0, -50], limits=MANY_SPLITS),
    "pattern": call([39, 1, 64], 1, heads=8, kv_heads=4, pattern=LONGNET),
    "pattern, several queries": call([39, 5], 5, heads=8, kv_heads=4, pattern=LONGNET),
    "pattern, many splits": call([39, 64], 2, heads=4, kv_heads=4, pattern=LONGNET, limits=MANY_SPLITS),
    "blocked pattern": call([39, 2], 3, heads=5, kv_heads=5, pattern=BLOCKED),
    "pattern, more queries than a segment": call([39, 64], 9, pattern=([4, 16], [1, 3], "interleaved")),
    "pattern, not causal": call([39, 64], 3, pattern=LONGNET, causal=False),
    "pattern without its beginning": call([100, 79], 2, pattern=([8, 20], [1, 3], "interleaved"), begins=[80, 60]),
    "pattern with counts": call([39, 64, 12], 4, pattern=LONGNET, counts=[2, 4, 0]),
    "sequence first": call([40, 64], 2, heads_first=False),
    "unaligned head_dim": call([40, 20], 2, head_dim=20),
    "odd head_dim": call([40, 20], 2, head_dim=7),
    "half precision": call([40, 64], 2, head_dim=32, dtype=torch.float16),
    "rows far apart": call([40], 2, limits={"_MAX_ROW_STRIDE": 0}),
    "a tile that was chosen": call([40, 64], 2, params={"tile": "16x32-w4-s2-ieee", "waves": 8}),
    "full block": full(5, 40),
    "causal block": full(40, 40, causal=True),
    "block of many rows": full(50, 64),
}


def exact(made: CachedCall) -> tuple[Tensor, Tensor]:
    pattern = Pattern() if made.pattern is None else Pattern.of(*made.pattern)  # type: ignore[arg-type]
    batch, queries, heads, _ = made.q.shape
    kv_heads, causal = made.k.shape[2], made.config["causal"]
    rows = made.rows or {"lengths": torch.full((batch,), made.k.shape[1])}
    outs, lses = [], []
    for b, length in enumerate(rows["lengths"].tolist()):
        count = queries if rows.get("counts") is None else int(rows["counts"][b])
        begin = 0 if rows.get("begins") is None else int(rows["begins"][b])
        out = torch.zeros(queries, heads, made.q.shape[3], dtype=torch.float64)
        lse = torch.full((heads, queries), -torch.inf, dtype=torch.float64)
        if count:
            positions = torch.arange(length - count, length)
            seen = cross_oracle.counts(
                pattern, causal, positions, torch.arange(max(begin, 0), length), heads, kv_heads, rows.get("window")
            )
            held = slice(max(-begin, 0), length - begin)
            one = cross_oracle.attend(
                made.q[b : b + 1, :count], made.k[b : b + 1, held], made.v[b : b + 1, held], seen, 0.3
            )
            out[:count], lse[:, :count] = one[0][0], one[1][0]
        outs.append(out)
        lses.append(lse)
    return torch.stack(outs), torch.stack(lses)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tensor, Tensor]]:
    results = run_interpreted(list(CALLS.values()), tmp_path_factory.mktemp("interpreted"))
    return dict(zip(CALLS, results, strict=True))


@needs_triton
@pytest.mark.parametrize("name", CALLS)
def test_it_attends_over_what_the_cache_holds(name: str, found: dict[str, tuple[Tensor, Tensor]]) -> None:
    made = CALLS[name]
    (out, lse), (out64, lse64) = found[name], exact(made)
    assert out.shape == made.q.shape
    assert out.dtype is made.q.dtype
    assert lse.dtype is torch.float32
    torch.testing.assert_close(out.double(), out64, atol=EXACT[made.q.dtype], rtol=EXACT[made.q.dtype])
    assert torch.equal(lse.isneginf(), lse64.isneginf())
    finite = ~lse64.isneginf()
    torch.testing.assert_close(lse[finite].double(), lse64[finite], atol=1e-5, rtol=1e-5)


def test_consecutive_queries_lie_in_so_many_segments() -> None:
    pattern = Pattern.of([4, 16], [1, 3])
    assert jobs_of(pattern, 1, 2)[1] == 2
    assert jobs_of(pattern, 2, 2)[1] == 4
    assert jobs_of(pattern, 5, 2)[1] == 2 + 2
    assert jobs_of(pattern, 6, 2)[1] == 3 + 2
    assert jobs_of(Pattern(), 100, 2)[1] == 1


# --- the row -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vendor": "cpu", "arch": "x86_64"}, "NVIDIA"),
        ({"arch": "sm_75", "dtype": "fp16"}, "sm_80"),
        ({"dtype": "fp64"}, "no fp64"),
        ({"head_dim": 257}, "head_dim 257"),
        ({"backward": True}, "no backward"),
        ({"rows": 2**30}, r"positions end at 2\^30"),
        ({"queries": 0}, "a few queries over a cache"),
        ({"queries": 17}, "17 queries"),
    ],
)
def test_what_it_cannot_do_is_a_reason(changes: dict[str, Any], reason: str) -> None:
    need = replace(HOPPER, **changes)
    (why,) = reasons(need)
    assert reason.replace("\\", "") in why
    assert "\n" not in why
    assert params(need) == {}


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "tf32"])
@pytest.mark.parametrize("head_dim", [1, 40, 80, 128, 256])
def test_what_it_can_do_has_tiles(dtype: str, head_dim: int) -> None:
    need = replace(HOPPER, dtype=dtype, head_dim=head_dim)
    assert reasons(need) == ()
    listed = params(need)["tile"]
    assert listed
    assert len(set(listed)) == len(listed)
    assert [parse(str(text)) for text in listed] == list(tiles(dtype, head_dim))


@pytest.mark.parametrize(
    ("chosen", "fault"),
    [
        ({"splits": 4}, "unknown parameter splits"),
        ({"tile": "64"}, "tile is '64'"),
        ({"waves": 0}, "waves is 0"),
        ({"waves": True}, "waves is True"),
    ],
)
def test_parameters_that_mean_nothing_are_refused(chosen: dict[str, Any], fault: str) -> None:
    with pytest.raises(PlanError, match=fault) as caught:
        load(KernelConfig(True, 0.5, params=chosen))
    assert "\n" not in str(caught.value)


def test_a_missing_triton_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "ringattn.kernels.own.split_kv_device", raising=False)
    with pytest.raises(PlanError, match="import triton") as caught:
        load(KernelConfig(True, 0.5))
    assert "\n" not in str(caught.value)


# --- compilation, which needs no GPU -----------------------------------------------------------------------------


@needs_triton
def test_nothing_that_varies_from_call_to_call_starts_a_compilation() -> None:
    device_side = importlib.import_module("ringattn.kernels.own.split_kv_device")
    tensors = {"q", "k", "v", "lengths", "begins", "counts", "out", "lse", "part_out", "part_lse"}
    for name in ("split_kv_kernel", "merge_slots_kernel"):
        kernel = getattr(device_side, name)
        varying = [p for p in kernel.params if not p.is_constexpr and p.name not in tensors]
        assert varying
        assert all(p.do_not_specialize for p in varying)
        assert all(p.annotation_type == "i64" for p in varying if p.name[-2:] in ("_n", "_m", "_h"))


DENSE_BRANCH = ((2**30, 1, 0, 0),)
LONGNET_BRANCHES = ((2048, 1, 0, 0), (8192, 4, 0, 2), (32768, 16, 2, 4))


@needs_triton
@pytest.mark.parametrize(
    ("sm", "dtype", "head_dim", "branches"),
    [(80, "bf16", 128, DENSE_BRANCH), (90, "bf16", 128, LONGNET_BRANCHES), (90, "fp32", 64, DENSE_BRANCH)],
)
def test_the_default_tile_compiles_and_fits(
    sm: int, dtype: str, head_dim: int, branches: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    compiled = compile_for(sm, dtype, head_dim, branches)
    # three of 16 bits stay on a multiprocessor of sm_90, and one of 32 on the smallest, of 99 KiB
    assert compiled.metadata.shared <= {"bf16": 75, "fp32": 99}[dtype] * 1024
    assert "mma.sync" in compiled.asm["ptx"]
    assert "cp.async.cg.shared.global" in compiled.asm["ptx"], "keys are loaded ahead, 16 bytes at a time"


@needs_triton
@pytest.mark.parametrize("at_a_time", _SLOTS_AT_A_TIME)
def test_the_merge_compiles(at_a_time: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    types = {"part_out": "*fp32", "part_lse": "*fp32", "out": "*bf16", "lse": "*fp32"}
    compiled = _compiled("merge_slots_kernel", 90, types, {"HEAD_DIM": 128, "BLOCK_D": 128, "BLOCK_S": at_a_time}, 4, 1)
    assert "merge_slots_kernel" in compiled.asm["ptx"]


def compile_for(sm: int, dtype: str, head_dim: int, branches: Any) -> Any:
    tile = tiles(dtype, head_dim)[0]
    dense = len(branches) == 1
    constants = {
        "BRANCHES": branches,
        "JOBS": branches[-1][3] + 1,
        "DENSE": dense,
        "CAUSAL": True,
        "SEVERAL": not dense,
        "LENGTHS": True,
        "BEGINS": not dense,
        "COUNTS": not dense,
        "DIRECT": False,
        "HEAD_DIM": head_dim,
        "BLOCK_D": head_dim,
        "BLOCK_M": 16,
        "BLOCK_N": tile.block_n,
        "ALIGN": 4 if dtype == "fp32" else 8,
        "WIDE": False,
        "PRECISION": tile.precision or "ieee",
        "ROUND": False,
    }
    types = dict.fromkeys("qkv", f"*{dtype}") | dict.fromkeys(("lengths", "begins", "counts"), "*i32")
    types |= {"out": "*fp32", "lse": "*fp32"}
    return _compiled("split_kv_kernel", sm, types, constants, tile.warps, tile.stages)


def _compiled(name: str, sm: int, types: dict[str, str], constants: dict[str, Any], warps: int, stages: int) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget

    kernel = getattr(importlib.import_module("ringattn.kernels.own.split_kv_device"), name)
    signature, used, aligned = {}, {}, {}
    for position, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name], used[parameter.name] = "constexpr", constants[parameter.name]
        elif parameter.name in types:
            signature[parameter.name] = types[parameter.name]
            aligned[(position,)] = [["tt.divisibility", 16]]
        else:
            signature[parameter.name] = parameter.annotation_type or (
                "fp32" if parameter.name.startswith("scale") else "i32"
            )
    source = triton.compiler.ASTSource(kernel, signature, used, aligned)
    options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": False}
    return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


@needs_triton
def test_a_module_decodes_with_it_in_one_call_each() -> None:
    script = Path(interpreted_decoding.__file__)
    assert int(interpreted(str(script))) == 6 * 6 + 2 * 2 + 1
