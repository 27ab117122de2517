"""A probe of two ranks from the command line to the profile that the runtime obeys on two ranks."""

from __future__ import annotations

import datetime
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from patience import LIMIT_S
from pool import Pool
from test_ranks import ended

from autotune.distributed.coordinator import Coordinator
from autotune.distributed.evaluator import RanksEvaluator
from autotune.exit_codes import ExitCode, ProbeFailure
from autotune.measure.evaluator import Evaluator
from autotune.measure.simulated import SimulatedClock
from autotune.probe.cells.runs import HANG_S
from autotune.probe.cells.space import space_for
from autotune.probe.machine.environment import Environment, bench_settings, default_profile_path, environment_of
from autotune.probe.output.writer import merged, merged_speeds, same_machine
from autotune.probe.probe_context import ProbeContext
from autotune.probe.request import ProbeObserver, ProbeRequest
from autotune.probe.run import ProbeRun, journal_identity
from autotune.probe.tuning import verify_profile
from autotune.probe.workloads.grid import cells_for
from autotune.search.budget import EffortPreset
from ringattn import RingAttention
from ringattn.hardware.facts import HardwareFacts
from ringattn.profile.precedence import origin_of
from ringattn.profile.schema import Fingerprint, LinkSpeed, PlanEntry, Profile
from ringattn.profile.yaml_io import load_profile
from ringattn.workload import Tunables, Workload

REPO = Path(__file__).resolve().parents[3]
SMALL = ("--seq-len", "1024", "--heads", "2", "--head-dim", "32", "--mode", "infer", "--device", "cpu")
ONE_BRANCH = ("--segment-lengths", "8192", "--dilation-rates", "1")  # longer than a share: it crosses the ranks
REQUEST = ProbeRequest(
    effort="quick",
    budget_s=3600,  # a quick search ends by itself
    seq_lens=(64,),
    heads=2,
    head_dim=16,
    modes=("train",),
    device="cpu",
    ranks=2,
    precision="fp32",
)


# --- invented times, real everything else ------------------------------------------------------------------------


def environment(coordinator: Coordinator, tmp_path: Path) -> Environment:
    def evaluator(facts: HardwareFacts, request: ProbeRequest, preset: EffortPreset) -> Evaluator:
        return RanksEvaluator(coordinator, bench_settings(facts, request, preset), bench="still_bench:StillBench")

    environ = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    # Times are invented and the clock stands still, so that what is found does not depend on what else runs here.
    made = environment_of(coordinator.facts, evaluator, ("cpu-of-this-test",))
    return replace(made, environ=environ, home=tmp_path, clock=SimulatedClock(), today=datetime.date(2026, 1, 2))


def _planned(path: str) -> tuple[str, Tunables]:
    """What the runtime makes of a profile on one of two ranks."""
    module = RingAttention(2, 16, causal=True, profile=path, device="cpu", process_group=dist.group.WORLD)
    return module.layout, module.plan_for(64, "fp32", True).tunables


