"""What one length teaches the next: kernels that were hopeless there are left out here."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import Setting, by_kernels, plan, workload

from autotune.search.nearby import Nearby, Timed
from autotune.statistics import Interval
from ringattn.workload import Pattern

DENSE = workload(pattern=Pattern())


def test_kernels_far_slower_at_a_neighbouring_length_are_not_tried_again() -> None:
    truth = by_kernels(quick=0.0, swift=-0.1, math=1.5)
    done = Setting(DENSE, truth, plan(DENSE)).run()
    longer = Setting(DENSE.at(8192), truth, plan(DENSE)).run()
    nearby = Nearby([done.context.timed()])
    left_out = nearby.left_out(longer.space.kernel_plans, longer.space.default)
    assert left_out
    assert all("math" in (t.branches[0].forward, t.branches[0].backward) for t in left_out)
    assert "S=4096" in next(iter(left_out.values()))
    slow = replace(next(iter(left_out)), checkpoint="full")  # whatever else it has
    assert list(nearby.left_out([slow, longer.space.default], longer.space.default)) == [slow]
    assert nearby.hopeless_parts(plan(DENSE)) == {("forward", "math"), ("backward", "math")}
    assert nearby.hopeless_parts(plan(DENSE, "math")) == set()  # the default's stay


@pytest.mark.parametrize("ruled_out", ["narrow", "over the limits"])
def test_what_could_not_be_chosen_makes_no_kernel_hopeless_at_the_next_length(ruled_out: str) -> None:
    best, close, far = plan(DENSE), plan(DENSE, "swift"), plan(DENSE, "math")
    fast = plan(DENSE, dtype="fp16") if ruled_out == "narrow" else replace(plan(DENSE, "other"), checkpoint="full")
    estimates = {t: Interval(m, m, m, 4) for t, m in ((best, 0.0), (close, 0.05), (far, 1.5), (fast, -1.5))}
    timed = Timed(DENSE, estimates, **{"narrow" if ruled_out == "narrow" else "ruled_out": frozenset([fast])})
    nearby = Nearby([timed])
    assert list(nearby.left_out(estimates, best)) == [far]
    assert nearby.hopeless_parts(best) == {("forward", "math"), ("backward", "math")}
