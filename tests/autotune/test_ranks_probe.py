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
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from test_ranks import ended

from autotune.budget import EffortPreset
from autotune.evaluator import Evaluator, MonotonicClock
from autotune.exit_codes import ExitCode, ProbeFailure
from autotune.grid import cells_for
from autotune.probe import ProbeRequest, SilentObserver
from autotune.ranks.evaluator import RanksEvaluator
from autotune.ranks.fleet import Fleet
from autotune.tuning import Edge, _Probe, bench_settings, default_profile_path, edge_of, probe, space_for, verify
from ringattn import RingAttention
from ringattn.hardware import HardwareFacts
from ringattn.profile_io import load_profile
from ringattn.workload import Tunables

sys.path.insert(0, str(Path(__file__).parents[1] / "ring"))
from pool import Pool

REPO = Path(__file__).resolve().parents[2]
SMALL = ("--seq-len", "128", "--heads", "2", "--head-dim", "32", "--mode", "infer", "--device", "cpu")
ONE_BRANCH = ("--segment-lengths", "512", "--dilation-rates", "1")  # longer than a share: it crosses the ranks
REQUEST = ProbeRequest(
    effort="quick", budget_s=40, seq_lens=(64,), heads=2, head_dim=16, modes=("train",), device="cpu", ranks=2
)


# --- invented times, real everything else ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    environ.pop("OMP_NUM_THREADS", None)
    with Fleet(2, "cpu", None, environ) as gathered:
        yield gathered


