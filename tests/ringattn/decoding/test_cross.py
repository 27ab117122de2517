"""``cross`` is attention of queries at other positions than the keys: out, LSE and gradients, against float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cross_oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DENSE, laid_out, lists_of, pattern_of, patterns
from torch import Tensor

from ringattn import Pattern, RingAttention
from ringattn.errors import InputError, PlanError, RingAttentionError


@dataclass(frozen=True)
class CrossCase:
    """One shape; queries and keys of two lengths."""

    queries: int
    keys: int
    pattern: Pattern = DENSE
    causal: bool = True
    align: Any = "end"
    heads: int = 2
    kv_heads: int = 2
    batch: int = 1
    head_dim: int = 4
    layout: str = "plain"
    seed: int = 0

    def inputs(self, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        shapes = ((self.queries, self.heads), (self.keys, self.kv_heads), (self.keys, self.kv_heads))
        made = [
            torch.randn(self.batch, s, h, self.head_dim, generator=generator, dtype=torch.float64).to(dtype)
            for s, h in shapes
        ]
        q, k, v = (laid_out(x, self.layout).requires_grad_() for x in made)
        return q, k, v

    def module(self, **arguments: Any) -> RingAttention:
        lists = {} if self.pattern.dense else lists_of(self.pattern)
        given: dict[str, Any] = {"profile": None, "device": "cpu", "causal": self.causal}
        return RingAttention(self.heads, self.head_dim, self.kv_heads, **lists, **(given | arguments))

    def counts(self) -> Tensor:
        begin = self.keys - self.queries if self.align == "end" else 0
        positions = torch.arange(begin, begin + self.queries)
        return cross_oracle.counts(
            self.pattern, self.causal, positions, torch.arange(self.keys), self.heads, self.kv_heads
        )


def check(case: CrossCase, tolerance: float = 1e-10, dtype: torch.dtype = torch.float64, **arguments: Any) -> None:
    q, k, v = case.inputs(dtype)
    out, lse = case.module(**arguments).cross(q, k, v, align=case.align, return_lse=True)
    expected, expected_lse = cross_oracle.attend(q, k, v, case.counts())
    assert out.shape == q.shape
    assert out.dtype is dtype
    assert lse.shape == (case.batch, case.heads, case.queries)
    assert torch.equal(lse.isneginf(), expected_lse.isneginf())
    finite = ~lse.isneginf()
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse[finite].double(), expected_lse[finite], atol=tolerance, rtol=tolerance)
    generator = torch.Generator().manual_seed(7)
    dout = torch.randn(out.shape, generator=generator, dtype=torch.float64)
    dlse = torch.randn(lse.shape, generator=generator, dtype=torch.float64).masked_fill(~finite, 0.0)
    grads = torch.autograd.grad([out, lse], (q, k, v), [dout.to(dtype), dlse.to(lse.dtype)])
    loss = (expected * dout).sum() + (expected_lse.masked_fill(~finite, 0.0) * dlse).sum()
    for grad, exact, x in zip(grads, torch.autograd.grad(loss, (q, k, v)), (q, k, v), strict=True):
        assert grad.shape == x.shape
        torch.testing.assert_close(grad.double(), exact.double(), atol=10 * tolerance, rtol=10 * tolerance)


@st.composite
def cross_cases(draw: st.DrawFn) -> CrossCase:
    kv_heads = draw(st.integers(1, 4))
    return CrossCase(
        queries=draw(st.integers(1, 30)),
        keys=draw(st.integers(1, 40)),
        pattern=draw(patterns()),
        causal=draw(st.booleans()),
        align=draw(st.sampled_from(("end", "start"))),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        batch=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from((1, 4, 5))),
        layout=draw(st.sampled_from(("plain", "heads_first", "packed", "last_strided"))),
        seed=draw(st.integers(0, 5)),
    )


@given(cross_cases())
@settings(deadline=None)
def test_any_lengths_and_pattern(case: CrossCase) -> None:
    check(case)


PATTERNS = {
    "dense": DENSE,
    "nested": pattern_of([8, 16, 32], [1, 2, 4]),
    "uneven": pattern_of([5, 7, 33], [2, 1, 5], "blocked"),
}


@pytest.mark.parametrize("checkpoint", ["selective", "full"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_every_checkpoint(pattern: str, checkpoint: str) -> None:
    check(CrossCase(20, 50, PATTERNS[pattern], heads=4, batch=2), checkpoint=checkpoint)


@pytest.mark.parametrize(("queries", "keys"), [(1, 1), (1, 40), (40, 1), (17, 40), (40, 17), (40, 40)])
@pytest.mark.parametrize("align", ["end", "start"])
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(dtype: torch.dtype, pattern: str, align: str, queries: int, keys: int) -> None:
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}[dtype]
    check(CrossCase(queries, keys, PATTERNS[pattern], align=align, heads=4, batch=2), tolerance, dtype)


@pytest.mark.parametrize("pattern", PATTERNS)
def test_equal_lengths_are_the_forward(pattern: str) -> None:
    case = CrossCase(37, 37, PATTERNS[pattern], heads=4)
    q, k, v = case.inputs()
    module = case.module()
    for align in ("end", "start"):
        torch.testing.assert_close(module.cross(q, k, v, align=align), module(q, k, v), atol=1e-12, rtol=1e-12)


def test_it_runs_without_autograd_under_autocast_and_compiled() -> None:
    case = CrossCase(5, 20)
    q, k, v = (x.detach().float() for x in case.inputs())
    module = case.module()
    expected = module.cross(q, k, v)
    assert not expected.requires_grad
    torch.testing.assert_close(torch.compile(module.cross, backend="eager")(q, k, v), expected)
    with torch.autocast("cpu", torch.bfloat16):
        out = module.cross(q, k, v)
    assert out.dtype is torch.float32
    torch.testing.assert_close(out, expected, atol=3e-2, rtol=3e-2)
    assert not torch.equal(out, expected)


FAULTS: dict[str, tuple[dict[str, Any], str]] = {
    "another align": ({"align": "left"}, "align is 'left'; use 'end', where .*, or 'start'"),
    "k and v of two lengths": ({"v": torch.zeros(1, 6, 2, 4)}, "v has 6 positions and k 7; they must be equal"),
    "no keys": ({"k": torch.zeros(1, 0, 2, 4), "v": torch.zeros(1, 0, 2, 4)}, "give at least one key"),
    "no queries": ({"q": torch.zeros(1, 0, 2, 4)}, "batch and sequence must not be empty"),
    "another batch": ({"k": torch.zeros(2, 7, 2, 4)}, "k has batch size 2 and q 1"),
    "other heads": ({"k": torch.zeros(1, 7, 1, 4)}, "the module has num_kv_heads 2"),
    "another dtype": ({"v": torch.zeros(1, 7, 2, 4).double()}, "v is torch.float64 and q is torch.float32"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_fit_is_one_line(name: str) -> None:
    changed, message = FAULTS[name]
    given = {"q": torch.zeros(1, 3, 2, 4), "k": torch.zeros(1, 7, 2, 4), "v": torch.zeros(1, 7, 2, 4)} | changed
    with pytest.raises(InputError, match=message) as caught:
        CrossCase(3, 7).module().cross(**given)
    assert "\n" not in str(caught.value)


def test_forward_names_cross() -> None:
    q, k, v = (x.detach() for x in CrossCase(3, 7).inputs())
    with pytest.raises(InputError, match=r"k has 7 positions and q 3; .* cross\(\)"):
        CrossCase(3, 7).module()(q, k, v)


def test_longer_keys_than_the_limit_are_refused() -> None:
    q, k, v = (x.detach() for x in CrossCase(3, 7).inputs())
    with pytest.raises(InputError, match="the sequence has 7 positions, more than max_seq_len, 6"):
        CrossCase(3, 7).module(max_seq_len=6).cross(q, k, v)


def test_a_named_kernel_that_cannot_is_no_other() -> None:
    with pytest.raises(PlanError, match="cudnn"):
        CrossCase(3, 7).module(backend="cudnn").cross(*CrossCase(3, 7).inputs())


def test_transforms_are_refused() -> None:
    q, k, v = (x.detach() for x in CrossCase(3, 7).inputs())
    with pytest.raises(InputError, match=r"torch\.func"):
        torch.func.grad(lambda q: CrossCase(3, 7).module().cross(q, k, v).sum())(q)


def test_double_backward_is_refused() -> None:
    q, k, v = CrossCase(3, 7).inputs()
    with pytest.raises(RingAttentionError, match="double backward"):
        torch.autograd.grad(CrossCase(3, 7).module().cross(q, k, v).sum(), q, create_graph=True)
