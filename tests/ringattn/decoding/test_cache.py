"""A cache of keys and values: what is appended in any way is attended over as the forward does; what it refuses."""

from __future__ import annotations

from typing import Any

import cross_oracle
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import DENSE, lists_of, pattern_of, patterns
from torch import Tensor

import ringattn
from ringattn import KVCache, Pattern, RingAttention
from ringattn.errors import InputError

PATTERNS = {
    "dense": DENSE,
    "nested": pattern_of([8, 16, 32], [1, 2, 4]),
    "uneven": pattern_of([5, 7, 33], [2, 1, 5], "blocked"),
}


def module(
    pattern: Pattern = DENSE, heads: int = 4, kv_heads: int = 2, head_dim: int = 4, **arguments: Any
) -> RingAttention:
    lists = {} if pattern.dense else lists_of(pattern)
    given: dict[str, Any] = {"causal": True, "profile": None, "device": "cpu"}
    return RingAttention(heads, head_dim, kv_heads, **lists, **(given | arguments))


@pytest.mark.parametrize(
    ("own", "given", "found"),
    [
        ("bf16", None, torch.bfloat16),
        (torch.float64, None, torch.float64),
        ("bf16", "fp32", torch.float32),
        (None, "fp16", torch.float16),
        ("auto", "fp32", torch.float32),
    ],
)
def test_a_cache_has_the_dtype_of_its_module_unless_one_is_named(own: Any, given: Any, found: torch.dtype) -> None:
    assert module(dtype=own).kv_cache(1, dtype=given).dtype is found


@pytest.mark.parametrize("own", [None, "auto"])
def test_a_cache_of_a_module_without_a_dtype_needs_one(own: Any) -> None:
    with pytest.raises(InputError, match=r"^dtype is None, and .*kv_cache\(batch, dtype=torch\.bfloat16\)$"):
        module(dtype=own).kv_cache(1)


def inputs(
    batch: int, length: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 4, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(length)
    q, k, v = (
        torch.randn(batch, length, h, head_dim, generator=generator, dtype=torch.float64).to(dtype)
        for h in (heads, kv_heads, kv_heads)
    )
    return q, k, v


def exact(
    q: Tensor, k: Tensor, v: Tensor, pattern: Pattern = DENSE, window: int | None = None
) -> tuple[Tensor, Tensor]:
    positions = torch.arange(q.shape[1])
    seen = cross_oracle.counts(pattern, True, positions, positions, q.shape[2], k.shape[2], window)
    return cross_oracle.attend(q, k, v, seen)


def assert_rows(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor], begin: int, end: int, b: Any) -> None:
    """Positions [begin, end) of sequences b are the first of what was found for them."""
    out, lse = found
    torch.testing.assert_close(out[b, : end - begin].double(), expected[0][b, begin:end], atol=1e-10, rtol=1e-10)
    torch.testing.assert_close(lse[b, :, : end - begin].double(), expected[1][b, :, begin:end], atol=1e-10, rtol=1e-10)


@st.composite
def histories(draw: st.DrawFn) -> dict[str, Any]:
    """Chunks, each with the positions that every sequence has of it; and now and then a roll back."""
    batch, kv_heads = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    chunks = []
    ragged = draw(st.booleans())
    for _ in range(draw(st.integers(1, 6))):
        new = draw(st.integers(1, 12))
        counts = [draw(st.integers(0, new)) if ragged else new for _ in range(batch)]
        chunks.append((new, counts, draw(st.integers(0, 3))))
    pattern = draw(patterns())
    return {
        "batch": batch,
        "kv_heads": kv_heads,
        "group": draw(st.integers(1, 3)),
        "pattern": pattern,
        "window": draw(st.one_of(st.none(), st.integers(1, 12))) if pattern.dense else None,
        "chunks": chunks,
    }


