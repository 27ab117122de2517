"""Tokens that a small model generates with a cache are those of its forward over all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cross_oracle
import pytest
import torch
from oracle import DENSE, lists_of, pattern_of
from torch import Tensor

from ringattn import KVCache, Pattern, RingAttention

TOKENS = 300  # more than modules remember steps, and several times what a cache begins with
VOCABULARY = 31


@dataclass(frozen=True)
class Model:
    """Embedding and position, one attention with a residual, logits; float64: no token is a matter of rounding."""

    attention: RingAttention
    weights: tuple[Tensor, ...]

    @classmethod
    def of(cls, pattern: Pattern, heads: int, kv_heads: int, head_dim: int = 4, **arguments: Any) -> Model:
        lists = {} if pattern.dense else lists_of(pattern)
        given: dict[str, Any] = {"causal": True, "profile": None, "device": "cpu", "scale": 1.0}
        attention = RingAttention(heads, head_dim, kv_heads, **lists, **(given | arguments))
        generator = torch.Generator().manual_seed(heads * 100 + kv_heads)
        width = heads * head_dim
        shapes = ((VOCABULARY, width), (width, width), (width, kv_heads * head_dim), (width, kv_heads * head_dim))
        weights = tuple(torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
        return cls(attention, weights)

    def qkv(self, tokens: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, q, k and v of tokens (B, S) at positions (B, S) or (S,)."""
        embedding, *projections = self.weights
        x = embedding[tokens] + torch.sin(positions[..., None] * torch.arange(1, embedding.shape[1] + 1) * 0.1)
        heads = [(x @ w / w.shape[0] ** 0.5).unflatten(-1, (-1, self.attention.shape.head_dim)) for w in projections]
        return x, heads[0], heads[1], heads[2]

    def logits(self, x: Tensor, out: Tensor) -> Tensor:
        return (x + out.flatten(-2)) @ self.weights[0].T

    def forward(self, tokens: Tensor, attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        x, q, k, v = self.qkv(tokens, torch.arange(tokens.shape[1]))
        return self.logits(x, attend(q, k, v))

    def generate(
        self, prompt: Tensor, lengths: list[int], cache: KVCache, chunk: int, new_tokens: int = TOKENS
    ) -> tuple[list[Tensor], Tensor]:
        """Every sequence, ``new_tokens`` longer than its prompt of ``lengths[b]``, and the logits that chose them."""
        batch = prompt.shape[0]
        tokens, last = [prompt[b, :n].tolist() for b, n in enumerate(lengths)], [torch.empty(0)] * batch
        for begin in range(0, max(lengths), chunk):
            part = prompt[:, begin : begin + chunk]
            counts = [min(max(n - begin, 0), part.shape[1]) for n in lengths]
            x, q, k, v = self.qkv(part, torch.arange(begin, begin + part.shape[1]))
            found = self.logits(x, self.attention.prefill(q, k, v, cache, counts))  # type: ignore[arg-type]
            for b, count in enumerate(counts):
                last[b] = found[b, count - 1] if count else last[b]
        logits = torch.stack(last)
        made = []
        for _ in range(new_tokens):
            made.append(logits)
            new = logits.argmax(-1)[:, None]
            for b in range(batch):
                tokens[b].append(int(new[b, 0]))
            x, q, k, v = self.qkv(new, torch.tensor(cache.lengths)[:, None])
            logits = self.logits(x, self.attention.prefill(q, k, v, cache))[:, 0]  # type: ignore[arg-type]
        return [torch.tensor(row) for row in tokens], torch.stack(made, 1)


CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "grouped heads": {"heads": 6, "kv_heads": 2},
    "one key/value head": {"heads": 4, "kv_heads": 1},
    "dilated": {"pattern": pattern_of([16, 64, 256], [1, 2, 4])},
    "dilated, grouped": {"pattern": pattern_of([16, 100, 299], [1, 3, 7]), "heads": 8, "kv_heads": 4},
    "blocked": {"pattern": pattern_of([12, 50], [2, 5], "blocked"), "heads": 5, "kv_heads": 5},
    "sequences of their own lengths": {"lengths": [40, 7, 23]},
    "dilated, of their own lengths": {"pattern": pattern_of([16, 64], [1, 2]), "lengths": [40, 7, 23]},
    "preallocated": {"max_length": 340},
    "window": {"window": 50},
    "window, of their own lengths": {"window": 33, "lengths": [40, 7, 23]},
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_the_forward(name: str) -> None:
    check({"pattern": DENSE, "heads": 2, "kv_heads": 2, "lengths": [40], "chunk": 16} | CASES[name])


def check(case: dict[str, Any], new_tokens: int = TOKENS, **arguments: Any) -> None:
    model = Model.of(case["pattern"], case["heads"], case["kv_heads"], **arguments)
    lengths, window = case["lengths"], case.get("window")
    prompt = torch.randint(0, VOCABULARY, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(0))
    cache = model.attention.kv_cache(len(lengths), case.get("max_length"), dtype=torch.float64, window=window)
    sequences, logits = model.generate(prompt, lengths, cache, case["chunk"], new_tokens)
    assert cache.lengths == tuple(length + new_tokens for length in lengths)

    def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        positions = torch.arange(q.shape[1])
        seen = cross_oracle.counts(DENSE, True, positions, positions, q.shape[2], k.shape[2], window)
        return cross_oracle.attend(q, k, v, seen, 1.0)[0]

    one_rank = Model.of(case["pattern"], case["heads"], case["kv_heads"]).attention
    for b, tokens in enumerate(sequences):
        attend: Any = windowed if window else one_rank
        expected = model.forward(tokens[None, :-1], attend)[0, lengths[b] - 1 :]
        torch.testing.assert_close(logits[b], expected, atol=1e-9, rtol=1e-9)
        assert torch.equal(expected.argmax(-1), tokens[lengths[b] :])
        assert len(set(tokens.tolist())) > 3, "a model that says one thing tests nothing"
