"""The optional packages: their constraint tables, what loading them refuses, and how they are called.

The calls are checked against stand-ins that take exactly the arguments of the real functions and compute with the
math kernel. What the real ones compute is checked in test_kernels_optional_gpu.py.
"""

from __future__ import annotations

import math
import os
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracle import cpu
from torch import Tensor

from ringattn.errors import PlanError
from ringattn.kernels import math as kernels_math
from ringattn.kernels.contract import KernelConfig, KernelNeed
from ringattn.kernels.packages.flash_attn_2 import flash_attn_2_reasons, load_flash_attn_2
from ringattn.kernels.packages.flash_attn_3 import flash_attn_3_reasons, load_flash_attn_3
from ringattn.kernels.packages.flash_attn_4 import flash_attn_4_params, flash_attn_4_reasons, load_flash_attn_4
from ringattn.kernels.packages.xformers import load_xformers, xformers_params, xformers_reasons
from ringattn.kernels.registry import KERNELS
from ringattn.reference import dilated_attention_reference
from ringattn.workload import Pattern

TABLE = {name: KERNELS[name] for name in ("flash-attn-2", "flash-attn-3", "flash-attn-4", "xformers")}
HOPPER = KernelNeed(
    vendor="nvidia",
    arch="sm_90",
    dtype="bf16",
    head_dim=128,
    heads=16,
    kv_heads=16,
    rows=4096,
    blocks=1,
    causal=True,
    backward=True,
)
WRITERS = {"flash-attn-2": load_flash_attn_2, "flash-attn-3": load_flash_attn_3, "flash-attn-4": load_flash_attn_4}
MODULES = {
    "flash-attn-2": "flash_attn.flash_attn_interface",
    "flash-attn-3": "flash_attn_interface",
    "flash-attn-4": "flash_attn.cute.interface",
    "xformers": "xformers.ops.fmha",
}


# --- reasons ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_dense_training_on_hopper_is_what_they_are_for(name: str) -> None:
    assert TABLE[name].reasons(HOPPER) == ()


@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"vendor": "cpu", "arch": "x86_64"}, "runs on NVIDIA GPUs only"),
        ({"arch": "sm_75"}, "or newer, this is sm_75"),
        ({"dtype": "fp32"}, "no fp32; it has fp16, bf16"),
        ({"dtype": "fp64"}, "no fp64"),
        ({"head_dim": 100}, "head_dim 100; it needs a multiple of 8 up to 256"),
        ({"head_dim": 264}, "head_dim 264"),
        ({"blocks": 65536, "rows": 16}, "65536 blocks; its launch grid ends at 65535"),
        ({"heads": 65536, "kv_heads": 65536, "rows": 16}, "65536 heads"),
    ],
)
def test_every_package_says_what_it_lacks(name: str, change: dict[str, Any], reason: str) -> None:
    assert any(reason in said for said in TABLE[name].reasons(replace(HOPPER, **change)))


@pytest.mark.parametrize(
    ("reasons", "change", "reason"),
    [
        (flash_attn_2_reasons, {"head_dim": 160}, "out of bounds at head_dim 160"),
        (flash_attn_3_reasons, {"arch": "sm_100"}, "built for sm_90"),
        (flash_attn_3_reasons, {"deterministic": True}, "deterministic flag"),
        (flash_attn_4_reasons, {"head_dim": 80}, "head_dim 80: dq is wrong on sm_90 up to 4.0.0b36"),
        (flash_attn_4_reasons, {"arch": "sm_80"}, "backward needs sm_90"),
        (flash_attn_4_reasons, {"arch": "sm_89", "backward": False, "head_dim": 256}, "overflows shared memory"),
        (flash_attn_4_reasons, {"arch": "sm_100", "head_dim": 192}, "up to 128, and 256"),
        (
            flash_attn_4_reasons,
            {"head_dim_v": 64},
            "head_dim 128 with head_dim_v 64; on sm_90 it has 192 with 128 alone",
        ),
        (flash_attn_4_reasons, {"head_dim": 64, "head_dim_v": 128, "backward": False}, "on sm_90 it has 192 with 128"),
        (flash_attn_4_reasons, {"arch": "sm_100", "head_dim_v": 256}, "up to 128, and 192 with 128"),
        (flash_attn_4_reasons, {"arch": "sm_120", "head_dim": 256}, "99 KiB"),
        (flash_attn_4_reasons, {"arch": "sm_120", "deterministic": True}, "not deterministic on sm_120"),
        (flash_attn_4_reasons, {"arch": "sm_130"}, "sm_80 to sm_12x"),
        (xformers_reasons, {"kv_heads": 4}, "no grouped heads"),
        (xformers_reasons, {"deterministic": True}, "not deterministic"),
        (xformers_reasons, {"head_dim": 136}, "out of bounds at head_dim 136"),
    ],
)
def test_published_faults_are_reasons(
    reasons: Callable[[KernelNeed], tuple[str, ...]], change: dict[str, Any], reason: str
) -> None:
    assert any(reason in said for said in reasons(replace(HOPPER, **change)))


