"""Ctrl-C in the middle of a real probe: exit 130, one line, the old profile as it was, the journal kept."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from patience import LIMIT_S
from report_samples import cpu_profile

from ringattn.profile.yaml_io import save_profile

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("moment", ["to measure", "cell 1/"])
def test_ctrl_c_ends_a_probe_and_loses_nothing(tmp_path: Path, moment: str) -> None:
    profile = tmp_path / "here.yaml"
    save_profile(cpu_profile(), profile)
    before = profile.read_bytes()
    options = ("--effort", "quick", "--budget", "90", "--seq-len", "256", "--device", "cpu", "--output", str(profile))
    probe = subprocess.Popen(
        [sys.executable, "-m", "autotune", "probe", *options],
        cwd=ROOT,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that the signal reaches the worker too, as from a terminal
    )
    watchdog = threading.Timer(LIMIT_S, probe.kill)
    watchdog.start()
    try:
        assert probe.stderr is not None
        seen = []
        for line in probe.stderr:
            seen.append(line)
            if moment in line:
                break
        os.killpg(probe.pid, signal.SIGINT)
        out, rest = probe.communicate()
    finally:
        watchdog.cancel()
        probe.kill()
    told = "".join(seen) + rest
    assert probe.returncode == 130, told
    assert out == ""
    assert "Traceback" not in told
    assert rest.splitlines()[-1].startswith("Error: interrupted; finished trials are kept")
    assert profile.read_bytes() == before
    assert [path for path in tmp_path.iterdir() if "journal" in path.name]
    with pytest.raises(ProcessLookupError):
        os.killpg(probe.pid, 0)  # no worker is left behind
