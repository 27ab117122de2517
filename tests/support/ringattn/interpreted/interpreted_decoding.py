"""Decodes with "split-kv" under Triton's interpreter, as on a GPU, in a process of its own.

``python interpreted_decoding.py`` decodes a few positions in every configuration, asserts that they are the forward's,
and prints how many calls the kernel had.
"""

from __future__ import annotations

from typing import Any

import cross_oracle
import torch
from interpreted_triton import patch_once
from oracle import DENSE, lists_of, pattern_of

from ringattn import RingAttention
from ringattn.decoding.spans import Spans, run_over_spans
from ringattn.kernels.own import split_kv
from ringattn.kernels.registry import KERNELS
from ringattn.planning import heuristic

NESTED = pattern_of([8, 16, 32], [1, 2, 4])
CASES: dict[str, dict[str, Any]] = {
    "dense": {},
    "of their own lengths": {"counts": [20, 7]},
    "window": {"window": 9},
    "dilated": {"pattern": NESTED},
    "dilated, of their own lengths": {"pattern": NESTED, "counts": [20, 7]},
    "three at a time": {"at_a_time": 3},
    "three at a time, dilated": {"at_a_time": 3, "pattern": NESTED},
    "computed in a wider dtype": {"dtype": torch.float16, "compute": "fp32"},
}


# With a plan whose kernel reads no caches: how many of the steps are left to the one that does.
STANDS_IN: dict[str, int] = {"dense": 0, "of their own lengths": 6, "window": 6, "three at a time": 2, "dilated": 0}


def check(case: dict[str, Any]) -> None:
    pattern, dtype, at_a_time = case.get("pattern", DENSE), case.get("dtype", torch.float32), case.get("at_a_time", 1)
    lists = {} if pattern.dense else lists_of(pattern)
    module = RingAttention(
        4, 16, 2, causal=True, profile=None, device="cpu", dtype=case.get("compute"), **lists
    )  # fmt: skip
    module.validates = False
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 32, h, 16, generator=generator).to(dtype) for h in (4, 2, 2))
    cache = module.kv_cache(2, dtype=dtype, window=case.get("window"))
    counts = case.get("counts", [20, 20])
    positions = torch.arange(32)
    cache.append(k[:, :20], v[:, :20], counts)
    seen = cross_oracle.counts(pattern, True, positions, positions, 4, 2, case.get("window"))
    expected, expected_lse = cross_oracle.attend(q, k, v, seen)
    for _ in range(6 // at_a_time):  # past position 24, where the shortest segment ends
        begins = cache.lengths
        chunk = [torch.stack([x[b, n : n + at_a_time] for b, n in enumerate(begins)]) for x in (q, k, v)]
        out, lse = module.prefill(*chunk, cache, return_lse=True)
        assert out.dtype is dtype
        for b, n in enumerate(begins):
            there = slice(n, n + at_a_time)
            torch.testing.assert_close(out[b].double(), expected[b, there], atol=2e-3, rtol=2e-3)
            torch.testing.assert_close(lse[b].double(), expected_lse[b, :, there], atol=1e-4, rtol=1e-4)


def check_spans() -> None:
    """A step of three sequences in one tensor, behind 0, 5 and 19 rows of padding."""
    module = RingAttention(4, 16, 2, causal=True, profile=None, device="cpu")
    module.validates = False
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, h, n, 16, generator=generator) for h, n in ((4, 1), (2, 20), (2, 20)))
    for b, first in enumerate((0, 5, 19)):
        k[b, :, :first] = v[b, :, :first] = torch.nan
    spans = Spans([0, 5, 19], [20, 20, 20], 20)
    run = run_over_spans(module, q, k, v, spans)
    assert run is not None
    out = run(q, k, v, spans)
    assert out is not None
    for b, first in enumerate(spans.firsts):
        of_b = (x[b : b + 1, :, n:].transpose(1, 2) for x, n in ((q, 0), (k, first), (v, first)))
        expected, _ = cross_oracle.attend(*of_b, torch.ones(4, 1, 20 - first, dtype=torch.float64))
        torch.testing.assert_close(out[b : b + 1].double(), expected, atol=1e-5, rtol=1e-5)


if __name__ == "__main__":
    patch_once()
    calls = 0
    cached = split_kv._Launcher.cached

    def counting(self: Any, *arguments: Any) -> Any:
        global calls
        calls += 1
        return cached(self, *arguments)

    split_kv._Launcher.cached = counting  # type: ignore[method-assign]
    object.__setattr__(KERNELS["split-kv"], "reasons", lambda need: () if need.queries in range(1, 17) else ("no",))
    object.__setattr__(KERNELS["split-kv"], "package", "")
    for case in CASES.values():
        check(case)
    check_spans()
    print(calls)
    heuristic._decoders = lambda workload: ("flash-cpu",)
    for name, expected in STANDS_IN.items():
        calls = 0
        check(CASES[name])
        assert calls == expected, (name, calls)
