"""The README is true: its commands and its Python run, its profile loads, what it names exists."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.cli import cli
from autotune.exit_codes import ExitCode
from autotune.grid import cells_for
from autotune.probe import ProbeRequest
from ringattn.hardware import detect
from ringattn.profile_io import load_profile, parse_profile

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text("utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
# What makes a real probe end in seconds (one small cell); everything else of a command runs as it is written.
SHORT_PROBE = shlex.split(
    "--effort quick --budget 30 --mode infer --seq-len 128 --heads 2 --head-dim 32 "
    "--segment-lengths 64 --dilation-rates 1 --device cpu"
)
# Longer: messages between processes take turns on the cores of a small machine.
SHORT_RING = shlex.split(
    "--effort quick --budget 20 --mode infer --seq-len 1024 --heads 2 --head-dim 32 "
    "--segment-lengths 8192 --dilation-rates 1 --device cpu"
)
ONE_TEST = "-q -p no:cacheprovider tests/autotune/test_progress.py"


def blocks(language: str) -> list[str]:
    return [text for kind, text in BLOCKS if kind == language]


def commands() -> list[str]:
    lines = [line.split("#")[0].strip() for text in blocks("console") for line in text.splitlines()]
    return list(dict.fromkeys(line for line in lines if line))


def as_run(command: str) -> list[str]:
    """How a command of the README runs here: with this Python, installing nothing, in seconds."""
    words = shlex.split(command)
    if words[0] == "make":
        extra = ["NO_INSTALL=1", f"PYTHON={sys.executable}", f"PROBE_ARGS={shlex.join(SHORT_PROBE)}"]
        return [*words, *extra, f"PYTEST_ARGS={ONE_TEST}"]
    if words[:2] == ["pip", "install"]:
        checks_only = ["--dry-run", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
        target = [str(ROOT) if word == "." else word for word in words[2:]]
        return [sys.executable, "-m", "pip", "install", *checks_only, *target]
    if words[0] == "torchrun":
        assert words[-3:] == ["-m", "autotune", "probe"]
        return [sys.executable, "-m", "torch.distributed.run", *words[1:], *SHORT_RING]
    assert words[0] == "ringtune", f"the README runs {command!r}; say here how a test can"
    if words[1] == "probe":
        words += SHORT_RING if "--nproc" in words else SHORT_PROBE
    return [sys.executable, "-m", "autotune", *words[1:]]


def run(command: list[str], home: Path) -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "MAKELEVEL", "CI")}
    environ |= {"HOME": str(home), "XDG_CONFIG_HOME": str(home / ".config"), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=250)


def test_it_has_the_blocks_that_are_tested_here() -> None:
    assert {kind for kind, _ in BLOCKS} == {"console", "python", "yaml"}
    assert len(commands()) >= 4


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all probes, so that what one writes the next one finds, as for a reader."""
    return tmp_path_factory.mktemp("home")


@pytest.mark.alone
@pytest.mark.parametrize("command", [command for command in commands() if "probe" in command])
def test_its_probes_run(command: str, home: Path) -> None:
    done = run(as_run(command), home)
    told = f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    if re.search(r"inconclusive|no cell could be measured|Error 6$", done.stderr, re.MULTILINE):
        pytest.skip("this machine is too busy to measure anything now")
    assert done.returncode == 0, told
    ranks = 2 if "nproc" in command else 1
    files = (home / ".config" / "ringtune").glob("*.yaml")
    (profile,) = (load_profile(path) for path in files if ("-x2" in path.name) is (ranks == 2))
    (entry,) = profile.plans
    assert entry.workload.world == ranks
    assert [speed.ring_gb_s > 0 for speed in profile.fingerprint.link_speeds] == [True] * (ranks - 1)
    assert done.stderr.count("finished after") == 1, told  # said by rank 0 alone


@pytest.mark.parametrize("command", [command for command in commands() if "probe" not in command])
def test_its_other_commands_run(command: str, tmp_path: Path) -> None:
    if command.startswith("pip install"):
        pytest.importorskip("hatchling", reason="pip install '.[dev]' brings it")
    done = run(as_run(command), tmp_path)
    assert done.returncode == 0, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.splitlines()[0])
def test_its_python_runs(code: str, tmp_path: Path) -> None:
    done = run([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip(), "it prints the plan that ran"


def test_its_python_runs_what_a_quick_probe_of_a_cpu_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what a newcomer has just measured serves the first lines they run."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (code,) = blocks("python")
    ran: dict[str, Any] = {}
    exec(code, ran)  # noqa: S102 - the README's own lines
    batch, seq_len = ran["q"].shape[:2]
    assert ran["q"].dtype == torch.float32
    grid = {cell.workload for cell in cells_for(ProbeRequest(effort="quick"), detect("cpu"))}
    assert ran["attn"].shape.workload(seq_len, "fp32", True, batch) in grid


@pytest.mark.parametrize("text", blocks("yaml"), ids=lambda text: "profile")
def test_its_profile_loads(text: str) -> None:
    profile = parse_profile(text, "README.md")
    assert profile.source == "measured"
    assert profile.plans
    assert profile.plans[0].choice is not None
    assert profile.plans[0].choice.evidence is not None


def test_the_commands_it_names_are_those_there_are() -> None:
    named = set(re.findall(r"`ringtune (\w+)", README))
    assert named == set(cli.commands)


def test_the_options_it_names_exist() -> None:
    known = {name for command in cli.commands.values() for p in command.params for name in (*p.opts, *p.secondary_opts)}
    known |= {"--help", "--version"}
    ours = re.sub(r"^torchrun .*-m autotune", "", README, flags=re.MULTILINE)  # what stands before is torchrun's
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", ours)) <= known


def test_the_exit_codes_it_names_are_those_there_are() -> None:
    sentence = re.search(r"Exit codes: (.*?)\.", README, re.DOTALL)
    assert sentence is not None
    assert [int(n) for n in re.findall(r"\b(\d+) [a-z]", sentence[1])] == [int(code) for code in ExitCode]


def test_the_files_it_links_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)", README):
        if not target.startswith(("http://", "https://")):
            assert (ROOT / target).exists(), target


def test_the_extras_it_names_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert set(re.findall(r"ringtune\[(\w+)\]", README)) <= set(project["optional-dependencies"])
