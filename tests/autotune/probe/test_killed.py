"""The whole probe is killed, at any moment: what was finished stays, nothing is done twice, a profile is whole."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from killed_probe import Run, run_probe, truth
from machines import FACTS
from patience import LIMIT_S
from report_samples import cpu_profile

from autotune.exit_codes import ExitCode
from ringattn.profile.yaml_io import load_profile, save_profile

ROOT = Path(__file__).parents[3]
FINISHED_STATES = (1, 2)  # in a journal: complete, pruned
KILLS = 20
TELL = 6  # the operation that gives a trial its state


def whole_lines(journal: Path) -> bytes:
    content = journal.read_bytes() if journal.exists() else b""
    return content[: content.rfind(b"\n") + 1]


def finished_trials(journal: Path) -> int:
    operations = [json.loads(line) for line in whole_lines(journal).splitlines()]
    return sum(o["op_code"] == TELL and o.get("state") in FINISHED_STATES for o in operations)


def blocks_kept(journal: Path) -> int:
    return sum(b'"block ' in line for line in whole_lines(journal).splitlines())


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    path = tmp_path_factory.mktemp("whole") / "m.yaml"
    return path, run_probe(path)


def check_chain(runs: list[Run], journal: Path) -> None:
    """Over all runs of one probe: no trial is told twice, and each kill loses one check or block at most."""
    kills = len(runs) - 1
    told = Counter(event for run in runs for event in run.of("told"))
    assert told
    assert set(told.values()) == {1}
    checks = Counter((cell, key) for run in runs for cell, key in run.of("check"))
    assert checks.total() - len(checks) <= kills
    blocks = sum(len(run.of("block")) for run in runs)
    assert blocks_kept(journal) <= blocks <= blocks_kept(journal) + kills


def test_a_probe_killed_at_twenty_moments_loses_nothing(tmp_path: Path, uninterrupted: tuple[Path, Run]) -> None:
    whole_path, whole = uninterrupted
    path, journal = tmp_path / "m.yaml", tmp_path / "m.yaml.journal"
    save_profile(cpu_profile(), path)  # of another machine
    old = path.read_bytes()
    moments = random.Random(4)
    runs: list[Run] = []
    kept = b""
    while len(runs) < KILLS:
        done = min(1.0, len(whole_lines(journal)) / len(whole_lines(whole_path.with_name(journal.name))))
        left = len(whole.events) * (1 - done) / (KILLS - len(runs) + 1)  # to the next kill, were they evenly spread
        run = run_probe(path, 1 + moments.randrange(max(1, round(2 * left))), moments.uniform(0.0, 0.003))
        assert not run.finished, "killed too late: the moments do not fit the probe"
        runs.append(run)
        now = whole_lines(journal)
        assert now.startswith(kept)  # what a killed probe had written is what the next goes on from
        kept = now
        assert finished_trials(journal) >= sum(len(run.of("told")) for run in runs)
        assert path.read_bytes() == old
    last = run_probe(path)
    runs.append(last)
    assert whole_lines(journal).startswith(kept)
    check_chain(runs, journal)
    cells, wanted = load_profile(path).plans, load_profile(whole_path).plans
    # Which of two equal plans wins may differ (where rows lie makes no difference here): each kill costs a block.
    assert [(cell.workload, truth(cell.workload, cell.choice.tunables)) for cell in cells if cell.choice] == [
        (cell.workload, truth(cell.workload, cell.choice.tunables)) for cell in wanted if cell.choice
    ]


def test_a_kill_while_the_profile_is_written_leaves_the_old_or_the_new(
    tmp_path: Path, uninterrupted: tuple[Path, Run]
) -> None:
    _, whole = uninterrupted
    begun = tmp_path / "begun"
    begun.mkdir()
    save_profile(cpu_profile(), begun / "m.yaml")
    run_probe(begun / "m.yaml", len(whole.events) * 9 // 10)
    old = (begun / "m.yaml").read_bytes()
    moments = random.Random(5)
    for number in range(6):
        folder = tmp_path / str(number)
        shutil.copytree(begun, folder)
        path = folder / "m.yaml"
        run_probe(path, "saving", 1.5e-3 * (number + moments.random()))  # writing takes some milliseconds
        if path.read_bytes() == old:
            assert run_probe(path).finished
        profile = load_profile(path)  # its checksum holds
        assert profile.fingerprint.sku == FACTS.sku
        assert len(profile.plans) == 2


def test_the_real_probe_killed_with_its_whole_group_goes_on(tmp_path: Path) -> None:
    profile, journal = tmp_path / "here.yaml", tmp_path / "here.yaml.journal"
    old_profile = replace(cpu_profile(), software=(("torch", "1.0"),))
    save_profile(old_profile, profile)
    old = profile.read_bytes()
    options = ["--effort", "quick", "--budget", "25", "--seq-len", "64", "--heads", "1", "--head-dim", "32"]
    options += ["--mode", "train", "--device", "cpu", "--output", str(profile)]
    environ = {**os.environ, "XDG_STATE_HOME": str(tmp_path / "state"), "OMP_NUM_THREADS": "1"}

    def start() -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "autotune", "probe", *options],
            cwd=ROOT, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True,
        )  # fmt: skip

    kept, finished = b"", 0
    moments = random.Random(6)
    for moment in ("to measure", "search", ": final"):  # by the last a cell has trials
        killed = start()
        assert killed.stderr is not None
        try:
            for line in killed.stderr:
                if moment in line:
                    break
            time.sleep(moments.uniform(0.0, 0.5))
        finally:
            os.killpg(killed.pid, signal.SIGKILL)
        killed.communicate()
        assert whole_lines(journal).startswith(kept)
        assert finished_trials(journal) >= finished
        kept, finished = whole_lines(journal), finished_trials(journal)
        if profile.read_bytes() != old:
            assert load_profile(profile).plans
    last = start()
    _, told = last.communicate(timeout=LIMIT_S)
    busy = (ExitCode.INCONCLUSIVE, ExitCode.NOTHING_MEASURED)  # of a machine that others use as well
    assert last.returncode in (ExitCode.OK, *busy), told
    assert finished > 0
    assert whole_lines(journal).startswith(kept)
    if last.returncode == ExitCode.OK:
        assert {entry.workload.seq_len for entry in load_profile(profile).plans} == {64}
    else:
        assert profile.read_bytes() == old or load_profile(profile).plans