@pytest.mark.parametrize(
    ("reasons", "change"),
    [
        (flash_attn_2_reasons, {"deterministic": True, "kv_heads": 4}),
        (flash_attn_2_reasons, {"head_dim": 160, "backward": False}),
        (flash_attn_2_reasons, {"arch": "sm_80", "head_dim": 256}),
        (flash_attn_3_reasons, {"deterministic": True, "backward": False}),
        (flash_attn_4_reasons, {"deterministic": True, "kv_heads": 4, "head_dim": 256}),
        (flash_attn_4_reasons, {"arch": "sm_80", "backward": False, "head_dim": 256}),
        (flash_attn_4_reasons, {"arch": "sm_100", "head_dim": 256}),
        (flash_attn_4_reasons, {"head_dim": 192, "head_dim_v": 128}),
        (flash_attn_4_reasons, {"arch": "sm_100", "head_dim": 64, "head_dim_v": 128}),
        (flash_attn_4_reasons, {"heads": 64, "kv_heads": 64, "rows": 2**20}),
        (xformers_reasons, {"deterministic": True, "backward": False}),
    ],
)
def test_a_fault_refuses_no_more_than_it_has_to(
    reasons: Callable[[KernelNeed], tuple[str, ...]], change: dict[str, Any]
) -> None:
    assert reasons(replace(HOPPER, **change)) == ()


@pytest.mark.parametrize("name", ["flash-attn-2", "xformers"])
@pytest.mark.parametrize(
    ("change", "accepted"),
    [
        ({"heads": 16, "kv_heads": 16, "rows": 2**20}, True),  # exactly 2^31 elements pass
        ({"heads": 16, "kv_heads": 16, "rows": 2**20 + 1}, False),
        ({"heads": 16, "kv_heads": 16, "rows": 2**20 + 1, "backward": False}, True),
        ({"head_dim": 16, "heads": 64, "kv_heads": 64, "rows": 2**20}, True),  # counted as 32
        ({"head_dim": 8, "heads": 65, "kv_heads": 65, "rows": 2**20}, False),
        ({"head_dim": 200, "heads": 8, "kv_heads": 8, "rows": 2**20}, True),  # counted as 256
        ({"head_dim": 200, "heads": 9, "kv_heads": 9, "rows": 2**20}, False),
        ({"head_dim": 128, "heads": 1, "kv_heads": 1, "rows": 1, "blocks": 65535}, True),
        ({"head_dim": 128, "heads": 3, "kv_heads": 3, "rows": 1, "blocks": 65535}, True),  # blocks run in parts
    ],
)
def test_flash_2_gradients_end_at_32_bit_offsets(name: str, change: dict[str, Any], accepted: bool) -> None:
    reasons = TABLE[name].reasons(replace(HOPPER, **change))
    assert (reasons == ()) == accepted
    assert accepted or any("2^31" in reason for reason in reasons)


