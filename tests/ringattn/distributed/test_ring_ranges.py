"""Named ranges over ranks: messages and waits beside the steps of one rank."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from oracle import Case, pattern_of
from pool import Pool
from ring_cases import RingCase, run_here

from ringattn import named_ranges
from ringattn.runtime.ranges import PREFIX

DENSE_CASE = Case(24, 4, 2, 4, causal=True)
# One that joins what travels with what stays, and one that assembles them.
JOINED = Case(48, 4, 2, 4, pattern=pattern_of([12, 24, 48], [1, 2, 2]), causal=True)


def _ranges(ring: RingCase) -> dict[str, int]:
    case, module = ring.case, ring.module()
    inputs = case.inputs()
    expected = run_here(ring, module, *inputs, case.dout())
    with named_ranges(module):
        run_here(ring, module, *inputs, case.dout())
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            found = run_here(ring, module, *inputs, case.dout())
    again = run_here(ring, module, *inputs, case.dout())
    for one, other, last in zip(expected, found, again, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, last)
    return Counter(e.name.removeprefix(PREFIX) for e in profiler.events() or () if e.name.startswith(PREFIX))


@pytest.mark.parametrize(
    ("ring", "steps"),
    [
        (RingCase(DENSE_CASE, "ring", "zigzag"), {"gather", "merge", "sum"}),
        (RingCase(DENSE_CASE, "all-gather", "contiguous"), {"gather", "merge", "sum"}),
        (RingCase(DENSE_CASE, "ulysses", "contiguous"), set()),
        (RingCase(JOINED, "ring", "contiguous"), {"gather", "merge", "sum"}),
    ],
)
def test_messages_and_waits_have_names(ring: RingCase, steps: set[str], ranks: Callable[[int], Pool]) -> None:
    for found in ranks(2).run(_ranges, ring):
        assert found["messages"] > 0
        assert found["wait"] > 0
        assert {name for name in found if name.startswith("branch 0")} == {
            "branch 0 math forward",
            "branch 0 math backward",
        }
        assert steps <= set(found)
