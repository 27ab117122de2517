"""The module under torch.compile: one graph, the eager results, and the same answers to what cannot be done."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle import DENSE, Case, assert_equal_to, exact, found, pattern_of
from recorder import record
from torch import Tensor, nn

from ringattn import Pattern, RingAttention
from ringattn.autograd import torch_compile as compiled
from ringattn.errors import InputError, RingAttentionError
from ringattn.planning import module_setup
from ringattn.planning.table import PlanTable
from ringattn.workload import BranchTunables, Tunables

PATTERNS = [DENSE, pattern_of([8], [1]), pattern_of([8, 16], [1, 2])]
CASE = Case(24, 4, 2, 8, 2, PATTERNS[2], causal=True)


def whole(module: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(module, fullgraph=True, **({"backend": "aot_eager"} | options))


def same(one: Any, other: Any) -> bool:
    return all(torch.equal(x, y) for x, y in zip(one, other, strict=True))


@pytest.mark.parametrize("pattern", PATTERNS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_forward_and_backward_are_those_of_eager_mode(pattern: Pattern, dtype: torch.dtype) -> None:
    case = replace(CASE, pattern=pattern)
    module = case.module()
    q, k, v = case.inputs(dtype)
    results = found(whole(module), q, k, v, case.dout(dtype))
    assert same(results, found(module, q, k, v, case.dout(dtype)))
    assert results.lse.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)


def test_float64_is_exact() -> None:
    q, k, v = CASE.inputs()
    assert_equal_to(found(whole(CASE.module()), q, k, v, CASE.dout()), exact(CASE, q, k, v, CASE.dout()))


@pytest.mark.parametrize("layout", ["heads_first", "packed", "every_second", "last_strided", "backwards_axes"])
@pytest.mark.parametrize("backend", ["math", "flash-cpu"])
def test_layouts(layout: str, backend: str) -> None:
    case = replace(CASE, layout=layout)
    module = case.module(backend=backend)
    q, k, v = case.inputs(torch.float32)
    dout = case.dout(torch.float32)
    assert same(found(whole(module), q, k, v, dout), found(module, q, k, v, dout))


def test_an_expanded_gradient() -> None:
    module = CASE.module()
    q, k, v = CASE.inputs()
    expected = torch.autograd.grad(module(q, k, v).sum(), (q, k, v))
    assert same(torch.autograd.grad(whole(lambda *x: module(*x).sum())(q, k, v), (q, k, v)), expected)


@pytest.mark.parametrize("needed", [(True, False, False), (False, True, True)])
def test_frozen_inputs(needed: tuple[bool, ...]) -> None:
    inputs = [x.detach().requires_grad_(need) for x, need in zip(CASE.inputs(), needed, strict=True)]
    module = CASE.module()
    wanted = [x for x in inputs if x.requires_grad]
    expected = torch.autograd.grad(module(*inputs), wanted, CASE.dout())
    assert same(torch.autograd.grad(whole(module)(*inputs), wanted, CASE.dout()), expected)


def test_without_gradients() -> None:
    module = CASE.module()
    q, k, v = CASE.inputs()
    expected = module(q, k, v)
    compiled_module = whole(module)
    with torch.no_grad():
        out = compiled_module(q, k, v)
    assert not out.requires_grad
    assert torch.equal(out, expected)
    with torch.inference_mode():
        assert torch.equal(compiled_module(q, k, v), expected)


@pytest.mark.parametrize("backend", ["math", "flash-cpu"])
@pytest.mark.parametrize("inside", [False, True])
def test_autocast(backend: str, inside: bool) -> None:
    module = CASE.module(backend=backend)
    q, k, v = CASE.inputs(torch.float32)
    dout = CASE.dout(torch.float32)

    def call(attn: Any) -> Any:
        out, lse = attn(q, k, v, return_lse=True)
        return (out, lse, *torch.autograd.grad(out, (q, k, v), dout))

    def narrow(*inputs: Tensor, **options: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return module(*inputs, **options)

    expected = call(narrow)
    assert expected[0].dtype is torch.float32
    if inside:
        results = call(whole(narrow))
    else:
        with torch.autocast("cpu", torch.bfloat16):
            results = call(whole(module))
    assert same(results, expected)
    assert not same(results[:1], call(module)[:1])


def test_lengths_may_change_without_a_graph_for_each() -> None:
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    module = CASE.module()
    attend = whole(module, backend=counting)
    for length in (24, 25, 31, 40, 64):
        case = replace(CASE, length=length)
        q, k, v = (x.detach() for x in case.inputs())
        assert torch.equal(attend(q, k, v), module(q, k, v))
    assert len(graphs) <= 2


def test_a_plan_is_made_once_a_shape_not_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = []
    plan_at = PlanTable.plan_at

    def noting(table: PlanTable, seq_len: int, *arguments: Any) -> Any:
        planned.append(seq_len)
        return plan_at(table, seq_len, *arguments)

    monkeypatch.setattr(PlanTable, "plan_at", noting)
    attend = whole(CASE.module())
    for _ in range(3):
        q, k, v = CASE.inputs()
        attend(q, k, v).backward(CASE.dout())
    assert planned == [24]


class First(nn.Module):
    """A model that begins with attention over what it is given."""

    def __init__(self, attn: RingAttention) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, inputs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        out: Tensor = self.attn(*inputs) + 1
        return out


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, attn: RingAttention) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)
        self.heads = heads
        self.attn = attn

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)) for y in self.project(x).chunk(3, -1))
        out: Tensor = self.attn(q, k, v)
        return x + out.flatten(2)


def test_a_model_of_many_layers_is_one_graph() -> None:
    case = Case(16, 4, 4, 4, pattern=pattern_of([8, 16], [1, 2]), causal=True)
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(16, 4, case.module()) for _ in range(3))).double()
    x = torch.randn(2, 16, 16, dtype=torch.float64, requires_grad=True)
    expected = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    results = torch.autograd.grad(whole(model)(x).sum(), [x, *model.parameters()])
    for grad, eager in zip(results, expected, strict=True):
        torch.testing.assert_close(grad, eager, rtol=0, atol=1e-12)


def test_layers_compiled_one_by_one_share_a_graph() -> None:
    """More layers than dynamo's recompile limit of 8: what differs between them must not be a guard."""
    graphs = []

    def counting(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    layers = [CASE.module() for _ in range(12)]
    inputs = [x.detach() for x in CASE.inputs()]
    for layer in layers:
        assert torch.equal(whole(layer, backend=counting)(*inputs), layer(*inputs))
    assert len(graphs) == 1


def test_modules_of_unequal_configuration_are_told_apart() -> None:
    cases = [CASE, replace(CASE, causal=False), replace(CASE, scale=0.1), replace(CASE, pattern=PATTERNS[1])]
    modules = [case.module() for case in cases] + [CASE.module(dtype=torch.float32), CASE.module(backend="math")]
    assert len({module.digest for module in modules}) == len(modules)
    inputs = [x.detach() for x in CASE.inputs(torch.float32)]
    for module in modules:
        assert torch.equal(whole(module)(*inputs), module(*inputs))


def test_a_digest_serves_as_long_as_one_module_of_its_configuration_lives() -> None:
    case = replace(CASE, scale=0.123)
    first, second = case.module(), case.module()
    digest = first.digest
    assert second.digest == digest
    inputs = [x.detach() for x in case.inputs()]
    expected = first(*inputs)
    del first
    gc.collect()
    assert torch.equal(compiled.attend(*inputs, digest, False)[0], expected)
    del second
    gc.collect()
    with pytest.raises(RingAttentionError, match="that this process does not hold; build the module and keep it"):
        compiled.attend(*inputs, digest, False)


# --- refused ---------------------------------------------------------------------------------------------------------


def test_another_checkpoint_is_refused_in_training_alone() -> None:
    module = CASE.module(checkpoint="full")
    inputs = CASE.inputs()
    frozen = [x.detach() for x in inputs]
    assert torch.equal(whole(module)(*frozen), module(*frozen))
    with pytest.raises(Exception, match=r"checkpoint is 'full', but under torch\.compile and torch\.func q, k,"):
        whole(module)(*inputs)
    assert torch.equal(whole(CASE.module(checkpoint="selective"))(*inputs), CASE.module()(*inputs))


def test_a_plan_whose_checkpoint_is_not_followed_says_so_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module_setup, "_said", set())
    tunables = Tunables("fp64", (BranchTunables("math", "math"),) * 2, checkpoint="full")
    module = CASE.running(tunables)
    attend = whole(module)
    for case in (CASE, replace(CASE, batch=3)):
        q, k, v = case.inputs()
        assert same(found(attend, q, k, v, case.dout()), found(module, q, k, v, case.dout()))
    messages = [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and r.name == "ringattn"]
    assert messages == [
        f"{module.shape}: under torch.compile and torch.func the plan does not decide what is kept for the "
        "backward: its checkpoint full is not followed"
    ]


