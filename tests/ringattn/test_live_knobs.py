"""Every knob is live: turning it changes what executes (kernels, allocations, saved tensors), not only a field."""

from __future__ import annotations

from collections import Counter
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from counted_pool import CountedPool
from oracle import DENSE, Case, assert_equal_to, exact, found, pattern_of
from recorder import Allocations, Record, record, saved_tensors
from torch import Tensor

from ringattn import RingAttention
from ringattn.geometry import calls
from ringattn.geometry.pattern import window_bounds
from ringattn.kernels.contract import BlockKernel, KernelConfig, KernelNeed
from ringattn.kernels.registry import KERNELS
from ringattn.runtime import merge, workspace
from ringattn.workload import BranchTunables, Tunables

PATTERN = pattern_of([16, 32], [1, 2])
CASE = Case(96, 4, 2, 8, 2, PATTERN, causal=True)
BASE = Tunables("fp32", (BranchTunables("math", "math"), BranchTunables("math", "math", "view")))
COPYING = replace(BASE, branches=(BranchTunables("math", "math"), BranchTunables("math", "math", "copy")))


@pytest.fixture
def executed(monkeypatch: pytest.MonkeyPatch) -> Record:
    return record(monkeypatch)


@pytest.fixture
def pool(monkeypatch: pytest.MonkeyPatch) -> CountedPool:
    fresh = CountedPool()
    monkeypatch.setattr(workspace, "POOL", fresh)
    return fresh


def train(tunables: Tunables, case: Case = CASE, name: str = "fp32") -> Any:
    """Forward and backward under ``tunables``, checked against the oracle."""
    dtype = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}[name]
    module = case.running(tunables, name)
    q, k, v = case.inputs(dtype)
    results = found(module, q, k, v, case.dout(dtype))
    tolerance = {"fp64": 1e-10, "fp32": 2e-5, "bf16": 0.1}[name]
    assert_equal_to(results, exact(case, q, k, v, case.dout(dtype)), tolerance)
    return module


def test_every_field_of_a_plan_has_a_test_here() -> None:
    """A new knob fails this until it has one."""
    tested = {"dtype", "branches", "checkpoint", "window_tokens", "pattern_cache", "pool_threshold_mib"}
    tested |= {"pool_strategy", "compile", "params"}
    of_several_ranks = {"schedule", "layout", "ulysses", "head_groups", "grad_wire", "exchange"}  # tests/ring
    of_gpus = {"launch"}  # runtime/test_graphed_gpu.py
    of_documents = {"packing"}  # test_documents.py
    assert {field.name for field in fields(Tunables)} == tested | of_several_ranks | of_gpus | of_documents
    assert {field.name for field in fields(BranchTunables)} == {"forward", "backward", "gather"}


def test_forward_kernel(executed: Record) -> None:
    for name in ("math", "flash-cpu"):
        executed.clear()
        train(replace(BASE, branches=tuple(replace(branch, forward=name) for branch in BASE.branches)))
        assert Counter(call.name for call in executed.calls if call.direction == "forward") == {name: 3}
        assert executed.count("backward", "math") == 3


def test_backward_kernel(executed: Record) -> None:
    for name in ("math", "flash-cpu"):
        executed.clear()
        train(replace(BASE, branches=tuple(replace(branch, backward=name) for branch in BASE.branches)))
        assert Counter(call.name for call in executed.calls if call.direction == "backward") == {name: 3}
        assert executed.count("forward", "math") == 3


@pytest.mark.parametrize("branch", [0, 1])
def test_kernels_are_chosen_branch_by_branch(executed: Record, branch: int) -> None:
    branches = list(BASE.branches)
    branches[branch] = replace(branches[branch], forward="flash-cpu")
    train(replace(BASE, branches=tuple(branches)))
    called = [call.name for call in executed.calls if call.direction == "forward"]
    assert (
        called == [["flash-cpu", "math", "math"], ["math", "flash-cpu", "flash-cpu"]][branch]
    )  # branch 1: two offsets


@pytest.mark.parametrize("pattern", [DENSE, PATTERN], ids=str)
@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_compute_dtype(executed: Record, compute: str, pattern: Any) -> None:
    dtypes = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
    case = replace(CASE, pattern=pattern)
    q, k, v = case.inputs(torch.float32)
    results = found(case.module(dtype=dtypes[compute], backend="math"), q, k, v, case.dout(torch.float32))
    for call in executed.calls:
        read = call.tensors[:-1] if call.direction == "backward" else call.tensors
        assert {x.dtype for x in read} == {dtypes[compute]}
    assert results.out.dtype is torch.float32


