"""Which time of a call counts: the longer of host and device in an eager loop, the device's alone in a captured one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
from machines import MIB, Setting, Trial, by_kernels, plan, workload

from autotune.journal.store import Store
from autotune.measure.launch_overhead import waited_ms
from autotune.measure.simulated import REPLAY_US, Trouble
from autotune.probe.output.writer import entry_of
from autotune.search.deciding.finalists import finalists
from autotune.search.limits import Limits
from autotune.search.settings import SearchSettings
from ringattn.planning.preference import Launch
from ringattn.profile.plain_data import from_plain, to_plain
from ringattn.profile.schema import PlanEntry
from ringattn.workload import Pattern, Tunables

DENSE = workload(pattern=Pattern(), mode="infer")
QUICK, SWIFT = plan(DENSE, "quick"), plan(DENSE, "swift")
TRUTH = by_kernels(quick=0.0, swift=math.log(0.5), math=1.5)  # swift takes half of the device's time
NOISE = Trouble(sigma=0.006, outlier_share=0.02, outlier_low=0.05, outlier_high=0.3, drift=0.02)


def host_us(swift: float, quick: float = 20.0) -> Callable[[Tunables], float]:
    return lambda tunables: swift if tunables.branches[0].forward == "swift" else quick


def searched(
    swift_us: float, *, quick_us: float = 20.0, launch: Launch = "eager", seed: int = 0, **more: object
) -> Trial:
    rows = {"base_ms": 0.1, "host_us": host_us(swift_us, quick_us)}
    setting = Setting(DENSE, TRUTH, QUICK, rows=rows, asynchronous=True, launch=launch)
    return replace(setting, **more).run(seed)  # type: ignore[arg-type]


def kernels(trial: Trial) -> tuple[str, str]:
    """Of the choice, and of what captured calls run."""
    entry = entry_of(trial.result)
    assert entry.choice is not None
    captured = entry.captured or entry.choice
    return entry.choice.tunables.branches[0].forward, captured.tunables.branches[0].forward


def test_an_eager_call_takes_the_longer_of_the_two_times() -> None:
    assert waited_ms(0.1, 200.0, "eager") == 0.2
    assert waited_ms(0.1, 50.0, "eager") == 0.1
    assert waited_ms(0.1, 200.0, "captured") == 0.1


@pytest.mark.parametrize("launch", ["eager", "captured"])
@pytest.mark.parametrize("seed", range(3))
def test_both_answers_are_found_whichever_time_was_asked_for(launch: Launch, seed: int) -> None:
    trial = searched(300.0, launch=launch, seed=seed, trouble=NOISE)
    assert kernels(trial) == ("quick", "swift")
    entry = entry_of(trial.result)
    assert entry.captured is not None
    assert entry.captured.evidence is not None
    assert entry.evidence is not None
    assert entry.evidence.default_ratio == pytest.approx(1.0, abs=0.01)
    assert entry.captured.evidence.default_ratio == pytest.approx(0.5, abs=0.01)  # of the device
    assert entry.captured.evidence.median_ms == pytest.approx(0.05, rel=0.03)
    assert entry.captured.evidence.host_us == pytest.approx(300.0)


def test_a_ratio_is_of_the_time_that_is_waited_for() -> None:
    """Half the device's time, but the host takes 0.08 ms to launch what keeps the device for 0.05."""
    entry = entry_of(searched(80.0).result)
    assert entry.choice is not None
    assert entry.choice.tunables == SWIFT
    assert entry.evidence is not None
    assert entry.evidence.default_ratio == pytest.approx(0.8, abs=0.01)
    assert entry.evidence.median_ms == pytest.approx(0.05, rel=0.02)
    assert entry.captured is None


def test_where_one_plan_is_the_best_for_both_there_is_one() -> None:
    assert kernels(searched(30.0)) == ("swift", "swift")
    assert entry_of(searched(30.0).result).captured is None


def test_a_device_that_does_not_run_beside_its_host_has_one_time() -> None:
    trial = searched(300.0, asynchronous=False)
    assert kernels(trial) == ("swift", "swift")
    assert trial.result.captured is None
    assert trial.search.state.ways() == (trial.search.state,)