@given(histories())
@settings(deadline=None)
def test_any_chunks_are_the_forward(history: dict[str, Any]) -> None:
    batch, kv_heads, pattern, window = (history[name] for name in ("batch", "kv_heads", "pattern", "window"))
    heads, longest = kv_heads * history["group"], sum(new for new, _, _ in history["chunks"])
    made = module(pattern, heads, kv_heads)
    q, k, v = inputs(batch, longest, heads, kv_heads)
    expected = exact(q, k, v, pattern, window)
    cache = made.kv_cache(batch, dtype=torch.float64, window=window, rollback=3)
    for new, counts, back in history["chunks"]:
        begins = cache.lengths
        chunk = [torch.zeros_like(x[:, :new]) for x in (q, k, v)]
        for b, (begin, count) in enumerate(zip(begins, counts, strict=True)):
            for part, x in zip(chunk, (q, k, v), strict=True):
                part[b, :count] = x[b, begin : begin + count]
        out, lse = made.prefill(*chunk, cache, counts=counts, return_lse=True)
        assert out.shape == (batch, new, heads, 4)
        for b, (begin, count) in enumerate(zip(begins, counts, strict=True)):
            assert_rows((out, lse), expected, begin, begin + count, b)
            assert bool((out[b, count:] == 0).all())
            assert bool(lse[b, :, count:].isneginf().all())
        assert cache.lengths == tuple(begin + count for begin, count in zip(begins, counts, strict=True))
        cache.truncate([max(0, length - back) for length in cache.lengths])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype(dtype: torch.dtype, pattern: str) -> None:
    made = module(PATTERNS[pattern])
    q, k, v = inputs(2, 60, dtype=dtype)
    expected = exact(q, k, v, PATTERNS[pattern])
    cache = made.kv_cache(2, dtype=dtype)
    outs = [made.prefill(q[:, :40], k[:, :40], v[:, :40], cache)]
    outs += [made.prefill(q[:, i : i + 1], k[:, i : i + 1], v[:, i : i + 1], cache) for i in range(40, 60)]
    out = torch.cat(outs, 1)
    assert out.dtype is dtype
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}[dtype]
    torch.testing.assert_close(out.double(), expected[0], atol=tolerance, rtol=tolerance)


def test_decode_attends_with_what_was_appended() -> None:
    made = module()
    q, k, v = inputs(2, 20)
    expected = exact(q, k, v)
    cache = made.kv_cache(2, dtype="float64")
    cache.append(k, v)
    out = made.decode(q[:, -3:], cache)
    torch.testing.assert_close(out, expected[0][:, -3:])
    assert made.decode(q[:, -3:], cache, return_lse=True)[1].shape == (2, 4, 3)


def test_queries_that_are_not_causal_see_what_is_cached() -> None:
    made = module(causal=False)
    q, k, v = inputs(2, 20)
    cache = made.kv_cache(2, dtype="float64")
    first = made.prefill(q[:, :12], k[:, :12], v[:, :12], cache)
    second = made.prefill(q[:, 12:], k[:, 12:], v[:, 12:], cache)
    torch.testing.assert_close(first, made(q[:, :12], k[:, :12], v[:, :12]))
    torch.testing.assert_close(second, made.cross(q[:, 12:], k, v))


@pytest.mark.parametrize("window", [1, 5, 16])
def test_a_window_keeps_its_memory(window: int) -> None:
    made = module()
    q, k, v = inputs(1, 400)
    expected = exact(q, k, v, window=window)
    cache = made.kv_cache(1, dtype=torch.float64, window=window)
    for i in range(400):
        one = slice(i, i + 1)
        out, lse = made.prefill(q[:, one], k[:, one], v[:, one], cache, return_lse=True)
        assert_rows((out, lse), expected, i, i + 1, 0)
        assert cache.capacity <= 2 * window + 1
    assert cache.lengths == (400,)
    assert cache.begins[0] > 400 - 2 * window - 1