@pytest.mark.parametrize("version", ["4.0.0b36", "4.0.0b20", "unknown", ""])
def test_flash_attn_4_pads_uneven_head_dimensions_wrongly_up_to_a_release(version: str) -> None:
    facts = replace(cpu(), packages=("flash_attn.cute",), software=(("flash_attn.cute", version),))
    newer = [replace(facts, software=(("flash_attn.cute", text),)) for text in ("4.0.0b37", "4.0.0", "4.1.0")]
    refused = []
    for head_dim in range(8, 257, 8):
        need = replace(HOPPER, head_dim=head_dim)
        refused += [head_dim] if TABLE["flash-attn-4"].unsupported_reasons(need, facts) else []
        assert TABLE["flash-attn-4"].unsupported_reasons(replace(need, backward=False), facts) == ()
        assert all(TABLE["flash-attn-4"].unsupported_reasons(need, later) == () for later in newer)
        elsewhere = TABLE["flash-attn-4"].unsupported_reasons(replace(need, arch="sm_100"), facts)
        assert not any("dq is wrong" in reason for reason in elsewhere)
    assert refused == [8, 16, 40, 48, 72, 80, 104, 112]


@given(
    name=st.sampled_from(sorted(TABLE)),
    arch=st.sampled_from(["sm_61", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "x86_64"]),
    dtype=st.sampled_from(["bf16", "fp16", "tf32", "fp32", "fp64"]),
    head_dim=st.integers(1, 512),
    rows=st.integers(1, 2**24),
    blocks=st.integers(1, 2**17),
    causal=st.booleans(),
    deterministic=st.booleans(),
)
def test_what_trains_also_infers(
    name: str, arch: str, dtype: str, head_dim: int, rows: int, blocks: int, causal: bool, deterministic: bool
) -> None:
    vendor = "cpu" if arch == "x86_64" else "nvidia"
    need = KernelNeed(vendor, arch, dtype, head_dim, 8, 8, rows, blocks, causal, True, deterministic=deterministic)
    trains, infers = TABLE[name].reasons(need), TABLE[name].reasons(replace(need, backward=False))
    assert set(infers) <= set(trains)
    assert all(reason and "\n" not in reason for reason in trains)


