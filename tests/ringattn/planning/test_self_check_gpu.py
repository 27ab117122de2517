"""Accuracy checks on a CUDA device: what the kernels of this machine are, captures, streams, and heads above 128."""

from __future__ import annotations

import pytest
import torch

from ringattn import RingAttention, detect
from ringattn.errors import PlanError, RingAttentionError
from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import Combination
from ringattn.kernels.registry import KERNELS, KernelNeed
from ringattn.planning.validation.accuracy_check import check_all
from ringattn.planning.validation.validation_memory import user_memory

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module")
def facts() -> HardwareFacts:
    return detect("cuda:0")


def need(facts: HardwareFacts, asked: Combination) -> KernelNeed:
    heads = 4 if asked.grouped else 2
    return KernelNeed(
        facts.vendor, facts.arch, asked.dtype, asked.head_dim, heads, 2, 200, 1, asked.causal, asked.backward
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("head_dim", [40, 64, 128, 192, 256])
def test_what_the_rules_allow_is_right(facts: HardwareFacts, head_dim: int, dtype: str) -> None:
    asked = [
        Combination(name, head_dim, dtype, backward, causal, grouped)
        for name in KERNELS
        for backward in (False, True)
        for causal in (False, True)
        for grouped in (False, True)
    ]
    allowed = [a for a in asked if not KERNELS[a.kernel].unsupported_reasons(need(facts, a), facts)]
    verdicts = check_all(allowed, CUDA)
    assert [f"{a}: {verdict.reason}" for a, verdict in verdicts.items() if not verdict.passes] == []
    figures = [figure for verdict in verdicts.values() for figure in verdict.figures]
    assert all(figure.error < figure.bound / 2 for figure in figures)


def test_heads_above_128_run_on_cudnn_on_hopper(facts: HardwareFacts) -> None:
    if facts.arch != "sm_90":
        pytest.skip("a rule for sm_90")
    module = RingAttention(16, 256, 4, causal=True, profile=None, device=CUDA)
    q, k, v = (torch.randn(1, 2111, h, 256, device=CUDA, dtype=torch.bfloat16, requires_grad=True) for h in (16, 4, 4))
    module(q, k, v).sum().backward()
    branch = module.plan_for(2111, torch.bfloat16, train=True).tunables.branches[0]
    assert (branch.forward, branch.backward) == ("cudnn", "cudnn")


def test_flash_attn_4_is_refused_where_it_is_wrong(facts: HardwareFacts) -> None:
    if facts.arch != "sm_90" or dict(facts.software).get("flash_attn.cute") != "4.0.0b36":
        pytest.skip("a fault of flash-attn-4 4.0.0b36 on sm_90")
    wrong = Combination("flash-attn-4", 40, "bf16", True, True, False)
    assert "dq errs by" in check_all([wrong], CUDA)[wrong].reason  # the check alone would find it
    with pytest.raises(PlanError, match=r"head_dim 40: dq is wrong"):
        RingAttention(4, 40, causal=True, profile=None, device=CUDA, backend="flash-attn-4").plan_for(64, "bf16", True)


def test_a_capture_needs_a_warm_up() -> None:
    module = RingAttention(4, 64, causal=True, profile=None, device=CUDA, backend="efficient")
    q = torch.randn(1, 256, 4, 64, device=CUDA, dtype=torch.bfloat16)
    with pytest.raises(RingAttentionError, match=r"call warmup\(\)"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        module(q, q, q)
    torch.cuda.synchronize()
    module.warmup([256], torch.bfloat16)
    expected = module(q, q, q)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module(q, q, q)
    graph.replay()
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_a_check_is_made_on_a_stream_of_its_own() -> None:
    side = torch.cuda.Stream(CUDA)
    with torch.cuda.stream(side), torch.autocast("cuda", torch.float16):
        module = RingAttention(4, 64, causal=True, profile=None, device=CUDA)
        q = torch.randn(1, 256, 4, 64, device=CUDA)
        out = module(q, q, q)
        assert torch.cuda.current_stream() == side
    torch.cuda.synchronize()
    assert out.dtype is torch.float32
    assert user_memory().verdicts()
    assert all(verdict.passes for verdict in user_memory().verdicts().values())
