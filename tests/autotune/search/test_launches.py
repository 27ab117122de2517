"""Who is judged by the host that launches a plan, and who by the device that runs it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import Setting, by_kernels, plan, workload

from autotune.measure.evaluator import Checked
from autotune.measure.launch_overhead import judged_ms
from autotune.search.nearby import Nearby, Timed
from autotune.statistics import Interval
from ringattn.workload import Pattern

DENSE = workload(pattern=Pattern())


@given(st.floats(1e-3, 1e2), st.floats(1.0, 1e5), st.floats(1e-3, 1e2), st.floats(1.0, 1e5), st.floats(0.2, 5.0))
def test_a_call_is_judged_by_the_device_unless_its_host_launches_longer(
    ms: float, host_us: float, default_ms: float, default_host_us: float, slower: float
) -> None:
    judged = judged_ms(ms, host_us, default_ms, default_host_us)
    assert judged >= ms
    assert judged_ms(ms, 0.0, default_ms, default_host_us) <= max(ms, judged)
    assert judged_ms(default_ms, default_host_us, default_ms, default_host_us) == default_ms
    assert judged_ms(ms, default_host_us, ms, default_host_us) == ms
    # A host that is slower with everything, where it is waited for with both, changes nothing.
    if min(host_us, slower * host_us) > 1e3 * ms and min(default_host_us, slower * default_host_us) > 1e3 * default_ms:
        assert judged_ms(ms, slower * host_us, default_ms, slower * default_host_us) == pytest.approx(judged)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_plan_judged_by_its_launches_is_launch_bound(asynchronous: bool) -> None:
    """Where the host does the work itself its time is the call's, and says nothing."""
    trial = Setting(DENSE, by_kernels(quick=0.0, swift=0.1, math=0.9), plan(DENSE), budget_s=20).run()
    context = trial.context
    context.ledger.asynchronous = asynchronous
    for known, result in list(context.ledger.checked.items()):
        if isinstance(result, Checked):
            slower = 1.0 if known == plan(DENSE) else 12.0
            context.ledger.checked[known] = replace(result, host_us=1e4 * result.call_ms * slower)
    bound = context.timed().launch_bound
    assert (plan(DENSE, "swift") in bound) == asynchronous
    assert plan(DENSE) not in bound


def test_what_only_its_launches_made_slow_is_not_hopeless_at_the_next_length() -> None:
    """flash-attn-4 took four times flash's time over 1024 positions on an H200, and was left out where it was best."""
    best, launched, slow = plan(DENSE), plan(DENSE, "swift"), plan(DENSE, "math")
    estimates = {t: Interval(m, m, m, 4) for t, m in ((best, 0.0), (launched, 1.5), (slow, 1.5))}
    nearby = Nearby([Timed(DENSE, estimates, launch_bound=frozenset([launched]))])
    assert list(nearby.left_out(estimates, best)) == [slow]
    assert nearby.behind(launched) is None
    assert nearby.hopeless_parts(best) == {("forward", "math"), ("backward", "math")}


def test_what_its_launches_make_slow_is_no_measure_at_first_looks() -> None:
    """A fifth of the default's time on the device, and fifty times its host's: judged by which, it is the slowest."""
    launching = lambda tunables: 5e4 if "math" in str(tunables) else 1e3  # noqa: E731
    truth = by_kernels(quick=0.0, swift=-0.1, math=-0.8)
    rows = {"base_ms": 0.5, "host_us": launching}
    trial = Setting(DENSE, truth, plan(DENSE), rows=rows, asynchronous=True).run()
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == plan(DENSE, "swift")
    slow = {p: gain for p, gain in trial.context.estimates.items() if "math" in str(p)}
    assert slow
    assert all(gain.median > 1.0 for gain in slow.values())