# --- parameters ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [32, 64, 80, 96, 128, 192, 256])
def test_forward_tiles_fit_a_hopper_sm(head_dim: int) -> None:
    tiles = flash_attn_4_params(replace(HOPPER, head_dim=head_dim))["forward_tile"]
    assert tiles[0] == "package"
    assert len(set(tiles)) == len(tiles) > 1
    padded = -(-head_dim // 16) * 16
    for tile in tiles[1:]:
        size, *flags = str(tile).split("-")
        query_rows, key_rows = map(int, size.split("x"))
        groups = query_rows // 64
        assert query_rows % 64 == 0
        assert key_rows % 16 == 0
        # Float32 accumulators of S and O per thread, P beside S where warp groups overlap; two stages of K and V.
        registers = key_rows // 2 + padded // 2 + (key_rows // 4 if "overlap" in flags else 0)
        assert registers <= {2: 216, 3: 144}[groups]
        shared = 2 * (query_rows * padded + 4 * key_rows * padded + (0 if "rs" in flags else query_rows * key_rows))
        assert shared <= 227 * 1024


def test_parameters_are_offered_only_where_they_act() -> None:
    assert set(flash_attn_4_params(HOPPER)) == {"forward_tile"}
    assert set(flash_attn_4_params(replace(HOPPER, kv_heads=4))) == {"forward_tile", "pack_gqa"}
    assert set(flash_attn_4_params(replace(HOPPER, arch="sm_100"))) == set()
    assert xformers_params(HOPPER) == {"operator": ("flash", "cutlass")}
    assert xformers_params(replace(HOPPER, arch="sm_100")) == {"operator": ("flash",)}


# --- loading ------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of the packages, whatever is installed: a None entry makes the import system say so."""
    for name in [
        name for name in sys.modules if name.split(".")[0] in ("flash_attn", "flash_attn_interface", "xformers")
    ]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("flash_attn", "flash_attn_interface", "xformers"):
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.usefixtures("no_packages")
@pytest.mark.parametrize("name", TABLE)
def test_an_absent_package_is_one_line_with_its_remedy(name: str) -> None:
    with pytest.raises(PlanError) as caught:
        TABLE[name].load(KernelConfig(causal=True, scale=1.0))
    message = str(caught.value)
    assert message.startswith(f"kernel {name} cannot be loaded: {name}: import {MODULES[name]}: ModuleNotFoundError")
    assert message.endswith(TABLE[name].remedy)
    assert "\n" not in message


@pytest.mark.usefixtures("no_packages")
@pytest.mark.parametrize("home", [RuntimeError("Could not determine home directory."), Path("/nonexistent")], ids=repr)
def test_a_user_without_a_home_keeps_no_compiled_kernels(
    home: Path | RuntimeError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a number without a name is in a container; it raised instead of naming the package that is not there."""

    def of_user() -> Path:
        if isinstance(home, Path):
            return home
        raise home

    monkeypatch.setattr(Path, "home", of_user)
    names = [f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR")]
    for name in ("XDG_CACHE_HOME", *names):
        monkeypatch.setenv(name, "")  # so that what is loaded here leaves nothing behind
        monkeypatch.delenv(name)
    with pytest.raises(PlanError, match="kernel flash-attn-4 cannot be loaded"):
        TABLE["flash-attn-4"].load(KernelConfig(causal=True, scale=1.0))
    assert [name for name in names if name in os.environ] == []
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(PlanError, match="kernel flash-attn-4 cannot be loaded"):
        TABLE["flash-attn-4"].load(KernelConfig(causal=True, scale=1.0))
    assert os.environ[names[1]] == str(tmp_path / "ringtune" / "flash-attn-4")


@pytest.mark.usefixtures("no_packages")
@pytest.mark.parametrize("name", TABLE)
def test_a_package_that_fails_at_import_is_named(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = MODULES[name].split(".")[0]
    monkeypatch.delitem(sys.modules, root)
    (tmp_path / f"{root}.py").write_text("raise OSError('undefined symbol:\\n_ZN3c10')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(PlanError, match="OSError: undefined symbol: _ZN3c10") as caught:
        TABLE[name].load(KernelConfig(causal=True, scale=1.0))
    assert isinstance(caught.value.__cause__, OSError)


# --- stand-ins ----------------------------------------------------------------------------------------------------


def _module(monkeypatch: pytest.MonkeyPatch, name: str, **members: object) -> types.ModuleType:
    """Install a module and its parents, as an import of it would find them."""
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        parent = types.ModuleType(".".join(parts[:end]))
        parent.__path__ = []
        monkeypatch.setitem(sys.modules, parent.__name__, parent)
    module = sys.modules[name]
    vars(module).update(members)
    return module


def _write(into: tuple[Tensor, ...], computed: tuple[Tensor, ...]) -> None:
    for target, value in zip(into, computed, strict=True):
        target.copy_(value)


class FakeFlash2:
    """``flash_attn_2_cuda`` as of 2.8: positional, LSE taken by its address, gradients written in place."""

    def fwd(self, *args: Any) -> list[Tensor]:
        q, k, v, out, alibi, dropout, scale, causal, left, right, softcap, return_softmax, generator = args
        assert (out, alibi, generator) == (None, None, None)
        assert (dropout, right, return_softmax) == (0.0, 0 if left >= 0 else -1, False)
        found = kernels_math.forward(q, k, v, causal, scale, left + 1, softcap)
        return [*found, torch.empty(0), torch.empty(2)]

    def bwd(self, *args: Any) -> list[Tensor]:
        dout, q, k, v, out, lse, dq, dk, dv, alibi, *rest = args
        dropout, scale, causal, left, right, softcap, deterministic, generator, rng_state = rest
        assert (alibi, generator, rng_state) == (None, None, None)
        assert (dropout, right, deterministic) == (0.0, 0 if left >= 0 else -1, True)
        assert dout.stride(-1) == 1
        assert lse.is_contiguous()
        _write((dq, dk, dv), kernels_math.backward(dout, q, k, v, out, lse, causal, scale, left + 1, softcap))
        return [dq, dk, dv, torch.empty(0)]


def _fake_3_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: None = None, *, softmax_scale: float, causal: bool = False
) -> tuple[Tensor, ...]:
    return *kernels_math.forward(q, k, v, causal, softmax_scale), torch.empty(0), torch.empty(0)


@torch.library.custom_op("ringattn_test::flash_3_backward", mutates_args=("dq", "dk", "dv"))
def _fake_3_backward(
    dout: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    softmax_lse: torch.Tensor,
    dq: torch.Tensor,
    dk: torch.Tensor,
    dv: torch.Tensor,
    softmax_scale: float = 1.0,
    is_causal: bool = False,
) -> torch.Tensor:
    """A custom op, as the real one is: what it takes is not written on the object that is called."""
    assert softmax_lse.is_contiguous()
    _write((dq, dk, dv), kernels_math.backward(dout, q, k, v, out, softmax_lse, is_causal, softmax_scale))
    return torch.empty(0)


def _flash_4_window(left: int | None, right: int | None) -> int:
    assert right == (None if left is None else 0)
    return 0 if left is None else left + 1


class FakeFlash4:
    def __init__(self) -> None:
        self.forward_tile: tuple[object, ...] = ()

    def fwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        qv: None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        softcap: float | None = None,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        tile_mn: tuple[int, int] | None = None,
        mma_pv_is_rs: bool | None = None,
        intra_wg_overlap: bool | None = None,
        num_threads: int = 384,
        pack_gqa: bool | None = None,
        return_lse: bool = False,
    ) -> tuple[Tensor | None, ...]:
        assert softmax_scale is not None
        self.forward_tile = (tile_mn, mma_pv_is_rs, intra_wg_overlap, pack_gqa)
        window = _flash_4_window(window_size_left, window_size_right)
        out, lse = kernels_math.forward(q, k, v, causal, softmax_scale, window, softcap or 0.0)
        return out, lse if return_lse else None, None, None, None

    def bwd(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        dout: Tensor,
        lse: Tensor,
        softmax_scale: float = 0.0,
        causal: bool = False,
        softcap: float = 0.0,
        window_size_left: int | None = None,
        window_size_right: int | None = None,
        deterministic: bool = False,
        dq: Tensor | None = None,
        dk: Tensor | None = None,
        dv: Tensor | None = None,
    ) -> tuple[Tensor, ...]:
        assert deterministic
        window = _flash_4_window(window_size_left, window_size_right)
        computed = kernels_math.backward(dout, q, k, v, out, lse, causal, softmax_scale, window, softcap)
        if dq is None or dk is None or dv is None:
            return computed
        _write((dq, dk, dv), computed)
        return dq, dk, dv


class FakeFmha:
    """``xformers.ops.fmha``: "flash" exact, "cutlass" with LSE rows padded to 32 and ``out`` read as contiguous."""

    class LowerTriangularMask:
        _window_size = 0

    class LowerTriangularFromBottomRightLocalAttentionMask:
        def __init__(self, window_size: int) -> None:
            self._window_size = window_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: object = None,
        p: float = 0.0,
        scale: float = 0.0,
        *,
        op: str,
    ) -> tuple[Tensor, Tensor]:
        window = getattr(attn_bias, "_window_size", 0)
        out, lse = kernels_math.forward(query, key, value, attn_bias is not None, scale, window)
        if op == "cutlass forward":
            lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32))
        return out, lse

    def backward(
        self,
        grad: Tensor,
        output: Tensor,
        lse: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_bias: object = None,
        p: float = 0.0,
        scale: float = 0.0,
        *,
        op: str,
    ) -> tuple[Tensor, ...]:
        assert op in ("flash backward", "cutlass backward")
        assert output.is_contiguous()
        window = getattr(attn_bias, "_window_size", 0)
        return kernels_math.backward(grad, query, key, value, output, lse, attn_bias is not None, scale, window)


def _operator(name: str) -> types.SimpleNamespace:
    return types.SimpleNamespace(FwOp=f"{name} forward", BwOp=f"{name} backward")


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> FakeFlash4:
    fake_4, fmha = FakeFlash4(), FakeFmha()
    _module(monkeypatch, "flash_attn.cute.interface", _flash_attn_fwd=fake_4.fwd, _flash_attn_bwd=fake_4.bwd)
    interface = types.ModuleType("flash_attn.flash_attn_interface")
    vars(interface)["flash_attn_gpu"] = FakeFlash2()
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    _module(
        monkeypatch,
        "flash_attn_interface",
        _flash_attn_forward=_fake_3_forward,
        _flash_attn_backward=_fake_3_backward,
    )
    _module(
        monkeypatch,
        "xformers.ops.fmha",
        memory_efficient_attention_forward_requires_grad=fmha.forward,
        memory_efficient_attention_backward=fmha.backward,
        flash=_operator("flash"),
        cutlass=_operator("cutlass"),
        attn_bias=FakeFmha,
    )
    return fake_4


def _exact(
    q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool, scale: float, **options: Any
) -> tuple[Tensor, ...]:
    """out, lse, dq, dk, dv in float64 from the definition."""
    q, k, v = (x.detach().double().requires_grad_() for x in (q, k, v))
    out, lse = dilated_attention_reference(q, k, v, Pattern(), causal, scale, **options)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), dout.double())


def _random(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]


def _assert_all_close(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for value, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(value.double(), exact, rtol=2e-5, atol=2e-5)


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", TABLE)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_arguments_arrive_where_they_belong(name: str, causal: bool, kv_heads: int) -> None:
    q, dout, k, v = _random(*((2, 9, 4, 8),) * 2 + ((2, 9, kv_heads, 8),) * 2)
    kernel = TABLE[name].load(KernelConfig(causal=causal, scale=0.3, deterministic=True))
    out, lse = kernel.forward(q, k, v)
    assert lse.shape == (2, 4, 9)
    # Strided on purpose: whoever takes an address must have made it contiguous.
    strided_lse = lse.transpose(1, 2).contiguous().transpose(1, 2)
    grads = kernel.backward(dout, q, k, v, out, strided_lse)
    _assert_all_close((out, lse, *grads), _exact(q, k, v, dout, causal, 0.3))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        (name, options)
        for options in ({"window": 1}, {"window": 4}, {"softcap": 0.5}, {"window": 4, "softcap": 0.5})
        for name, kernel in TABLE.items()
        if kernel.features.issuperset(options)
    ],
)
def test_a_window_and_a_softcap_arrive(name: str, options: dict[str, Any]) -> None:
    q, dout, k, v = _random(*((2, 9, 4, 8),) * 4)
    kernel = TABLE[name].load(KernelConfig(causal=True, scale=0.3, deterministic=True, **options))
    out, lse = kernel.forward(q, k, v)
    grads = kernel.backward(dout, q, k, v, out, lse)
    _assert_all_close((out, lse, *grads), _exact(q, k, v, dout, True, 0.3, **options))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", WRITERS)
def test_gradients_are_written_into_strided_tensors(name: str) -> None:
    q, dout, k, v = _random(*((1, 6, 2, 8),) * 4)
    kernel = WRITERS[name](KernelConfig(causal=True, scale=0.5, deterministic=True))
    out, lse = kernel.forward(q, k, v)
    whole = [torch.full((1, 12, 2, 8), math.nan) for _ in range(3)]
    into = (whole[0][:, 1::2], whole[1][:, 1::2], whole[2][:, 1::2])
    returned = kernel.backward(dout, q, k, v, out, lse, grads=into)
    assert [x.data_ptr() for x in returned] == [x.data_ptr() for x in into]
    _assert_all_close(into, _exact(q, k, v, dout, True, 0.5)[2:])
    assert all(x[:, ::2].isnan().all() for x in whole)


@pytest.mark.usefixtures("stand_ins")
def test_flash_4_is_given_no_gradient_it_would_misread() -> None:
    q, dout, k, v = _random(*((1, 6, 2, 8),) * 4)
    kernel = load_flash_attn_4(KernelConfig(causal=True, scale=0.5, deterministic=True))
    out, lse = kernel.forward(q, k, v)
    odd = torch.empty(1 + 6 * 2 * 8)[1:].view(1, 6, 2, 8)
    with pytest.raises(AssertionError):
        kernel.backward(dout, q, k, v, out, lse, grads=(odd, torch.empty_like(k), torch.empty_like(v)))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", TABLE)
def test_an_expanded_gradient_is_taken(name: str) -> None:
    q, k, v = _random(*((1, 6, 2, 8),) * 3)
    kernel = TABLE[name].load(KernelConfig(causal=False, scale=0.5, deterministic=True))
    out, lse = kernel.forward(q, k, v)
    dout = torch.ones(()).expand_as(out)  # what out.sum().backward() hands over
    _assert_all_close(kernel.backward(dout, q, k, v, out, lse), _exact(q, k, v, dout, False, 0.5)[2:])


@pytest.mark.usefixtures("stand_ins")
def test_xformers_operator_is_chosen_by_name() -> None:
    q, dout, k, v = _random(*((1, 40, 2, 8),) * 4)
    kernel = load_xformers(KernelConfig(causal=True, scale=0.5, params={"operator": "cutlass"}))
    out, lse = kernel.forward(q, k, v)
    assert lse.shape == (1, 2, 40)
    every_second_row = torch.empty(1, 80, 2, 8)[:, ::2].copy_(out)
    grads = kernel.backward(dout, q, k, v, every_second_row, lse)
    _assert_all_close((out, lse, *grads), _exact(q, k, v, dout, True, 0.5))
    with pytest.raises(PlanError, match=r"operator is 'splitk'.*Use one of flash, cutlass"):
        load_xformers(KernelConfig(causal=True, scale=0.5, params={"operator": "splitk"}))


def test_flash_4_parameters_reach_the_kernel(stand_ins: FakeFlash4) -> None:
    q, k, v = _random(*((1, 4, 2, 8),) * 3)

    def seen(**params: Any) -> tuple[object, ...]:
        load_flash_attn_4(KernelConfig(causal=True, scale=0.5, params=params)).forward(q, k, v)
        return stand_ins.forward_tile

    assert seen() == (None, None, None, None)
    assert seen(forward_tile="package", pack_gqa=False) == (None, None, None, False)
    assert seen(forward_tile="128x176-rs-overlap") == ((128, 176), True, True, None)
    assert seen(forward_tile="192x128-overlap", pack_gqa=True) == ((192, 128), False, True, True)
    for head_dim in (64, 96, 128, 192, 256):
        for tile in flash_attn_4_params(replace(HOPPER, head_dim=head_dim))["forward_tile"]:
            seen(forward_tile=tile)
    with pytest.raises(PlanError, match="forward_tile is '64x64'"):
        seen(forward_tile="64x64")


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize("name", TABLE)
def test_an_unknown_parameter_is_refused(name: str) -> None:
    with pytest.raises(PlanError, match="unknown parameter backward_tile"):
        TABLE[name].load(KernelConfig(causal=True, scale=0.5, params={"backward_tile": "64x64"}))


@pytest.mark.usefixtures("stand_ins")
@pytest.mark.parametrize(
    ("name", "member", "stub", "fault"),
    [
        ("flash-attn-2", "flash_attn_gpu", None, "has no flash_attn_gpu"),
        ("flash-attn-3", "_flash_attn_backward", lambda dout, q, k, v, out, lse, causal: None, "_flash_attn_backward"),
        ("flash-attn-4", "_flash_attn_fwd", lambda q, k, v, softmax_scale, causal: None, "return_lse"),
        ("xformers", "memory_efficient_attention_backward", None, "has no memory_efficient_attention_backward"),
        ("xformers", "flash", None, "has no operator flash"),
    ],
)
def test_another_release_is_refused_when_loaded(
    name: str, member: str, stub: object, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[MODULES[name]], member, stub)
    with pytest.raises(PlanError, match=fault) as caught:
        TABLE[name].load(KernelConfig(causal=True, scale=0.5))
    assert str(caught.value).endswith(TABLE[name].remedy)