@pytest.mark.parametrize("seed", range(3))
def test_a_host_that_is_twice_as_slow_gets_the_same_plan(seed: int) -> None:
    """Where either way the same plan is over first."""
    slow = [searched(f * 40.0, quick_us=f * 20.0, seed=seed, trouble=NOISE) for f in (1.0, 2.0)]
    assert {kernels(trial) for trial in slow} == {("swift", "swift")}


def test_an_interrupted_search_recalls_both_times(tmp_path: object) -> None:
    store = Store(None)
    done = searched(300.0)
    recorded = done.search.study
    again = Setting(DENSE, TRUTH, QUICK, rows={"base_ms": 0.1, "host_us": host_us(300.0)}, asynchronous=True).run(
        store=store
    )
    assert again.result.captured is not None
    state = done.search.state
    state.recall(state.entries.values(), recorded.blocks, state.default, loaded=False)
    device = state.under("captured")
    assert math.exp(device.median(device.entry(SWIFT))) == pytest.approx(0.5)
    assert math.exp(state.median(state.entry(SWIFT))) == pytest.approx(3.0)


def test_a_captured_answer_goes_through_a_file() -> None:
    entry = entry_of(searched(300.0).result)
    assert entry.captured is not None
    assert from_plain(PlanEntry, to_plain(entry), "here") == entry


def test_settings_say_eager_where_nobody_asks() -> None:
    assert SearchSettings.__dataclass_fields__["launch"].default == "eager"


# --- CUDA graphs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_where_the_host_is_the_slower_one_the_fastest_device_time_is_replayed_from_a_graph(seed: int) -> None:
    trial = searched(300.0, quick_us=150.0, graphs=True, seed=seed, trouble=NOISE)
    entry = entry_of(trial.result)
    assert entry.choice is not None
    assert (entry.choice.tunables.branches[0].forward, entry.choice.tunables.launch) == ("swift", "graph")
    assert entry.evidence is not None
    assert entry.evidence.default_ratio == pytest.approx(1 / 3, abs=0.01)
    assert entry.evidence.host_us == REPLAY_US["infer"]
    assert entry.captured is not None
    assert entry.captured.tunables == SWIFT


@pytest.mark.parametrize("quick_us", [20.0, 49.0])
def test_where_the_device_is_the_slower_one_by_far_no_graph_is_tried(quick_us: float) -> None:
    trial = searched(20.0, quick_us=quick_us, graphs=True)
    assert not any(plan_.launch == "graph" for plan_ in trial.search.state.entries)


def test_where_the_host_is_nearly_as_slow_graphs_are_tried_and_a_plan_that_gains_nothing_is_not_chosen() -> None:
    trial = searched(45.0, quick_us=60.0, graphs=True)
    assert any(plan_.launch == "graph" for plan_ in trial.search.state.entries)
    assert trial.result.choice is not None
    assert trial.result.choice.tunables == SWIFT


def test_a_graph_that_holds_too_much_is_not_chosen() -> None:
    trial = searched(300.0, quick_us=150.0, graphs=True, limits=Limits(int(1.5 * MIB)))
    assert trial.result.choice is not None
    assert trial.result.choice.tunables.launch == "eager"


def test_a_training_step_is_replayed_with_the_checkpoint_that_a_graph_keeps() -> None:
    cell = workload(pattern=Pattern())
    rows = {"base_ms": 0.1, "host_us": lambda tunables: 400.0}
    default = plan(cell, "quick", checkpoint="full")
    trial = Setting(cell, TRUTH, default, rows=rows, asynchronous=True, graphs=True).run()
    assert trial.result.choice is not None
    assert (trial.result.choice.tunables.launch, trial.result.choice.tunables.checkpoint) == ("graph", "selective")


def test_the_default_is_no_finalist_beside_itself_where_its_graph_is_the_fastest() -> None:
    """Inside another capture a graph of the default is the default, which every block holds anyway."""
    search = searched(300.0, quick_us=150.0, graphs=True).search
    graph = search.state.entry(replace(QUICK, launch="graph"))
    assert search.state.may_be_chosen(graph)
    _, captured = search.state.ways()
    captured.entry(graph.tunables).log_ratios |= dict.fromkeys(captured.default_ms, -5.0)
    found = finalists(search.state, search.beliefs)
    assert len(set(found)) == len(found)
    assert QUICK not in found