def edge(fleet: Fleet, tmp_path: Path) -> Edge:
    def evaluator(facts: HardwareFacts, request: ProbeRequest, preset: EffortPreset) -> Evaluator:
        return RanksEvaluator(fleet, bench_settings(facts, request, preset), bench="still_bench:StillBench")

    environ = {"XDG_STATE_HOME": str(tmp_path / "state"), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    made = edge_of(fleet.facts, evaluator)
    return replace(made, environ=environ, home=tmp_path, clock=MonotonicClock(), today=datetime.date(2026, 1, 2))


def _planned(path: str) -> tuple[str, Tunables]:
    """What the runtime makes of a profile on one of two ranks."""
    module = RingAttention(2, 16, causal=True, profile=path, device="cpu", process_group=dist.group.WORLD)
    return module.layout, module.plan_for(64, "fp32", True).tunables


def test_two_ranks_are_tuned_as_one_and_the_runtime_obeys(fleet: Fleet, tmp_path: Path) -> None:
    here = edge(fleet, tmp_path)
    path = tmp_path / "both.yaml"
    request = replace(REQUEST, output=path, segment_lengths=(128,), dilation_rates=(1,), layout="zigzag")
    result = probe(request, SilentObserver(), here)
    (cell,) = result.cells
    assert cell.workload.world == 2
    assert cell.chosen is not None
    assert cell.default is not None
    assert cell.default.schedule in ("ring", "all-gather")
    assert (cell.chosen.schedule, cell.chosen.layout) == ("ulysses", "zigzag")
    assert cell.default_ratio == pytest.approx(0.5, rel=0.01)

    profile = load_profile(path)
    (entry,) = profile.plans
    assert entry.choice is not None
    assert entry.choice.evidence is not None
    assert entry.choice.evidence.median_ms == pytest.approx(3.3)  # the slower rank's
    (speed,) = profile.fingerprint.link_speeds
    assert (speed.world, speed.hosts) == (2, 1)

    verdict = verify(path, request, SilentObserver(), here)
    assert verdict.stale == ()
    with pytest.raises(ProbeFailure, match=r"its plans are for 2 ranks, not 1; run: ringtune verify with --nproc 2"):
        verify(path, replace(request, ranks=1), SilentObserver(), here)


def test_the_layout_of_a_dense_profile_is_how_the_runtime_shards(fleet: Fleet, tmp_path: Path) -> None:
    path = tmp_path / "dense.yaml"
    request = replace(REQUEST, output=path, layout="contiguous")
    here = edge(fleet, tmp_path)
    dense = [cell for cell in cells_for(request, here.facts) if cell.workload.pattern.dense]
    _Probe(request, SilentObserver(), here, path, dense).run()
    (entry,) = load_profile(path).plans
    assert entry.choice is not None
    pool = Pool(2)
    try:
        for layout, tunables in pool.run(_planned, str(path)):
            assert layout == "contiguous"
            assert tunables == entry.choice.tunables
    finally:
        pool.stop()


def test_profiles_of_several_ranks_have_a_name_of_their_own(fleet: Fleet, tmp_path: Path) -> None:
    here = edge(fleet, tmp_path)
    alone, two = default_profile_path(here), default_profile_path(here, 2)
    assert two.name == alone.name.replace(".yaml", "-x2.yaml")
    assert re.fullmatch(r"cpu-.*-1t-x2\.yaml", two.name) or here.facts.sm_count == 1


def test_every_schedule_is_one_turn_of_a_knob_away(fleet: Fleet, tmp_path: Path) -> None:
    request = replace(REQUEST, ranks=4, heads=8, seq_lens=(256,))
    here = edge(fleet, tmp_path)
    dense, dilated = (space_for(cell, here, request.layout) for cell in cells_for(request, here.facts))
    raced = {(plan.schedule, plan.ulysses, plan.head_groups) for plan in dense.kernel_plans}
    assert raced >= {("ring", 0, 0), ("all-gather", 0, 4), ("ulysses", 0, 0), ("ulysses-ring", 2, 0)}
    for plan in dense.kernel_plans:
        turned = {move.tunables.schedule for move in dense.neighbours(plan) if move.knob == "schedule"}
        assert turned | {plan.schedule} == {"ring", "all-gather", "ulysses", "ulysses-ring"}
    assert {plan.layout for plan in dense.kernel_plans} == {"zigzag"}
    assert {plan.layout for plan in dilated.kernel_plans} == {"contiguous"}


# --- the command -------------------------------------------------------------------------------------------------


def environ_of(tmp_path: Path) -> dict[str, str]:
    own = {k: v for k, v in os.environ.items() if k != "OMP_NUM_THREADS"}
    own |= {"HOME": str(tmp_path), "XDG_STATE_HOME": str(tmp_path / "state"), "PYTHONPATH": str(REPO)}
    return own | {"XDG_CONFIG_HOME": str(tmp_path / "config")}


@pytest.mark.parametrize("launcher", ["--nproc", "torchrun"])
def test_the_command_tunes_two_ranks(launcher: str, tmp_path: Path) -> None:
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    start = [*torchrun, "-m", "autotune"] if launcher == "torchrun" else ["-m", "autotune"]
    options = ["--budget", "20", "--effort", "quick", *SMALL, *ONE_BRANCH]
    options += ["--nproc", "2"] if launcher == "--nproc" else []
    done = subprocess.run(
        [sys.executable, *start, "probe", *options],
        cwd=tmp_path,
        env=environ_of(tmp_path),
        capture_output=True,
        text=True,
        timeout=110,
    )
    told = f"{done.stdout}\n{done.stderr}"
    if "no cell could be measured" in told:
        pytest.skip("this machine is too busy to measure anything now")
    assert done.returncode in (ExitCode.OK, ExitCode.INCONCLUSIVE), told
    assert done.stderr.count("cell 1/1") == done.stderr.count("cell 1/1  infer [512]/[1] causal B1 S128"), told
    assert done.stdout.count("Profile written") == 1, told
    (path,) = (tmp_path / "config" / "ringtune").glob("*-x2.yaml")
    profile = load_profile(path)
    assert [entry.workload.world for entry in profile.plans] == [2]
    assert profile.fingerprint.link_speeds[0].ring_gb_s > 0


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
        watchdog = threading.Timer(60, running.kill)
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
