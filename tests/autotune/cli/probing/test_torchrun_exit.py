"""How a probe ends under torchrun, which makes a traceback of every exit code but 0."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from patience import LIMIT_S
from report_samples import gpu_profile

import autotune.probe.tuning
from autotune.cli.main import cli
from autotune.exit_codes import ExitCode, NothingMeasured
from autotune.probe.request import ProbeObserver, ProbeRequest, ProbeResult

ROOT = Path(__file__).parents[4]
MESSAGE = "inconclusive: train dense: too noisy"
# What torchrun starts here: the command, with an engine that leaves one cell undecided.
SCRIPT = """
import sys
from pathlib import Path
import autotune.probe.tuning
from autotune.cli.main import main
from autotune.probe.request import ProbeResult
from report_samples import gpu_profile
autotune.probe.tuning.run_probe = lambda request, observer: ProbeResult(
    Path("p.yaml"), gpu_profile(), (), 1.0, ("train dense: too noisy",)
)
sys.argv = ["ringtune", "probe"]
main()
"""


def undecided(request: ProbeRequest, observer: ProbeObserver) -> ProbeResult:
    return ProbeResult(Path("p.yaml"), gpu_profile(), (), 1.0, ("train dense: too noisy",))


def test_cells_left_undecided_are_no_failure_of_the_job(tmp_path: Path) -> None:
    script = tmp_path / "probe.py"
    script.write_text(SCRIPT)
    paths = os.pathsep.join((str(ROOT), str(Path(__file__).parents[3] / "support" / "autotune")))
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", str(script)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": paths},
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stderr
    assert MESSAGE in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("variables", "code"), [({}, ExitCode.INCONCLUSIVE), ({"TORCHELASTIC_RUN_ID": "a"}, 0)])
def test_elsewhere_they_are_exit_code_6(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], code: int) -> None:
    monkeypatch.setattr(autotune.probe.tuning, "run_probe", undecided)
    result = CliRunner(env=variables).invoke(cli, ["probe"])
    assert result.exit_code == code
    assert MESSAGE in result.stderr


def test_a_probe_that_wrote_nothing_fails_under_torchrun_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(request: ProbeRequest, observer: ProbeObserver) -> ProbeResult:
        raise NothingMeasured("no cell could be measured")

    monkeypatch.setattr(autotune.probe.tuning, "run_probe", nothing)
    result = CliRunner(env={"TORCHELASTIC_RUN_ID": "a"}).invoke(cli, ["probe"])
    assert result.exit_code == ExitCode.NOTHING_MEASURED