def test_a_pattern_keeps_the_segments_of_the_next_query() -> None:
    made = module(PATTERNS["nested"])
    q, k, v = inputs(1, 300)
    expected = exact(q, k, v, PATTERNS["nested"])
    cache = made.kv_cache(1, dtype=torch.float64)
    for i in range(0, 300, 3):
        chunk = slice(i, i + 3)
        out, lse = made.prefill(q[:, chunk], k[:, chunk], v[:, chunk], cache, return_lse=True)
        assert_rows((out, lse), expected, i, i + 3, 0)
    assert cache.capacity <= 64
    cache.evict()
    assert cache.begins == (288,), "the largest segment, of 32, that position 300 is in"


def test_a_preallocated_cache_never_moves() -> None:
    made = module()
    q, k, v = inputs(2, 30)
    cache = made.kv_cache(2, 30, dtype=torch.float64)
    address, size = cache.rows()[0].data_ptr(), cache.nbytes
    assert cache.capacity == 30
    made.prefill(q, k, v, cache)
    assert (cache.rows()[0].data_ptr(), cache.nbytes) == (address, size)


def test_the_limit_of_a_module_holds_for_what_is_cached() -> None:
    """It was held against each chunk."""
    attn = module(max_seq_len=5)
    q, x = torch.randn(2, 1, 4, 4), torch.randn(2, 1, 2, 4)
    cache = attn.kv_cache(2, dtype="fp32")
    for _ in range(5):
        attn.prefill(q, x, x, cache)
    with pytest.raises(InputError, match=r"^the sequence has 6 positions, more than max_seq_len, 5$"):
        attn.prefill(q, x, x, cache)
    attn.prefill(q, x, x, cache, [0, 0])  # nothing that counts
    assert cache.lengths == (5, 5)
    cache.append(x, x)
    with pytest.raises(InputError, match=r"^the sequence has 6 positions"):
        attn.decode(q, cache)


