"""The workspace pool: what is lent comes back to the same stream and size, and is never lent twice at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from counted_pool import CountedPool
from hypothesis import given
from hypothesis import strategies as st
from oracle import Case, assert_equal_to, exact, found, pattern_of

from ringattn.runtime import workspace
from ringattn.runtime.workspace import Lease, size_class
from ringattn.workload import BranchTunables, Tunables

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def pool(monkeypatch: pytest.MonkeyPatch) -> CountedPool:
    fresh = CountedPool()
    monkeypatch.setattr(workspace, "POOL", fresh)
    return fresh


@given(st.integers(1, 2**40))
def test_size_classes_hold_their_sizes_and_waste_little(nbytes: int) -> None:
    rounded = size_class(nbytes)
    assert rounded >= nbytes
    assert rounded <= max(4096, nbytes * 1.125)
    assert size_class(rounded) == rounded
    assert size_class(nbytes + 1) >= rounded


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("strategy", ["shape", "bucket"])
def test_a_lent_tensor_is_what_was_asked_for(dtype: torch.dtype, strategy: str) -> None:
    lease = Lease(CPU, 0, strategy)
    x = lease.empty((3, 5, 7), dtype)
    assert (x.shape, x.dtype, x.is_contiguous()) == ((3, 5, 7), dtype, True)
    x.fill_(2)
    y = lease.empty((3, 5, 7), dtype)
    y.fill_(3)
    assert (x == 2).all()  # not lent twice
    lease.close()


def test_what_came_back_is_lent_again(pool: CountedPool) -> None:
    lease = Lease(CPU, 0, "shape")
    address = lease.empty((64,), torch.float32).data_ptr()
    lease.close()
    assert pool.held_bytes() == 256
    lease = Lease(CPU, 0, "shape")
    assert lease.empty((32,), torch.float64).data_ptr() == address  # as many bytes, another type
    assert lease.empty((64,), torch.float32).data_ptr() != address
    lease.close()
    assert (pool.allocated, pool.reused) == (2, 1)
    pool.clear()
    assert pool.held_bytes() == 0


def test_by_shape_only_the_same_size_is_reused_by_bucket_a_near_one(pool: CountedPool) -> None:
    for strategy, allocated in (("shape", 2), ("bucket", 1)):
        pool.clear()
        pool.allocated = 0
        for elements in (10_000, 10_100):
            lease = Lease(CPU, 0, strategy)
            lease.empty((elements,), torch.float32)
            lease.close()
        assert pool.allocated == allocated


def test_below_the_threshold_and_without_one_nothing_is_pooled(pool: CountedPool) -> None:
    for threshold in (None, 1):
        lease = Lease(CPU, threshold, "shape")
        lease.empty((2**18 - 1,), torch.float32)
        lease.close()
    assert (pool.allocated, pool.held_bytes()) == (0, 0)
    lease = Lease(CPU, 1, "shape")
    lease.empty((2**18,), torch.float32)  # 1 MiB exactly
    lease.close()
    assert (pool.allocated, pool.held_bytes()) == (1, 2**20)


def test_nothing_is_lent_for_no_elements(pool: CountedPool) -> None:
    assert Lease(CPU, 0, "bucket").empty((0, 4), torch.float32).shape == (0, 4)
    assert pool.allocated == 0


def test_after_an_error_the_buffers_just_die(pool: CountedPool) -> None:
    lease = Lease(CPU, 0, "shape")
    lease.empty((64,), torch.float32)
    del lease
    assert pool.held_bytes() == 0


def test_buffers_made_in_inference_mode_serve_training() -> None:
    with torch.inference_mode():
        lease = Lease(CPU, 0, "shape")
        lease.empty((4,), torch.float32)
        lease.close()
    x = Lease(CPU, 0, "shape").empty((4,), torch.float32)
    assert not x.is_inference()
    x.copy_(torch.ones(4, requires_grad=True))  # what an inference tensor would refuse


def pooled_case() -> tuple[Case, Tunables]:
    branches = (BranchTunables("math", "math", "copy"), BranchTunables("math", "math", "copy"))
    return Case(32, 4, 2, 4, 2, pattern_of([8, 32], [2, 4]), causal=True), Tunables(
        "fp64", branches, pool_threshold_mib=0, pool_strategy="bucket"
    )


def test_inference_then_training_on_one_pool(pool: CountedPool) -> None:
    case, tunables = pooled_case()
    module = case.running(tunables)
    q, k, v = case.inputs()
    expected = exact(case, q, k, v, case.dout())
    for _ in range(2):
        with torch.inference_mode():
            module(q, k, v)
        assert_equal_to(found(module, q, k, v, case.dout()), expected)
    assert pool.reused > 0


def test_no_result_and_nothing_saved_lies_in_the_pool(pool: CountedPool) -> None:
    case, tunables = pooled_case()
    module = case.running(tunables)
    q, k, v = case.inputs()
    saved: list[int] = []

    def pack(x: torch.Tensor) -> torch.Tensor:
        saved.append(x.untyped_storage().data_ptr())
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        results = found(module, q, k, v, case.dout())
    pooled = {buffer.untyped_storage().data_ptr() for kept in pool._free.values() for buffer in kept}
    assert pooled
    assert pooled.isdisjoint(saved)
    assert pooled.isdisjoint(x.untyped_storage().data_ptr() for x in results)
    kept = [x.clone() for x in results]
    for buffers in pool._free.values():
        for buffer in buffers:
            buffer.fill_(255)  # NaN, as floats
    assert all(torch.equal(x, y) for x, y in zip(results, kept, strict=True))
    again = found(module, q, k, v, case.dout())  # and what lay in a buffer matters to nobody
    assert all(torch.equal(x, y) for x, y in zip(results, again, strict=True))


def test_threads_are_never_lent_one_buffer(pool: CountedPool) -> None:
    def work(number: int) -> None:
        for _ in range(200):
            lease = Lease(CPU, 0, "shape")
            tensors = [lease.empty((16,), torch.int64).fill_(number * 10 + i) for i in range(3)]
            assert all((x == number * 10 + i).all() for i, x in enumerate(tensors))
            lease.close()

    with ThreadPoolExecutor(6) as threads:
        list(threads.map(work, range(6)))
    assert pool.allocated <= 18
    assert pool.held_bytes() == pool.allocated * 128