def test_bad_tensors_are_named() -> None:
    q, k, v = (x.detach() for x in CASE.inputs())
    with pytest.raises(InputError, match="k has 23 positions and q 24"):
        torch.compile(CASE.module(), backend="eager")(q, k[:, :-1], v)
    with pytest.raises(InputError, match=r"k is torch.float32 and q is torch.float64"):
        torch.compile(CASE.module(), backend="eager")(q, k.float(), v)
    with pytest.raises(InputError, match="more than max_seq_len, 16"):
        torch.compile(CASE.module(max_seq_len=16), backend="eager")(q, k, v)


def test_dropout_in_eval_mode_leaves_the_graph_whole() -> None:
    q, k, v = (x.detach() for x in CASE.inputs())
    module = CASE.module(dropout=0.5).eval()
    assert torch.equal(whole(module)(q, k, v), CASE.module()(q, k, v))


# --- the operators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "layout"),
    list(zip(PATTERNS, ("plain", "heads_first", "last_strided"), strict=False)),
    ids=str,
)
def test_the_operators_are_what_torch_expects_of_one(pattern: Pattern, layout: str) -> None:
    case = replace(CASE, pattern=pattern, layout=layout)
    module = case.module()
    q, k, v = case.inputs()
    utils = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static")
    torch.library.opcheck(compiled.attend, (q, k, v, module.digest, True), test_utils=utils)
    q, k, v = (x.detach() for x in (q, k, v))
    out, lse = compiled.attend(q, k, v, module.digest, True)
    arguments = (case.dout(), q, k, v, out, lse, module.digest)
    without_out = (None, *arguments[1:], torch.randn_like(lse))
    for given in (arguments, (*arguments, torch.randn_like(lse)), without_out):
        torch.library.opcheck(compiled.attend_backward, given, test_utils=("test_schema", "test_faketensor"))


def test_the_operators_run_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    executed = record(monkeypatch)
    attend = whole(CASE.module(backend=("flash-cpu", "math")))
    q, k, v = CASE.inputs(torch.float32)
    attend(q, k, v).backward(CASE.dout(torch.float32))
    assert {(call.name, call.direction) for call in executed.calls} == {("flash-cpu", "forward"), ("math", "backward")}
