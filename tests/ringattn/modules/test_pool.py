"""The pool: one module for each kind of call, with the options given, and no more than it may hold."""

from __future__ import annotations

import pytest
import torch
from oracle import Case, cpu

from ringattn import Profile
from ringattn.errors import InputError
from ringattn.modules import pool as pools
from ringattn.modules.pool import AttentionPool
from ringattn.workload import BranchTunables, Tunables


def tensors(heads: int = 4, head_dim: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 3, heads, head_dim), torch.zeros(1, 3, 2, head_dim)


def test_a_kind_of_call_has_one_module() -> None:
    pool = AttentionPool(profile=None)
    q, k = tensors()
    module = pool.module_for(q, k, True, 0.5)
    assert pool.module_for(q[:, :1], k, True, 0.5) is module
    assert (module.shape.heads, module.shape.kv_heads, module.shape.head_dim, module.scale) == (4, 2, 8, 0.5)
    others = {pool.module_for(q, k, False, 0.5), pool.module_for(q, k, True, 0.25), pool.module_for(q, q, True, 0.5)}
    assert len(others | {module}) == 4


def test_deterministic_algorithms_are_a_kind_of_their_own() -> None:
    pool = AttentionPool(profile=None)
    module = pool.module_for(*tensors(), True, None)
    torch.use_deterministic_algorithms(True)
    try:
        assert pool.module_for(*tensors(), True, None) is not module
    finally:
        torch.use_deterministic_algorithms(False)


def test_the_oldest_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "MOST_KINDS", 2)
    pool = AttentionPool(profile=None)
    first, second, third = (pool.module_for(*tensors(), True, scale) for scale in (0.1, 0.2, 0.3))
    assert pool.module_for(*tensors(), True, 0.2) is second
    assert pool.module_for(*tensors(), True, 0.3) is third
    assert pool.module_for(*tensors(), True, 0.1) is not first


def test_profiles_serve() -> None:
    case = Case(16, 4, 2, 8, causal=True)
    plan = Tunables("fp32", (BranchTunables("math", "flash-cpu"),))
    pool = AttentionPool(profile=Profile.single(cpu(), case.workload("fp32", "train"), plan))
    module = pool.module_for(*tensors(), True, None)
    assert module.plan_for(16, torch.float32, train=True).tunables == plan


def test_an_option_that_a_call_decides_is_refused() -> None:
    with pytest.raises(InputError, match=r"^causal is no option here; the options are backend, checkpoint, "):
        AttentionPool(causal=True)


def test_a_tensor_without_data_is_refused() -> None:
    with pytest.raises(InputError, match=r"^q is on meta"):
        AttentionPool(profile=None).module_for(*(x.to("meta") for x in tensors()), True, None)