def test_growing_copies_seldom() -> None:
    cache = KVCache(1, 2, 4, dtype=torch.float32, device="cpu")
    sizes = set()
    for _ in range(1000):
        cache.append(torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
        sizes.add(cache.capacity)
    assert len(sizes) <= 12
    assert cache.capacity <= 2000


@pytest.mark.parametrize("pattern", PATTERNS)
def test_rolled_back_positions_are_written_again(pattern: str) -> None:
    made = module(PATTERNS[pattern])
    q, k, v = inputs(2, 40)
    expected = exact(q, k, v, PATTERNS[pattern])
    cache = made.kv_cache(2, dtype=torch.float64, rollback=4)
    made.prefill(q[:, :30], k[:, :30], v[:, :30], cache)
    wrong = torch.full_like(k[:, :4], 7.0)
    for begin in range(30, 40, 2):
        cache.append(wrong, wrong)  # proposed, and not accepted
        cache.truncate(begin)
        out, lse = made.prefill(
            q[:, begin : begin + 2], k[:, begin : begin + 2], v[:, begin : begin + 2], cache, return_lse=True
        )
        assert_rows((out, lse), expected, begin, begin + 2, slice(None))


@pytest.mark.parametrize("as_tensor", [True, False])
@pytest.mark.parametrize("ragged", [True, False])
def test_beams_go_on_from_others(ragged: bool, as_tensor: bool) -> None:
    made = module()
    q, k, v = inputs(3, 20)
    counts = [12, 5, 9] if ragged else [12, 12, 12]
    cache = made.kv_cache(3, dtype=torch.float64)
    cache.append(k[:, :12], v[:, :12], counts)
    order = [2, 0, 2]
    cache.reorder(torch.tensor(order) if as_tensor else order)
    assert cache.lengths == tuple(counts[b] for b in order)
    out = made.prefill(q[:, 12:13], k[:, 12:13], v[:, 12:13], cache)
    for b, source in enumerate(order):
        own_k, own_v = (torch.cat((x[source, : counts[source]], x[b, 12:13])) for x in (k, v))
        torch.testing.assert_close(out[b : b + 1], made.cross(q[b : b + 1, 12:13], own_k[None], own_v[None]))


def test_reset_keeps_the_memory() -> None:
    made = module()
    q, k, v = inputs(2, 20)
    cache = made.kv_cache(2, dtype=torch.float64)
    first = made.prefill(q, k, v, cache)
    address = cache.rows()[0].data_ptr()
    cache.reset()
    assert cache.lengths == (0, 0)
    torch.testing.assert_close(made.prefill(q, k, v, cache), first)
    assert cache.rows()[0].data_ptr() == address


def test_what_is_known_on_the_device_follows() -> None:
    cache = KVCache(3, 2, 4, dtype=torch.float32, device="cpu", window=4)
    x = torch.zeros(3, 9, 2, 4)

    def known() -> tuple[list[int], list[int]]:
        lengths, begins, _ = cache.device_rows(None, 1)
        assert begins is not None
        return lengths.tolist(), begins.tolist()

    for counts in ([9, 2, 5], [1, 1, 1], [0, 3, 9], None):
        cache.append(x, x, counts)
        assert known() == (list(cache.lengths), list(cache.begins))
    cache.evict()
    assert max(cache.begins) > 0
    assert known() == (list(cache.lengths), list(cache.begins))
    cache.truncate([length - 1 if begin == 0 else length for begin, length in zip(*known()[::-1], strict=True)])
    cache.reorder([2, 2, 0])
    assert known() == (list(cache.lengths), list(cache.begins))
    cache.reset()
    assert known() == ([0, 0, 0], [0, 0, 0])


def test_it_says_what_it_is() -> None:
    cache = KVCache(2, 2, 4, 64, dtype="bf16", device="cpu", window=8)
    cache.append(torch.zeros(2, 3, 2, 4).bfloat16(), torch.zeros(2, 3, 2, 4).bfloat16(), [3, 1])
    assert repr(cache) == (
        "KVCache(batch=2, kv_heads=2, head_dim=4, bf16, cpu, dense, window=8, lengths=3, 1, capacity=16)"
    )
    assert ringattn.KVCache is KVCache


def test_no_gradient_is_made_and_none_is_lost() -> None:
    made = module()
    q, k, v = inputs(1, 8)
    cache = made.kv_cache(1, dtype=torch.float64)
    q.requires_grad_()
    k.requires_grad_()
    with pytest.raises(InputError, match=r"q requires a gradient, .* torch\.no_grad"):
        made.prefill(q, k, v, cache)
    with pytest.raises(InputError, match=r"k requires a gradient, .* torch\.no_grad"):
        made.prefill(q.detach(), k, v, cache)
    assert cache.lengths == (0,)
    with torch.no_grad():
        assert not made.prefill(q, k, v, cache).requires_grad


def test_it_runs_in_a_compiled_function_and_under_autocast() -> None:
    made = module()
    q, k, v = inputs(1, 8, dtype=torch.float32)

    def step(cache: KVCache) -> Tensor:
        return made.prefill(q * 1.0, k * 1.0, v * 1.0, cache) + 0.0  # type: ignore[no-any-return]

    expected = step(made.kv_cache(1, dtype=torch.float32))
    torch.testing.assert_close(torch.compile(step, backend="eager")(made.kv_cache(1, dtype=torch.float32)), expected)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(step(made.kv_cache(1, dtype=torch.float32)), expected)


X = torch.zeros(2, 3, 2, 4)
MODULE_CACHE = {"batch": 2, "num_kv_heads": 2, "head_dim": 4, "dtype": torch.float32, "device": "cpu"}


def filled(**arguments: Any) -> KVCache:
    cache = KVCache(**(MODULE_CACHE | arguments))
    cache.append(X, X)
    return cache


FAULTS: dict[str, tuple[Any, str]] = {
    "no batch": (lambda: KVCache(0, 2, 4, dtype="fp32", device="cpu"), "batch is 0"),
    "max_length 0": (lambda: filled(max_length=0), "max_length is 0"),
    "window 0": (lambda: filled(window=0), "window is 0"),
    "negative rollback": (lambda: filled(rollback=-1), "rollback is -1"),
    "a window of a pattern": (lambda: filled(window=4, pattern=PATTERNS["nested"]), "a window is for dense"),
    "a dtype that is none": (lambda: filled(dtype="int8"), "dtype is 'int8'"),
    "overfull": (
        lambda: filled(max_length=5).append(X, X),
        "sequence 0 of the cache has 3 positions, and 3 more are over its max_length, 5",
    ),
    "k of another shape": (lambda: filled().append(X[:, :, :1], X), r"k has shape \(2, 3, 1, 4\); the cache takes"),
    "another batch": (lambda: filled().append(X[:1], X[:1]), r"k has shape \(1, 3, 2, 4\)"),
    "v of another length": (lambda: filled().append(X, X[:, :2]), "v has 2 positions and k 3"),
    "another dtype": (
        lambda: filled().append(X.double(), X.double()),
        "k is torch.float64 and the cache torch.float32",
    ),
    "another device": (lambda: filled().append(X.to("meta"), X), "k is on meta and the cache on cpu"),
    "no tensor": (lambda: filled().append([1], X), "k is a list; it must be a tensor"),
    "counts of another batch": (lambda: filled().append(X, X, [1]), "counts is .*; give a list of 2 integers"),
    "more than were given": (
        lambda: filled().append(X, X, [4, 0]),
        r"counts is \[4, 0\]; each must be from 0 to the 3",
    ),
    "less than none": (lambda: filled().append(X, X, [-1, 0]), r"counts is \[-1, 0\]"),
    "truncated below zero": (lambda: filled().truncate(-1), "truncate: length -1 of sequence 0, which has 3 positions"),
    "truncated to more": (lambda: filled().truncate([3, 4]), "truncate: length 4 of sequence 1"),
    "truncated by a word": (lambda: filled().truncate("all"), "lengths is 'all'"),
    "reordered by another batch": (lambda: filled().reorder([0]), "index is .*; give a list of 2 integers"),
    "reordered by none": (lambda: filled().reorder([0, 2]), r"index is \[0, 2\]; the cache has sequences 0 to 1"),
    "reordered by numbers": (lambda: filled().reorder(torch.zeros(2)), "index is a tensor of torch.float32"),
    "advanced by none": (lambda: filled(max_length=9).advance(0), "positions is 0"),
    "advanced too far": (lambda: filled(max_length=9).advance(7), "rows for 9 positions and sequences of up to 3"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_does_not_fit_is_one_line(name: str) -> None:
    call, message = FAULTS[name]
    with pytest.raises(InputError, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)


Q = torch.zeros(2, 3, 4, 4)
CALL_FAULTS: dict[str, tuple[Any, str]] = {
    "no cache": (lambda m: m.decode(Q, None), "cache is a NoneType; make one with kv_cache"),
    "q that is none": (lambda m: m.decode([1.0], filled()), "q is a list; it must be a tensor"),
    "heads of another module": (lambda m: m.decode(Q[:, :, :2], filled()), "the module has num_heads 4"),
    "a cache of other heads": (
        lambda m: m.decode(Q, KVCache(**(MODULE_CACHE | {"num_kv_heads": 4}))),
        "the cache has num_kv_heads 4 and the module 2",
    ),
    "a cache of another pattern": (
        lambda m: m.decode(Q, KVCache(**(MODULE_CACHE | {"pattern": PATTERNS["nested"]}))),
        r"the cache has pattern \[8,16,32\]/\[1,2,4\] and the module dense",
    ),
    "a q of another dtype": (lambda m: m.decode(Q.double(), filled()), "q has batch size 2 and is torch.float64"),
    "a q of another batch": (lambda m: m.decode(Q[:1], filled()), "q has batch size 1 .* 2 sequences"),
    "a q on another device": (lambda m: m.decode(Q.to("meta"), filled()), "q is on meta"),
    "more queries than positions": (
        lambda m: m.decode(torch.zeros(2, 4, 4, 4), filled()),
        "q has 4 positions of sequence 0, of which the cache holds 3",
    ),
    "nothing cached": (lambda m: m.decode(Q, KVCache(**MODULE_CACHE)), "of which the cache holds 0"),
    "k of another length": (lambda m: m.prefill(Q, X[:, :2], X[:, :2], filled()), "q has 3 positions and k 2"),
    "wrong counts": (lambda m: m.prefill(Q, X, X, filled(), [1, 2, 3]), "counts is"),
}


@pytest.mark.parametrize("name", CALL_FAULTS)
def test_a_call_that_does_not_fit_is_one_line_and_changes_nothing(name: str) -> None:
    call, message = CALL_FAULTS[name]
    with pytest.raises(InputError, match=message) as caught:
        call(module())
    assert "\n" not in str(caught.value)


def test_a_window_is_for_causal_modules() -> None:
    with pytest.raises(InputError, match="window 2, which is for a causal module"):
        module(causal=False).decode(Q, filled(window=2))


def test_what_was_evicted_cannot_be_gone_back_to() -> None:
    cache = filled(window=2)
    cache.evict()
    assert cache.begins == (2, 2)
    with pytest.raises(InputError, match="sequence 0 at length 1 needs position 0, and those before 2 were evicted"):
        cache.truncate(1)
    cache.truncate(0)
    assert cache.begins == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "queries", "needed", "begin"),
    [
        ({"window": 5}, 1, 5, 6),
        ({"window": 5, "rollback": 2}, 4, 2, 4),
        ({"pattern": pattern_of([4, 5], [1, 2])}, 2, 5, 8),
    ],
)
def test_a_query_of_evicted_keys_is_refused(arguments: dict[str, Any], queries: int, needed: int, begin: int) -> None:
    """What the next position needs is held, and what one appended before saw is not: it would attend over the rest."""
    pattern = arguments.get("pattern", DENSE)
    positions = 10
    made, (q, k, v) = module(pattern), inputs(2, positions)
    cache = made.kv_cache(2, dtype=torch.float64, **{name: x for name, x in arguments.items() if name != "pattern"})
    cache.append(k, v)
    expected = exact(q, k, v, pattern, cache.window)
    assert_rows(made.decode(q[:, -queries:], cache, return_lse=True), expected, positions - queries, positions, 0)
    cache.evict()
    message = f"sequence 0, of which the first sees position {needed}, and those before {begin} were evicted"
    with pytest.raises(InputError, match=message):
        made.decode(q[:, -queries:], cache)
    assert_rows(made.decode(q[:, -1:], cache, counts=[0, 0], return_lse=True), expected, 0, 0, 0)


@pytest.mark.parametrize("window", [None, 3])
def test_a_cache_of_inference_mode_is_written_outside_of_it(window: int | None) -> None:
    made, (q, k, v) = module(), inputs(2, 12)
    expected = exact(q, k, v, window=window)
    with torch.inference_mode():
        cache = made.kv_cache(2, dtype=torch.float64, window=window)
        made.prefill(q[:, :5], k[:, :5], v[:, :5], cache)
    for begin in range(5, 12):  # grows, and evicts
        rows = (x[:, begin : begin + 1] for x in (q, k, v))
        assert_rows(made.prefill(*rows, cache, return_lse=True), expected, begin, begin + 1, slice(None))
    cache.reorder([1, 0])
    cache.truncate([11, 12])
    assert cache._device_lengths.tolist() == [11, 12]