def test_two_ranks_are_tuned_as_one_and_the_runtime_obeys(
    coordinator: Coordinator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a layout that is not the module's own, which then takes it from the profile."""
    monkeypatch.setitem(HANG_S, "cpu", LIMIT_S)  # nothing hangs, but the machine may be busy
    here = environment(coordinator, tmp_path)
    path = tmp_path / "dense.yaml"
    request = replace(REQUEST, output=path, layout="contiguous")
    dense = [cell for cell in cells_for(request, here.facts) if cell.workload.pattern.dense]
    result = ProbeRun(ProbeContext.of(request, ProbeObserver(), here), path, dense).run()
    (cell,) = result.cells
    assert cell.workload.world == 2
    assert cell.chosen is not None
    assert cell.default is not None
    assert cell.default.schedule in ("ring", "all-gather")
    assert (cell.chosen.schedule, cell.chosen.layout) == ("ulysses", "contiguous")
    assert cell.default_ratio == pytest.approx(0.5, rel=0.01)

    profile = load_profile(path)
    (entry,) = profile.plans
    assert entry.choice is not None
    assert entry.choice.evidence is not None
    assert entry.choice.evidence.median_ms == pytest.approx(3.3)  # the slower rank's
    (speed,) = profile.fingerprint.link_speeds
    assert (speed.world, speed.hosts) == (2, 1)
    failures = {failure.candidate.split(" ")[0]: (failure.kind, failure.message) for failure in entry.failures}
    assert failures["flash-cpu/math"] == ("error", "rank 1: RuntimeError: not on this rank")

    assert verify_profile(path, request, ProbeObserver(), here).stale == ()
    with pytest.raises(ProbeFailure, match=r"its plans are for 2 ranks, not 1; run: ringtune verify --nproc 2 .*yaml"):
        verify_profile(path, replace(request, ranks=1), ProbeObserver(), here)

    pool = Pool(2)
    try:
        for layout, tunables in pool.run(_planned, str(path)):
            assert layout == "contiguous"
            assert tunables == entry.choice.tunables
    finally:
        pool.stop()


def test_rows_of_other_numbers_of_ranks_stay(coordinator: Coordinator) -> None:
    """And the newest reading of the links for each number."""
    old_speed, new_speed = LinkSpeed(2, 1, 10.0, 5.0), LinkSpeed(4, 1, 20.0, 5.0)
    fingerprint = replace(Fingerprint.of(coordinator.facts), link_speeds=(old_speed,))
    alone, ring = Workload("infer", True, 64, 2, 16, "fp32"), Workload("infer", True, 64, 2, 16, "fp32", world=2)
    rows = {cell: PlanEntry(cell, refusal="for a test") for cell in (alone, ring)}
    old = Profile("measured", fingerprint, coordinator.facts.software, plans=tuple(rows.values()))
    assert same_machine(old, coordinator.facts)
    new = {replace(ring, world=4): PlanEntry(replace(ring, world=4), refusal="too")}
    kept = {cell: replace(row, origin=origin_of(old, row)) for cell, row in rows.items()}
    assert merged(old, new) == kept | new
    assert merged_speeds(old, new_speed) == (old_speed, new_speed)
    assert merged_speeds(old, replace(old_speed, ring_gb_s=11.0)) == (LinkSpeed(2, 1, 11.0, 5.0),)
    assert merged_speeds(None, None) == ()


def test_a_journal_belongs_to_a_number_of_ranks_and_a_layout(coordinator: Coordinator, tmp_path: Path) -> None:
    here = environment(coordinator, tmp_path)
    requests = (REQUEST, replace(REQUEST, ranks=4), replace(REQUEST, layout="zigzag"), replace(REQUEST, ranks=1))
    names = {journal_identity(request, here.facts) for request in requests}
    assert len(names) == len(requests)


def test_profiles_of_several_ranks_have_a_name_of_their_own(coordinator: Coordinator, tmp_path: Path) -> None:
    here = environment(coordinator, tmp_path)
    alone, two = default_profile_path(here), default_profile_path(here, 2)
    assert two.name == alone.name.replace(".yaml", "-x2.yaml")
    assert re.fullmatch(r"cpu-.*-1t-x2\.yaml", two.name) or here.facts.sm_count == 1


def test_every_schedule_is_one_turn_of_a_knob_away(coordinator: Coordinator, tmp_path: Path) -> None:
    request = replace(REQUEST, ranks=4, heads=8, seq_lens=(256,))
    here = environment(coordinator, tmp_path)
    dense, dilated = (space_for(cell, here, request.layout) for cell in cells_for(request, here.facts))
    raced = {(plan.schedule, plan.ulysses, plan.head_groups) for plan in dense.kernel_plans}
    assert raced >= {("ring", 0, 0), ("all-gather", 0, 4), ("ulysses", 0, 0), ("ulysses-ring", 2, 0)}
    for plan in dense.kernel_plans:
        turned = {move.tunables.schedule for move in dense.neighbours(plan) if move.knob == "schedule"}
        assert turned | {plan.schedule} == {"ring", "all-gather", "ulysses", "ulysses-ring"}
    assert {plan.layout for plan in dense.kernel_plans} == {"zigzag"}
    assert {plan.layout for plan in dilated.kernel_plans} == {"contiguous"}


def test_what_would_run_out_of_memory_is_not_raced_over_ranks(coordinator: Coordinator, tmp_path: Path) -> None:
    here = environment(coordinator, tmp_path)
    for length, raced in ((4096, True), (8192, False)):
        request = replace(REQUEST, seq_lens=(length,))
        dense = next(space_for(cell, here) for cell in cells_for(request, here.facts) if cell.workload.pattern.dense)
        names = {branch.forward for plan in dense.kernel_plans for branch in plan.branches}
        assert ("math" in names) is raced
        assert any("logits of 16384 rows" in why for _, reasons in dense.rejected for why in reasons) is not raced


# --- the command -------------------------------------------------------------------------------------------------


def environ_of(tmp_path: Path) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    own |= {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(REPO)}
    return own | {"XDG_CONFIG_HOME": str(tmp_path / "config")}


def descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in map(int, (task / "children").read_text().split()):
            found += [child, *descendants(child)]
    return found


def test_ctrl_c_ends_all_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "autotune", "probe", "--nproc", "2", "--budget", "90", *SMALL, *ONE_BRANCH]
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ_of(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        watchdog = threading.Timer(LIMIT_S, running.kill)
        watchdog.start()
        assert running.stderr is not None
        seen = next(line for line in running.stderr if "cell 1/" in line)
        time.sleep(1.0)
        ranks = descendants(running.pid)
        running.send_signal(signal.SIGINT)
        out, rest = running.communicate()
        watchdog.cancel()
    assert running.returncode == ExitCode.INTERRUPTED, seen + rest
    assert "Traceback" not in rest
    assert out == ""
    assert len(ranks) >= 3
    assert ended(ranks)