def test_compute_dtype_of_a_profile(executed: Record) -> None:
    for compute in ("bf16", "fp32"):
        executed.clear()
        train(replace(BASE, dtype=compute), name="bf16")
        assert {call.tensors[0].dtype for call in executed.calls} == {
            torch.bfloat16 if compute == "bf16" else torch.float32
        }


def test_gather(executed: Record) -> None:
    q_like: list[int] = []
    for tunables in (BASE, COPYING):
        executed.clear()
        q, k, v = CASE.inputs(torch.float32)
        module = CASE.running(tunables, "fp32")
        module(q, k, v)
        q_like.append(sum(call.lies_in(q, k, v) for call in executed.calls))
    assert q_like == [3, 1]  # branch 1: two offsets in place, or one gathered call
    assert executed.steps["gather"] == 1


def test_pattern_cache(executed: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[object] = []
    monkeypatch.setattr(calls, "window_bounds", lambda *a: (built.append(a), window_bounds(*a))[1])
    for cached, times in ((True, 1), (False, 6)):
        calls.cached_geometry.cache_clear()
        built.clear()
        module = CASE.running(replace(BASE, pattern_cache=cached), "fp32")
        for _ in range(3):
            q, k, v = CASE.inputs(torch.float32)
            found(module, q, k, v, CASE.dout(torch.float32))
        assert len(built) == times
        assert calls.cached_geometry.cache_info().currsize == (1 if cached else 0)


def test_pool_threshold(pool: CountedPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workspace, "_MIB", 2048)  # so that small tensors are on both sides of "1 MiB"

    def lent(threshold: int | None) -> tuple[int, int]:
        pool.clear()
        pool.allocated = pool.reused = 0
        for _ in range(2):
            train(replace(COPYING, pool_threshold_mib=threshold))
        return pool.allocated, pool.reused

    assert lent(None) == (0, 0)
    assert lent(1000) == (0, 0)
    everything, large = lent(0), lent(1)
    assert everything[0] > large[0] > 0  # rows are larger than that, their LSE is smaller
    assert large[1] > 0


def test_a_pool_saves_allocations() -> None:
    """torch is asked for less memory on the second call."""

    def asked_for(threshold: int | None) -> int:
        module = CASE.running(replace(COPYING, pool_threshold_mib=threshold), "fp32", mode="train")
        q, k, v = CASE.inputs(torch.float32)
        module(q, k, v)
        with Allocations() as made:
            module(q, k, v)
        return sum(made.sizes)

    rows = 2 * 3 * 16 * 8 * 4  # of a (2, 96 / 2, heads, 8) float32 tensor, per head
    weights = 2 * 96 * 4 * 4  # of every position and head, float32, in the merge
    assert asked_for(None) - asked_for(0) == rows * (4 + 2 + 2) + weights


def test_pool_strategy(pool: CountedPool) -> None:
    def allocated(strategy: str) -> int:
        pool.clear()
        pool.allocated = 0
        tunables = replace(COPYING, pool_threshold_mib=0, pool_strategy=strategy)
        base = Case(1000, 4, 2, 8, 1, PATTERN, causal=True)
        module = base.running(tunables, "fp32")
        for length in (1000, 1010, 1020):
            q, k, v = replace(base, length=length).inputs(torch.float32)
            module(q, k, v)
        return pool.allocated

    assert allocated("bucket") < allocated("shape")


def test_checkpoint(executed: Record) -> None:
    kept: dict[str, tuple[int, int]] = {}
    for checkpoint in ("none", "selective", "full"):
        executed.clear()
        q, k, v = CASE.inputs(torch.float32)
        module = CASE.running(replace(COPYING, checkpoint=checkpoint), "fp32")
        with saved_tensors() as saved:
            out = module(q, k, v)
        out.backward(CASE.dout(torch.float32))
        kept[checkpoint] = len(saved), executed.count("forward")
    assert kept == {"none": (8, 2), "selective": (5, 2), "full": (3, 4)}


def test_window(executed: Record) -> None:
    largest = {}
    for window in (None, 32):
        executed.clear()
        module = CASE.running(replace(COPYING, window_tokens=window), "fp32")
        q, k, v = CASE.inputs(torch.float32)
        with Allocations() as made:
            module(q, k, v)
        largest[window] = max(call.tensors[0].numel() for call in executed.calls)
        assert executed.steps["merge"] == (1 if window is None else 3)
        assert made.sizes
    assert largest[None] >= 3 * largest[32]


def test_window_bounds_the_workspace(pool: CountedPool) -> None:
    held = {}
    for window in (None, 32):
        pool.clear()
        train(replace(COPYING, window_tokens=window, pool_threshold_mib=0))
        held[window] = pool.held_bytes()
    # A third of the rows; the buffer of a window's weights is one more, where that of all has the size of another.
    assert 0 < 2.5 * held[32] < held[None]


@pytest.mark.parametrize("backward", [False, True])
def test_compile(executed: Record, monkeypatch: pytest.MonkeyPatch, backward: bool) -> None:
    """The steps between kernels run as what torch.compile made of them (here by its plainest backend)."""
    compiled: Counter[str] = Counter()
    torch_compile = torch.compile

    def compiling(step: Any, **options: Any) -> Any:
        assert options == {"dynamic": True}
        made = torch_compile(step, backend="eager", **options)

        def run(*arguments: Tensor) -> Any:
            compiled[step.__name__] += 1
            return made(*arguments)

        return run

    monkeypatch.setattr(merge.torch, "compile", compiling)
    train(BASE)
    assert not compiled
    module = CASE.running(replace(BASE, compile=True), "fp32")
    q, k, v = CASE.inputs(torch.float32)
    if not backward:
        module(q, k, v)
        assert compiled == {"_raise_peak": 3, "_add_weight": 3, "_add_weighted": 3}
        return
    results = found(module, q, k, v, CASE.dout(torch.float32))
    assert compiled == {"_raise_peak": 3, "_add_weight": 3, "_add_weighted": 3, "_add": 9}
    assert_equal_to(results, exact(CASE, q, k, v, CASE.dout(torch.float32)), 2e-5)


def test_params(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel with a parameter is handed the value of the plan."""
    handed: list[Any] = []
    math = KERNELS["math"]

    def load(config: KernelConfig) -> Any:
        handed.append(dict(config.params))
        return math.load(replace(config, params={}))

    def params(need: KernelNeed) -> dict[str, tuple[int, ...]]:
        return {"tile": (64, 128)} if not need.backward else {}

    tunable = BlockKernel("math", "", math.reasons, load, params)
    monkeypatch.setitem(KERNELS, "math", tunable)  # type: ignore[arg-type]
    for value in (None, 128):
        handed.clear()
        given = () if value is None else (("math.tile", value),)
        train(replace(BASE, params=given))
        assert handed
        assert all(params == ({} if value is None else {"tile": value}) for params in handed)


# --- arguments of the module ------------------------------------------------------------------------------------------


def outputs(**arguments: Any) -> Tensor:
    case = arguments.pop("case", CASE)
    out = case.module(**arguments)(*(x.detach() for x in case.inputs()))
    assert isinstance(out, Tensor)
    return out


@pytest.mark.parametrize(
    "arguments",
    [
        {"causal": False},
        {"scale": 0.7},
        {"head_offset": "blocked"},
        {"segment_lengths": [16, 48]},
        {"dilation_rates": [1, 4]},
        {"segment_lengths": None, "dilation_rates": None},
    ],
    ids=str,
)
def test_arguments_of_the_attention_change_the_result(arguments: dict[str, Any]) -> None:
    plain: dict[str, Any] = {
        "num_heads": 4,
        "head_dim": 8,
        "num_kv_heads": 4,
        "segment_lengths": [16, 32],
        "dilation_rates": [1, 2],
        "causal": True,
        "profile": None,
        "device": "cpu",
    }
    case = replace(CASE, kv_heads=4)
    inputs = [x.detach() for x in case.inputs()]
    assert not torch.equal(RingAttention(**plain)(*inputs), RingAttention(**(plain | arguments))(*inputs))


def test_backend_argument(executed: Record) -> None:
    for backend, names in (("math", ("math", "math")), (("flash-cpu", "math"), ("flash-cpu", "math"))):
        executed.clear()
        q, k, v = CASE.inputs(torch.float32)
        found(CASE.module(backend=backend), q, k, v, CASE.dout(torch.float32))
        for direction, name in zip(("forward", "backward"), names, strict=True):
            assert {call.name for call in executed.calls if call.direction == direction} == {name}


def test_profile_argument(executed: Record) -> None:
    q, k, v = (x.detach() for x in CASE.inputs(torch.float32))
    CASE.module(profile=None)(q, k, v)
    assert {call.name for call in executed.calls} == {"flash-cpu"}
    executed.clear()
    infer = replace(BASE, branches=tuple(replace(branch, backward="") for branch in BASE.branches))
    CASE.running(infer, "fp32", "infer")(q, k, v)
    assert {call.name for call in executed.calls} == {"math"}


def test_the_recorder_would_notice_a_dead_knob(executed: Record) -> None:
    """The tests above rest on this: equal plans execute equally."""
    seen = []
    for _ in range(2):
        executed.clear()
        train(BASE)
        seen.append([(call.name, call.direction, call.shape) for call in executed.calls])
    assert seen[0] == seen[1]
