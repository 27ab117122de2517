"""Calls replayed from CUDA graphs: the same numbers as without, however many are in flight and in whichever order."""

from __future__ import annotations

import gc
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ringattn import Profile, RingAttention, Workload, detect
from ringattn.runtime import graphed
from ringattn.runtime.graphed import GraphedProgram
from ringattn.tunables import BranchTunables, Tunables
from ringattn.workload import Pattern

pytestmark = pytest.mark.gpu
HEADS, HEAD_DIM = 4, 64
DENSE, DILATED = Pattern(), Pattern.of([64, 128], [1, 2])


def module(pattern: Pattern = DENSE, launch: str = "graph", kernel: str = "flash", **more: Any) -> RingAttention:
    """A module that runs these tunables in training and in inference."""
    branches = tuple(BranchTunables(kernel, kernel) for _ in pattern.branches or (None,))
    plan = Tunables("bf16", branches, launch=launch)
    infer = replace(plan, branches=tuple(replace(branch, backward="") for branch in branches))
    facts = detect()
    workload = Workload("train", True, 256, HEADS, HEAD_DIM, "bf16", pattern=pattern)
    train = Profile.single(facts, workload, plan)
    profile = replace(train, plans=(*train.plans, *Profile.single(facts, replace(workload, mode="infer"), infer).plans))
    lists = {} if pattern.dense else {"segment_lengths": [64, 128], "dilation_rates": [1, 2]}
    return RingAttention(HEADS, HEAD_DIM, causal=True, profile=profile, device="cuda", **lists, **more)


def inputs(seed: int, length: int = 256, grad: bool = True) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    made = [
        torch.randn(1, length, HEADS, HEAD_DIM, generator=generator, device="cuda", dtype=torch.bfloat16)
        for _ in range(4)
    ]
    return [*(x.requires_grad_(grad) for x in made[:3]), made[3]]


def programs(attn: RingAttention) -> list[GraphedProgram]:
    return [program for program in attn._programs.values() if isinstance(program, GraphedProgram)]


def captured(attn: RingAttention) -> int:
    return sum(graph is not None for program in programs(attn) for graph in program._graphs.values())


def both(attn: RingAttention, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> list[Tensor]:
    out, lse = attn(q, k, v, return_lse=True)
    return [out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout)]


def assert_same(found: list[Tensor], wanted: list[Tensor]) -> None:
    for x, y in zip(found, wanted, strict=True):
        torch.testing.assert_close(x, y, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("pattern", [DENSE, DILATED], ids=["dense", "dilated"])
def test_every_call_gives_what_it_gives_without_graphs(pattern: Pattern) -> None:
    eager, attn = module(pattern, "eager"), module(pattern)
    for seed in range(5):
        assert_same(both(attn, *inputs(seed)), both(eager, *inputs(seed)))
    assert captured(attn) == 2  # forward, and the backward of the latest forward


@pytest.mark.parametrize("pattern", [DENSE, DILATED], ids=["dense", "dilated"])
def test_inference_is_replayed(pattern: Pattern) -> None:
    eager, attn = module(pattern, "eager"), module(pattern)
    for seed in range(4):
        q, k, v, _ = inputs(seed, grad=False)
        assert_same([attn(q, k, v)], [eager(q, k, v)])
    assert captured(attn) == 1


def test_calls_in_flight_keep_their_own_results() -> None:
    eager, attn = module(launch="eager"), module()
    for _ in range(2):
        both(attn, *inputs(9))
    calls = [inputs(seed) for seed in range(4)]
    outs = [attn(*call[:3]) for call in calls]
    kept = [out.detach().clone() for out in outs]
    for number in (2, 0, 3, 1):
        grads = torch.autograd.grad(outs[number], calls[number][:3], calls[number][3])
        wanted = both(eager, *calls[number])
        assert_same([outs[number].detach(), *grads], [wanted[0], *wanted[2:]])
    assert all(torch.equal(out, copy) for out, copy in zip(outs, kept, strict=True))


def test_streams_take_turns() -> None:
    attn = module()
    both(attn, *inputs(0))
    wanted = [[x.clone() for x in both(attn, *inputs(seed))] for seed in range(6)]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in range(3)]
    found = []
    for seed in range(6):
        call = inputs(seed)
        streams[seed % 3].wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(streams[seed % 3]):
            found.append(both(attn, *call))
    torch.cuda.synchronize()
    for x, y in zip(found, wanted, strict=True):
        assert_same(x, y)


def test_threads_take_turns() -> None:
    attn = module()
    both(attn, *inputs(0))
    wanted = [both(attn, *inputs(seed)) for seed in range(8)]

    def call(seed: int) -> list[Tensor]:
        with torch.cuda.stream(torch.cuda.Stream()):
            found = both(attn, *inputs(seed))
            torch.cuda.current_stream().synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for x, y in zip(pool.map(call, range(8)), wanted, strict=True):
            assert_same(x, y)


@pytest.mark.parametrize("frozen", [(0,), (1, 2), (0, 2)])
def test_frozen_inputs_get_no_gradient(frozen: tuple[int, ...]) -> None:
    eager, attn = module(launch="eager"), module()
    for seed in range(3):
        *qkv, dout = inputs(seed)
        for number in frozen:
            qkv[number].requires_grad_(False)
        leaves = [x for x in qkv if x.requires_grad]
        assert_same(
            list(torch.autograd.grad(attn(*qkv), leaves, dout)), list(torch.autograd.grad(eager(*qkv), leaves, dout))
        )


def test_a_loss_of_lse_has_its_gradient() -> None:
    eager, attn = module(launch="eager"), module()
    for seed in range(3):
        q, k, v, _ = inputs(seed)
        found, wanted = (torch.autograd.grad(m(q, k, v, return_lse=True)[1].sum(), (q, k)) for m in (attn, eager))
        assert_same(list(found), list(wanted))


def test_gradients_and_inputs_of_any_strides() -> None:
    eager, attn = module(launch="eager"), module()
    for seed in range(3):
        packed = torch.stack(inputs(seed)[:3], 2).detach().requires_grad_()
        found = [torch.autograd.grad(m(*packed.unbind(2)).sum(), packed)[0] for m in (attn, eager)]
        assert_same(found[:1], found[1:])


def test_shapes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphed, "MOST_GRAPHS", 3)
    eager, attn = module(launch="eager"), module()
    for length in (200, 216, 232, 248, 264, 280):
        for seed in range(3):
            q, k, v, _ = inputs(seed, length, grad=False)
            assert_same([attn(q, k, v)], [eager(q, k, v)])
    (program,) = programs(attn)
    assert len(program._graphs) <= 3


def test_it_steps_aside_inside_a_capture() -> None:
    attn = module()
    q, k, v, _ = inputs(0, grad=False)
    wanted = [attn(q, k, v) for _ in range(3)][-1]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attn(q, k, v)
    out.zero_()
    graph.replay()
    assert torch.equal(out, wanted)


def test_it_steps_aside_inside_torch_compile() -> None:
    attn = module()
    compiled = torch.compile(lambda *x: attn(*x) * 2)
    eager = module(launch="eager")
    for seed in range(3):
        q, k, v, _ = inputs(seed, grad=False)
        assert_same([compiled(q, k, v)], [eager(q, k, v) * 2])


def test_modules_may_come_and_go() -> None:
    """The last graph of a module that is gone takes the memory pool with it."""
    q, k, v, dout = inputs(0)
    for _ in range(3):
        attn = module()
        for _ in range(graphed.CALLS_BEFORE_REPLAY + 1):
            both(attn, q, k, v, dout)
        assert captured(attn)
        del attn
        gc.collect()
