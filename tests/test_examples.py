"""The examples run as a reader would run them, and print the plan that is in the profile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from warm_start import WarmPopen, start_warm

from ringattn.hardware.facts import detect
from ringattn.profile.schema import Choice, Fingerprint, PlanEntry, Profile
from ringattn.profile.yaml_io import save_profile
from ringattn.workload import Branch, BranchTunables, Pattern, Tunables, Workload, describe

ROOT = Path(__file__).parents[1]
RUN = "import runpy, sys; sys.argv[:] = sys.argv[1:]; runpy.run_path(sys.argv[0], run_name='__main__')"
PLANS = {
    (): (Pattern(), (BranchTunables("math", "flash-cpu"),)),
    ("--segments", "256,1024", "--rates", "1,4"): (
        Pattern((Branch(256, 1), Branch(1024, 4))),
        (BranchTunables("flash-cpu", "math"), BranchTunables("flash-cpu", "flash-cpu", "copy")),
    ),
}


def run_example(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", RUN, str(ROOT / "examples" / "attend.py"), *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )


@pytest.mark.parametrize("arguments", PLANS, ids=["dense", "dilated"])
def test_attend_prints_exactly_the_plan_in_the_file(
    arguments: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_warm(monkeypatch, WarmPopen)  # the one below is a fresh interpreter
    pattern, branches = PLANS[arguments]
    facts = detect("cpu")
    workload = Workload("train", True, 2048, 4, 64, "fp32", pattern=pattern)
    entry = PlanEntry(workload, Choice(Tunables("fp32", branches)))
    profile = Profile("measured", Fingerprint.of(facts), facts.software, plans=(entry,))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    save_profile(profile, tmp_path / "ringtune" / "here.yaml")
    done = run_example(*arguments)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    lines = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    plan, _, origin = lines["plan"].partition("  (")
    assert plan == f"{workload}: {describe(Tunables('fp32', branches))}"
    assert origin == "profile, not measured)"  # the file holds no evidence
    assert lines["out"] == "(1, 2048, 4, 64) torch.float32"
    assert all(float(norm) > 0 for norm in lines["grads"].split())


def test_attend_says_so_when_nothing_was_measured() -> None:
    done = run_example("--seq-len", "64", "--heads", "2", "--head-dim", "16")
    assert done.returncode == 0, done.stderr
    assert "ringtune probe" in done.stderr
    assert "plan  train dense causal B1 S64 H2 D16 fp32" in done.stdout
