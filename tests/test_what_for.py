"""The README's table of what it is for and what it is not: each row is true, and what it names instead can do it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from documents import README, text_of
from oracle import Case, assert_equal_to, exact, found, pattern_of
from pool import Pool
from ring_cases import RingCase, check_exact
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from ringattn import RingAttention
from ringattn.errors import PlanError, RingAttentionError

SDPA, FLEX, FLASH = "`F.scaled_dot_product_attention`", "flex_attention", "FlashAttention"
CASE = Case(33, 4, 2, 8, 2, causal=True)
ROWS = {
    cells[0]: tuple(cells[1:])
    for line in text_of(README).partition("| you need | here | instead |")[2].splitlines()[2:]
    if len(cells := [cell.strip() for cell in line.strip("|").split("|")]) == 3
}


def check(case: Case) -> None:
    q, k, v = case.inputs()
    assert_equal_to(found(case.module(), q, k, v, case.dout()), exact(case, q, k, v, case.dout()))


# --- what it is for ----------------------------------------------------------------------------------------------


def dense() -> None:
    for length in (1, 7, 64, 97):
        for causal in (False, True):
            check(Case(length, causal=causal))


def dilated() -> None:
    check(Case(97, 4, 4, pattern=pattern_of([16, 40, 50], [1, 3, 7]), causal=True))
    check(Case(97, 4, 4, pattern=pattern_of([10], [2])))


def grouped_and_batched() -> None:
    check(Case(33, heads=6, kv_heads=2, batch=3, causal=True))
    check(Case(33, heads=4, kv_heads=1, batch=2))


def log_sum_exp() -> None:
    q, k, v = CASE.inputs()
    out, lse = CASE.module()(q, k, v, return_lse=True)
    gradients = torch.autograd.grad(lse.sum(), (q, k))
    leaves = [x.detach().requires_grad_() for x in (q, k)]
    logits = torch.einsum("bqhd,bkhd->bhqk", leaves[0], leaves[1].repeat_interleave(2, 2)) / CASE.head_dim**0.5
    expected = logits.masked_fill(torch.ones(33, 33).triu(1).bool(), -torch.inf).logsumexp(-1)
    torch.testing.assert_close(lse, expected)
    torch.testing.assert_close(gradients, torch.autograd.grad(expected.sum(), leaves))


def over_ranks() -> None:
    pool = Pool(2)
    try:
        assert pool.run(check_exact, [RingCase(Case(48, 4, 2, 4, causal=True), "ring", "zigzag")]) == [1, 1]
    finally:
        pool.stop()


def compiled_and_exported() -> None:
    q, k, v = CASE.inputs()
    module = CASE.module()
    expected = exact(CASE, q, k, v, CASE.dout())
    assert_equal_to(found(torch.compile(module, backend="aot_eager"), q, k, v, CASE.dout()), expected)
    inputs = tuple(x.detach() for x in (q, k, v))
    out = torch.export.export(module, inputs).module()(*inputs)
    torch.testing.assert_close(out, expected.out)


# --- what it is not ----------------------------------------------------------------------------------------------


def takes_no(*names: str) -> None:
    """Neither the module nor a call has an argument of such a name."""
    arguments = {*inspect.signature(RingAttention).parameters, *inspect.signature(RingAttention.forward).parameters}
    assert not [name for name in arguments for part in names if part in name]


def documents() -> None:
    q, k, v = (x.detach() for x in CASE.inputs())
    out = CASE.module()(q[:1], k[:1], v[:1], cu_seqlens=[0, 5, q.shape[1]])
    torch.testing.assert_close(out[:, :5], CASE.module()(q[:1, :5], k[:1, :5], v[:1, :5]))
    padded = CASE.module()(q, k, v, lengths=[5] * q.shape[0])
    torch.testing.assert_close(padded[:, :5], CASE.module()(q[:, :5], k[:, :5], v[:, :5]))


def score_options() -> None:
    case = replace(CASE, pattern=Case(1).pattern, causal=True, window=5, softcap=2.0)
    q, k, v = case.inputs()
    assert_equal_to(found(case.module(), q, k, v, case.dout()), exact(case, q, k, v, case.dout()))
    none = torch.full((case.heads,), -torch.inf, dtype=q.dtype)
    torch.testing.assert_close(case.module()(q, k, v, sinks=none), case.module()(q, k, v))


def decoding() -> None:
    q, k, v = (x.detach() for x in CASE.inputs())
    module = CASE.module(causal=True)
    cache = module.kv_cache(q.shape[0], dtype=q.dtype)
    cache.append(k, v)
    last = module(q, k, v)[:, -1:]
    torch.testing.assert_close(module.decode(q[:, -1:], cache), last)
    torch.testing.assert_close(module.cross(q[:, -1:], k, v), last)


def dropout_in_one_block() -> None:
    q, k, v = (x.detach() for x in CASE.inputs())
    assert not torch.equal(CASE.module(dropout=0.1)(q, k, v), CASE.module()(q, k, v))
    with pytest.raises(PlanError, match="dropout"):
        Case(33, 4, 2, 8, pattern=pattern_of([16], [2])).module(dropout=0.1)(q, k, v)


def no_double_backward() -> None:
    q, k, v = CASE.inputs()
    with pytest.raises(RingAttentionError, match="double backward"):
        torch.autograd.grad(CASE.module()(q, k, v).sum(), q, create_graph=True)


HERE: dict[str, tuple[str, Callable[[], None]]] = {
    "dense attention, causal or full, of any length": ("yes", dense),
    "a dilated pattern (LongNet) of any segments and rates": ("yes", dilated),
    "grouped-query heads, several sequences of one length in a batch": ("yes", grouped_and_batched),
    "the log-sum-exp, and gradients through it on one rank": ("yes", log_sum_exp),
    "one sequence over several ranks": ("yes", over_ranks),
    "`torch.compile` and `torch.export` on one rank": ("yes", compiled_and_exported),
    "an attention mask": ("no", lambda: takes_no("mask")),
    "padding inside a batch, several documents packed into one sequence": ("yes: `lengths`, `cu_seqlens`", documents),
    "a causal sliding window, soft-capping, attention sinks": ("yes: `window`, `softcap`, `sinks`", score_options),
    "decoding against a key/value cache, cross attention": ("yes: `kv_cache`, `decode`, `cross`", decoding),
    "a bias on the logits, ALiBi": ("no", lambda: takes_no("bias", "alibi", "score_mod")),
    "dropout in training": ("no, but for dense attention on one device: `dropout`", dropout_in_one_block),
    "double backward": ("no: raises", no_double_backward),
}


def test_the_table_has_these_rows() -> None:
    assert {need: here for need, (here, _) in ROWS.items()} == {need: here for need, (here, _) in HERE.items()}


@pytest.mark.parametrize("need", HERE)
def test_the_row_is_true(need: str) -> None:
    HERE[need][1]()


# --- what serves instead -----------------------------------------------------------------------------------------

Q, KV = torch.randn(1, 2, 1, 16), torch.randn(1, 2, 40, 16)
X = torch.randn(1, 2, 32, 16)


def sdpa_masks() -> None:
    mask = (torch.arange(32) < 20).expand(32, 32)
    shorter = scaled_dot_product_attention(X, X[:, :, :20], X[:, :, :20])
    torch.testing.assert_close(scaled_dot_product_attention(X, X, X, attn_mask=mask), shorter)


def sdpa_differentiates_twice() -> None:
    x = X.clone().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        (gradient,) = torch.autograd.grad(scaled_dot_product_attention(x, x, x).sum(), x, create_graph=True)
    gradient.square().sum().backward()
    assert x.grad is not None


def flex_masks(allowed: Callable[..., torch.Tensor]) -> None:
    mask = create_block_mask(allowed, 1, 1, 32, 32, device="cpu")
    assert flex_attention(X, X, X, block_mask=mask).shape == X.shape


INSTEAD: dict[tuple[str, str], Callable[[], object]] = {
    ("an attention mask", SDPA): sdpa_masks,
    ("an attention mask", FLEX): lambda: flex_masks(lambda b, h, q, k: (q + k) % 3 > 0),
    ("a bias on the logits, ALiBi", FLEX): lambda: flex_attention(
        X, X, X, score_mod=lambda score, b, h, q, k: score + 0.1 * (k - q)
    ),
    ("dropout in training", SDPA): lambda: scaled_dot_product_attention(X, X, X, dropout_p=0.1),
    ("double backward", SDPA): sdpa_differentiates_twice,
}


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(("need", "name"), INSTEAD, ids=" by ".join)
def test_what_is_named_instead_can_do_it(need: str, name: str) -> None:
    assert name in ROWS[need][1]
    INSTEAD[need, name]()


def test_every_no_names_something_that_was_tried_or_is_flash_attention() -> None:
    for need, (here, instead) in ROWS.items():
        named = {name for name in (SDPA, FLEX, FLASH) if name in instead}
        assert bool(named) is here.startswith("no"), need
        assert named - {FLASH} == {name for tried, name in INSTEAD if tried == need}, need
