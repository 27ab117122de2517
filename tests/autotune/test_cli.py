"""The ``ringtune`` command: every option is live, every fault is one line and an exit code, --json is one document."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner, Result
from report_samples import evidence, gpu_profile, heuristic_profile, plan

import autotune.tuning
from autotune.cli import cli
from autotune.commands.probe import _how_to_use
from autotune.exit_codes import DeviceBusy, ExitCode, Inconclusive, NoDevice, ProbeFailure, UsageFailure
from autotune.probe import (
    CellReport,
    DryCell,
    DryRun,
    ProbeObserver,
    ProbeRequest,
    ProbeResult,
    TrialOutcome,
    VerifiedCell,
    VerifyResult,
)
from ringattn.errors import DeviceError, PlanError, ProfileError
from ringattn.hardware import detect
from ringattn.profile import Choice, Failure, Fingerprint, PlanEntry, Profile, Provenance
from ringattn.profile_io import save_profile
from ringattn.workload import Workload

ROOT = Path(__file__).parents[2]
COMMANDS = ("probe", "show", "report", "explain", "which", "validate", "verify", "doctor")
PROBE_OPTIONS = [
    "--output",
    "--effort",
    "--budget",
    "--mode",
    "--causal",
    "--no-causal",
    "--seq-len",
    "--batch-size",
    "--heads",
    "--kv-heads",
    "--head-dim",
    "--segment-lengths",
    "--dilation-rates",
    "--dense",
    "--precision",
    "--max-error",
    "--varied-lengths",
    "--memory-limit",
    "--prefer",
    "--seed",
    "--device",
    "--nproc",
    "--layout",
    "--resume",
    "--fresh",
    "--dry-run",
    "--json",
]


def ringtune(*arguments: str | Path, **env: str) -> Result:
    return CliRunner(env=env).invoke(cli, [str(a) for a in arguments], prog_name="ringtune")


def one_line_error(result: Result, code: int) -> str:
    """The single stderr line of a command that failed for a reason the user can mend."""
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("Error: ")
    return lines[0]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ProbeRequest]:
    """Replaces the engine with one that only remembers what it was asked."""
    requests: list[ProbeRequest] = []

    def remember(request: ProbeRequest, observer: ProbeObserver) -> ProbeResult:
        requests.append(request)
        return ProbeResult(Path("p.yaml"), gpu_profile(), (), 12.0)

    monkeypatch.setattr(autotune.tuning, "run_probe", remember)
    return requests


def engine(monkeypatch: pytest.MonkeyPatch, act: Callable[[ProbeObserver], ProbeResult]) -> None:
    monkeypatch.setattr(autotune.tuning, "run_probe", lambda request, observer: act(observer))


@pytest.fixture
def gpu_file(tmp_path: Path) -> Path:
    path = tmp_path / "gpu.yaml"
    save_profile(gpu_profile(), path)
    return path


# --- help and reference -----------------------------------------------------------------------------------------


def test_the_commands_are_those_documented() -> None:
    assert tuple(cli.commands) == COMMANDS


def test_probe_has_every_option() -> None:
    options = {name for p in cli.commands["probe"].params for name in (*p.opts, *p.secondary_opts)}
    assert options == set(PROBE_OPTIONS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_says_what_it_is_for(name: str) -> None:
    command = cli.commands[name]
    assert command.help
    assert command.short_help
    assert len(command.short_help) <= 60
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help
            assert parameter.help.rstrip().endswith((".", "]"))
    assert "--json" in {name for p in command.params for name in p.opts}
    result = ringtune(name, "--help")
    assert result.exit_code == 0
    assert all(len(line) <= 88 for line in result.output.splitlines())


def cli_reference() -> str:
    """docs/cli.md: the help of every command, as it is printed."""
    parts = [
        "# Command reference\n\nWhat `ringtune --help` and the help of every command print. "
        "`UPDATE_DOCS=1 pytest tests/autotune/test_cli.py -k reference` writes this page.\n"
    ]
    for name in ("", *COMMANDS):
        arguments = [name, "--help"] if name else ["--help"]
        shown = CliRunner().invoke(cli, arguments, prog_name="ringtune", terminal_width=88).output
        title = f"ringtune {name}".strip()
        parts.append(f"## {title}\n\n```text\n{shown.rstrip()}\n```\n")
    return "\n".join(parts)


def test_the_reference_page_is_current() -> None:
    page = ROOT / "docs" / "cli.md"
    if os.environ.get("UPDATE_DOCS"):
        page.parent.mkdir(exist_ok=True)
        page.write_text(cli_reference(), encoding="utf-8")
    assert page.read_text("utf-8") == cli_reference(), (
        "run: UPDATE_DOCS=1 pytest tests/autotune/test_cli.py -k reference"
    )


def test_the_help_lists_the_exit_codes() -> None:
    text = ringtune("--help").output
    for code in ExitCode:
        assert re.search(rf"\b{int(code)} \w", text)


def test_version() -> None:
    import ringattn

    assert ringtune("--version").output == f"ringtune {ringattn.__version__}\n"


def test_help_and_reading_a_profile_do_not_import_torch(gpu_file: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    code = f"""
import sys
from click.testing import CliRunner
from autotune.cli import cli
for arguments in (["--help"], ["--version"], *([name, "--help"] for name in {COMMANDS!r}),
                  ["show", {str(gpu_file)!r}], ["show", "--json", {str(gpu_file)!r}], ["validate", {str(gpu_file)!r}],
                  ["report", {str(gpu_file)!r}, "--output", {str(page)!r}]):
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, (arguments, result.output)
    heavy = {{"torch", "optuna", "numpy", "triton"}} & set(sys.modules)
    assert not heavy, (arguments, heavy)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


# --- every option of probe is live ------------------------------------------------------------------------------

LIVE = [
    (("--effort", "full"), {"effort": "full"}),
    (("--budget", "12.5"), {"budget_s": 12.5}),
    (("--mode", "train"), {"modes": ("train",)}),
    (("--mode", "infer"), {"modes": ("infer",)}),
    (("--causal",), {"causal": True}),
    (("--no-causal",), {"causal": False}),
    (("--seq-len", "512", "--seq-len", "777"), {"seq_lens": (512, 777)}),
    (("--batch-size", "3"), {"batch_size": 3}),
    (("--heads", "6"), {"heads": 6}),
    (("--heads", "6", "--kv-heads", "2"), {"heads": 6, "kv_heads": 2}),
    (("--head-dim", "80"), {"head_dim": 80}),
    (
        ("--segment-lengths", "64,128", "--dilation-rates", "1,2"),
        {"segment_lengths": (64, 128), "dilation_rates": (1, 2)},
    ),
    (("--dense",), {"dense": True}),
    (("--precision", "tf32"), {"precision": "tf32"}),
    (("--max-error", "1e-3"), {"max_error": 1e-3}),
    (("--varied-lengths",), {"varied_lengths": True}),
    (("--memory-limit", "512"), {"memory_limit_mib": 512}),
    (("--memory-limit", "24GiB"), {"memory_limit_mib": 24576}),
    (("--prefer", "memory"), {"prefer": "memory"}),
    (("--seed", "7"), {"seed": 7}),
    (("--device", "cpu"), {"device": "cpu"}),
    (("--device", "1"), {"device": "cuda:1"}),
    (("--nproc", "1"), {}),
    (("--nproc", "3", "--device", "cpu"), {"ranks": 3, "device": "cpu"}),
    (("--nproc", "2", "--device", "cpu", "--layout", "zigzag"), {"ranks": 2, "device": "cpu", "layout": "zigzag"}),
    (("--fresh",), {"resume": False}),
    (("--resume",), {"resume": True}),
    (("--dry-run",), {"dry_run": True}),
]


@pytest.mark.parametrize(("arguments", "expected"), LIVE, ids=[" ".join(a) for a, _ in LIVE])
def test_an_option_reaches_the_engine(
    asked: list[ProbeRequest], arguments: tuple[str, ...], expected: dict[str, Any]
) -> None:
    assert ringtune("probe", *arguments).exit_code == 0
    assert asked == [replace(ProbeRequest(modes=("train", "infer")), **expected)]


def test_output_reaches_the_engine(asked: list[ProbeRequest], tmp_path: Path) -> None:
    assert ringtune("probe", "--output", tmp_path / "mine.yaml").exit_code == 0
    assert asked[0].output == tmp_path / "mine.yaml"
    assert list(tmp_path.iterdir()) == []


def test_a_profile_that_the_runtime_does_not_find_says_how_to_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGTUNE_PROFILE_PATH", str(tmp_path / "found"))
    assert _how_to_use(tmp_path / "found" / "m.yaml") == "RingAttention(profile='auto') uses it from now on"
    elsewhere = tmp_path / "m.yaml"
    assert _how_to_use(elsewhere) == f"RINGTUNE_PROFILE={elsewhere} or RingAttention(profile='{elsewhere}') uses it"
    monkeypatch.setenv("RINGTUNE_PROFILE", str(elsewhere))
    assert "from now on" in _how_to_use(elsewhere)


def test_every_field_of_the_request_can_be_asked_for() -> None:
    covered = {name for _, expected in LIVE for name in expected} | {"output"}
    assert covered == {f.name for f in fields(ProbeRequest)}


# --- usage ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("probe", "--seq-len", "0"), "--seq-len"),
        (("probe", "--seq-len", "x"), "--seq-len"),
        (("probe", "--heads", "0"), "--heads"),
        (("probe", "--heads", "6", "--kv-heads", "4"), "--heads is 6, not a multiple of --kv-heads, 4"),
        (("probe", "--kv-heads", "4"), "--kv-heads needs --heads"),
        (("probe", "--segment-lengths", "1,2", "--dilation-rates", "1"), "2 entries and --dilation-rates 1"),
        (("probe", "--segment-lengths", "1,2"), "go together"),
        (("probe", "--dense", "--segment-lengths", "8", "--dilation-rates", "1"), "ask for different attention"),
        (("probe", "--segment-lengths", "0", "--dilation-rates", "1"), "every entry must be an integer >= 1"),
        (("probe", "--segment-lengths", "a", "--dilation-rates", "1"), "not a list of integers"),
        (("probe", "--budget", "0"), "not a number above 0"),
        (("probe", "--budget", "nan"), "not a number above 0"),
        (("probe", "--budget", "inf"), "not a number above 0"),
        (("probe", "--max-error", "-1"), "not a number above 0"),
        (("probe", "--memory-limit", "0"), "not a memory size"),
        (("probe", "--memory-limit", "3TB"), "not a memory size"),
        (("probe", "--seed", "-1"), "--seed"),
        (("probe", "--device", "banana"), "'banana' is not a device"),
        (("probe", "--effort", "heroic"), "--effort"),
        (("explain", "--seq-len", "0"), "--seq-len"),
        (("explain", "--heads", "6", "--kv-heads", "4"), "not a multiple"),
        (("explain", "--dtype", "int8"), "--dtype"),
        (("validate",), "PROFILES"),
        (("validate", "--device", "cpu", "x.yaml"), "--device needs --here"),
        (("which", "--json", "--path-only"), "exclude each other"),
        (("report", "--json", "--output", "-", "x.yaml"), "both want stdout"),
        (("frobnicate",), "frobnicate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage_errors(asked: list[ProbeRequest], arguments: tuple[str, ...], told: str) -> None:
    result = ringtune(*arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert asked == []
    if "--json" not in arguments:
        assert result.stdout == ""


# --- exit codes -------------------------------------------------------------------------------------------------

FAULTS = [
    (ProbeFailure("it went wrong"), 1),
    (UsageFailure("nothing to measure"), 2),
    (NoDevice("no such card"), 3),
    (DeviceError("device is 'mps'"), 3),
    (ProbeFailure("no profile", ExitCode.NO_PROFILE), 4),
    (ProbeFailure("stale", ExitCode.STALE), 5),
    (Inconclusive("too noisy"), 6),
    (DeviceBusy("another probe"), 75),
    (ProfileError("f.yaml", "broken", "plans[0]"), 1),
    (PlanError("nothing fits", {"math": ("no",)}), 1),
    (OSError(28, "No space left on device"), 1),
    (PermissionError(13, "Permission denied", "/some/file"), 1),
]


@pytest.mark.parametrize(
    ("fault", "code"), FAULTS, ids=lambda v: type(v).__name__ if isinstance(v, Exception) else str(v)
)
def test_faults_are_one_line_and_their_code(monkeypatch: pytest.MonkeyPatch, fault: Exception, code: int) -> None:
    def fail(observer: ProbeObserver) -> ProbeResult:
        raise fault

    engine(monkeypatch, fail)
    line = one_line_error(ringtune("probe"), code)
    assert line == f"Error: {fault}"
    told = json.loads(ringtune("probe", "--json").stdout)
    assert told == {"error": str(fault), "exit_code": code}


def test_a_usage_error_is_json_too_when_json_was_asked_for() -> None:
    result = ringtune("probe", "--json", "--seq-len", "0")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["exit_code"] == 2


@pytest.mark.parametrize("bug", [ValueError("a bug"), AssertionError(), KeyError("x"), OSError("no errno")])
def test_bugs_keep_their_traceback(monkeypatch: pytest.MonkeyPatch, bug: Exception) -> None:
    def fail(observer: ProbeObserver) -> ProbeResult:
        raise bug

    engine(monkeypatch, fail)
    assert ringtune("probe").exception is bug


def test_ctrl_c_says_that_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(observer: ProbeObserver) -> ProbeResult:
        raise KeyboardInterrupt

    engine(monkeypatch, interrupt)
    line = one_line_error(ringtune("probe"), 130)
    assert "finished trials are kept" in line
    assert "run the same command" in line


def test_inconclusive_cells_still_show_the_profile_and_exit_6(monkeypatch: pytest.MonkeyPatch) -> None:
    result = ProbeResult(Path("p.yaml"), gpu_profile(), (), 9.0, inconclusive=("train dense S1024: noise 12 %",))
    engine(monkeypatch, lambda observer: result)
    shown = ringtune("probe")
    assert shown.exit_code == 6
    assert "NVIDIA H100" in shown.stdout
    assert "inconclusive: train dense S1024: noise 12 %" in shown.stderr


# --- output -----------------------------------------------------------------------------------------------------


def test_probe_json_is_the_only_thing_on_stdout(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Workload("train", True, 1024, 4, 64, "fp32")

    def act(observer: ProbeObserver) -> ProbeResult:
        observer.plan([w], 3.0)
        observer.stage(w, "race")
        observer.trial(w, "math", TrialOutcome("crash", "race", message="signal 11"))
        observer.note("noise floor 1 %")
        cell = CellReport(w, "tuned", chosen=plan("math", "math"), default_ratio=0.9, ratio_low=0.8, ratio_high=1.0)
        result = ProbeResult(Path("/p.yaml"), gpu_profile(), (cell,), 3.5)
        observer.finished(result)
        return result

    engine(monkeypatch, act)
    result = ringtune("probe", "--json")
    document = json.loads(result.stdout)
    assert document["profile_path"] == "/p.yaml"
    assert document["cells"][0]["workload"]["seq_len"] == 1024
    assert document["cells"][0]["chosen"]["branches"][0]["forward"] == "math"
    assert "crash: signal 11" in result.stderr
    assert "noise floor" in result.stderr


def test_what_was_not_measured_is_null_in_json(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Workload("train", True, 1024, 4, 64, "fp32")
    cell = CellReport(w, "inconclusive", default_ratio=float("nan"), ratio_low=float("-inf"), ratio_high=float("inf"))
    engine(monkeypatch, lambda observer: ProbeResult(None, None, (cell,), 1.0))
    (told,) = json.loads(ringtune("probe", "--json").stdout)["cells"]
    assert (told["default_ratio"], told["ratio_low"], told["ratio_high"]) == (None, None, None)


def test_probe_ends_with_the_summary_and_where_the_profile_is(asked: list[ProbeRequest]) -> None:
    result = ringtune("probe")
    assert "Median speed-up" in result.stdout
    assert "Profile written in 12 s: p.yaml" in result.stdout


def test_a_dry_run_prints_cells_space_and_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Workload("infer", True, 2048, 4, 64, "fp32")
    rejected = tuple(
        (f"cudnn {dtype}", tuple(f"branch {n} forward cudnn: runs on NVIDIA GPUs only" for n in range(3)))
        for dtype in ("fp32", "bf16")
    )
    cell = DryCell(w, ("flash-cpu", "math"), 12, 4.0, rejected)
    dry = DryRun((cell,), 4.0, (("gather", ("view", "copy")),))
    engine(monkeypatch, lambda observer: ProbeResult(None, None, (), 0.1, dry_run=dry))
    text = ringtune("probe", "--dry-run").stdout
    for part in ("1 cell, about 4 s", "flash-cpu, math", "12", "gather", "view, copy", "runs on NVIDIA GPUs only"):
        assert part in text
    assert text.count("runs on NVIDIA GPUs only") == 1
    document = json.loads(ringtune("probe", "--dry-run", "--json").stdout)
    assert document["dry_run"]["cells"][0]["candidates"] == 12


def test_show_json_is_the_file_as_data(gpu_file: Path) -> None:
    import yaml

    assert json.loads(ringtune("show", "--json", gpu_file).stdout) == yaml.safe_load(gpu_file.read_text())


def under_a_terminal(*arguments: str | Path, **env: str) -> str:
    """What a command prints when its stdout is a terminal."""
    master, slave = pty.openpty()
    environ = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "COLUMNS")}
    child = subprocess.Popen(
        [sys.executable, "-m", "autotune", *map(str, arguments)],
        stdout=slave,
        stderr=slave,
        stdin=slave,
        cwd=ROOT,
        env={**environ, "TERM": "xterm-256color", **env},
    )
    os.close(slave)
    shown = b""
    while True:
        try:
            chunk = os.read(master, 65536)
        except OSError:  # the child has closed its side
            break
        if not chunk:
            break
        shown += chunk
    os.close(master)
    assert child.wait(timeout=60) == 0, shown.decode()
    return shown.decode()


def test_colours_on_a_terminal_unless_no_color(gpu_file: Path) -> None:
    assert "\x1b[32m" in under_a_terminal("show", gpu_file)
    plain = under_a_terminal("show", gpu_file, NO_COLOR="1")
    assert "\x1b[3" not in plain.replace("\x1b[3m", "")
    assert "NVIDIA H100" in plain


def test_a_pipe_gets_neither_colours_nor_a_traceback_when_it_closes(gpu_file: Path) -> None:
    done = subprocess.run(
        f"{sys.executable} -m autotune show {gpu_file} | head -1",
        shell=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.stdout == "NVIDIA H100 80GB HBM3\n"
    assert "Traceback" not in done.stderr


def test_an_ascii_terminal_is_no_reason_to_fail(gpu_file: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "autotune", "show", str(gpu_file)],
        capture_output=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.isascii()


# --- files that are wrong ---------------------------------------------------------------------------------------


def bad_files(good: str) -> dict[str, bytes]:
    return {
        "empty": b"",
        "truncated": good.encode()[: len(good) // 2],
        "not yaml": b"schema: [1\n",
        "binary": bytes(range(256)),
        "object tag": b"!!python/object/apply:os.system ['true']\n",
        "a list": b"- 1\n",
        "another schema": good.replace("schema: 1", "schema: 2").encode(),
        "unknown key": good.replace("cudnn", "CUDNN", 0).replace("schema: 1", "schema: 1\nsurprise: 1").encode(),
        "nan": re.sub(r"median_ms: [\d.]+", "median_ms: .nan", good, count=1).encode(),
        "tampered": good.replace("sm_count: 132", "sm_count: 133").encode(),
        "alias bomb": b"a: &a [x, x]\nb: &b [*a, *a]\nc: [*b, *b]\n",
    }


BAD = tuple(bad_files("schema: 1"))


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("command", ["show", "validate", "report", "explain"])
def test_a_bad_profile_is_one_line_and_changes_nothing(gpu_file: Path, tmp_path: Path, name: str, command: str) -> None:
    content = bad_files(gpu_file.read_text())[name]
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    extra = ("--output", str(tmp_path / "page.html")) if command == "report" else ()
    line = one_line_error(ringtune(command, path, *extra), 1)
    assert str(path) in line
    assert path.read_bytes() == content
    assert not (tmp_path / "page.html").exists()


def test_the_line_has_the_key_path(gpu_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_bytes(bad_files(gpu_file.read_text())["nan"])
    assert "plans[0].choice.evidence.median_ms" in one_line_error(ringtune("validate", path), 1)


@pytest.mark.parametrize("command", ["show", "validate", "report", "explain"])
def test_a_missing_profile_is_one_line_with_the_remedy(tmp_path: Path, command: str) -> None:
    line = one_line_error(ringtune(command, tmp_path / "none.yaml"), 1)
    assert "none.yaml" in line
    assert "ringtune probe" in line


def test_a_huge_file_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    assert "bytes" in one_line_error(ringtune("show", path), 1)


def test_validate_judges_every_file(gpu_file: Path, tmp_path: Path) -> None:
    bad = tmp_path / "bad.yaml"
    bad.write_text("schema: 9\n")
    result = ringtune("validate", gpu_file, bad, gpu_file)
    assert result.exit_code == 1
    assert result.stdout.count("ok  ") == 2
    assert result.stderr.count("Error: ") == 1
    verdicts = json.loads(ringtune("validate", "--json", gpu_file, bad).stdout)
    assert [v["ok"] for v in verdicts] == [True, False]


def test_every_shipped_profile_is_valid() -> None:
    result = ringtune("validate", *sorted((ROOT / "profiles").glob("*.yaml")))
    assert result.exit_code == 0, result.stderr


# --- places that cannot be written ------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["missing/p.yaml", "file/p.yaml", ".", "/proc/p.yaml"])
def test_probe_says_at_once_that_the_output_cannot_be_written(
    asked: list[ProbeRequest], tmp_path: Path, place: str
) -> None:
    (tmp_path / "file").write_text("x")
    line = one_line_error(ringtune("probe", "--output", tmp_path / place), 1) if place != "." else None
    if line is None:
        assert ringtune("probe", "--output", tmp_path).exit_code == 2
    else:
        assert "--output" in line
    assert asked == []
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("place", ["missing/page.html", "folder", "/proc/page.html"])
def test_report_says_that_the_output_cannot_be_written(gpu_file: Path, tmp_path: Path, place: str) -> None:
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert "--output" in one_line_error(ringtune("report", gpu_file, "--output", tmp_path / place), 1)
    assert sorted(tmp_path.rglob("*")) == before


def test_report_never_overwrites_its_profile(gpu_file: Path, tmp_path: Path) -> None:
    content = gpu_file.read_bytes()
    link = tmp_path / "link.html"
    link.symlink_to(gpu_file)
    for target in (gpu_file, link):
        assert "is the profile itself" in one_line_error(ringtune("report", gpu_file, "--output", target), 1)
    assert gpu_file.read_bytes() == content


def test_report_never_replaces_a_pipe_or_device(gpu_file: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in one_line_error(ringtune("report", gpu_file, "--output", tmp_path / "pipe"), 1)
    assert (tmp_path / "pipe").is_fifo()


def test_report_goes_through_a_symbolic_link(gpu_file: Path, tmp_path: Path) -> None:
    (tmp_path / "link.html").symlink_to("page.html")
    assert ringtune("report", gpu_file, "--output", tmp_path / "link.html").exit_code == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "page.html").read_text("utf-8").startswith("<!DOCTYPE html>")


def test_probe_refuses_a_pipe_before_it_measures(asked: list[ProbeRequest], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not a regular file" in one_line_error(ringtune("probe", "--fresh", "--output", tmp_path / "pipe"), 1)
    assert asked == []


@pytest.mark.parametrize("command", ["show", "validate", "report", "explain", "verify"])
def test_a_file_that_may_not_be_read_is_an_error_and_not_misuse(
    command: str, gpu_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = Path.open

    def refuse(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path == gpu_file:
            raise PermissionError(13, "Permission denied", str(path))
        return ordinary(path, *args, **kwargs)

    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may read all
    monkeypatch.setattr(Path, "open", refuse)
    assert "cannot be read: Permission denied" in one_line_error(ringtune(command, gpu_file), 1)


def test_a_full_stdout_is_one_line_with_json_too(gpu_file: Path) -> None:
    for arguments in (["show", str(gpu_file), "--json"], ["show", "missing.yaml", "--json"]):
        with Path("/dev/full").open("w") as full:
            ended = subprocess.run(
                [sys.executable, "-m", "autotune", *arguments], stdout=full, stderr=subprocess.PIPE, text=True
            )
        assert ended.returncode == 1
        assert len(ended.stderr.splitlines()) == 1, ended.stderr


def test_report_writes_the_page(gpu_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ringtune("report", gpu_file).stdout == "Report written: gpu.html\n"
    page = (tmp_path / "gpu.html").read_text("utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert ringtune("report", gpu_file, "--output", "-").stdout == page
    document = json.loads(ringtune("report", gpu_file, "--json", "--output", "x.html").stdout)
    assert document == {"report_path": "x.html", "profile_path": str(gpu_file)}
    assert {p.name for p in tmp_path.iterdir()} == {"gpu.yaml", "gpu.html", "x.html"}


# --- this machine -----------------------------------------------------------------------------------------------


def profile_of_this_machine(*entries: PlanEntry) -> Profile:
    facts = detect("cpu")
    return Profile("measured", Fingerprint.of(facts), facts.software, plans=entries, provenance=Provenance("0.1.0"))


def measured_entry(seq_len: int = 512) -> PlanEntry:
    chosen = Choice(plan("math", "flash-cpu", dtype="fp32"), evidence(2.0, 0.8, 4))
    default = Choice(plan("flash-cpu", "flash-cpu", dtype="fp32"), evidence(2.5, 1.0, 2))
    return PlanEntry(
        Workload("train", True, seq_len, 4, 32, "fp32"),
        chosen,
        default=default,
        failures=(Failure("math/math fp32", "oom", "needs 3 GiB"),),
    )


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile of this machine's CPU in the user's folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config" / "ringtune" / "this-machine.yaml"
    save_profile(profile_of_this_machine(measured_entry()), path)
    return path


def test_which_names_the_heuristic_and_exits_4() -> None:
    result = ringtune("which", "--device", "cpu")
    assert result.exit_code == 4
    assert "tier: heuristic" in result.stdout
    assert "ringtune probe" in result.stderr
    bare = ringtune("which", "--device", "cpu", "--path-only")
    assert (bare.exit_code, bare.stdout) == (4, "")
    assert json.loads(ringtune("which", "--device", "cpu", "--json").stdout)["tier"] == "heuristic"


def test_which_names_the_file_and_the_tier(at_home: Path) -> None:
    result = ringtune("which", "--device", "cpu")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[0] == str(at_home)
    assert "tier: exact" in result.stdout
    assert ringtune("which", "--device", "cpu", "--path-only").stdout == f"{at_home}\n"


def test_which_warns_of_a_broken_file_and_goes_on(at_home: Path) -> None:
    (at_home.parent / "broken.yaml").write_text("schema: [")
    result = ringtune("which", "--device", "cpu")
    assert result.exit_code == 0
    assert "broken.yaml" in result.stderr


def test_commands_take_the_profile_of_this_machine(at_home: Path, tmp_path: Path) -> None:
    assert ringtune("show", "--device", "cpu").stdout.startswith(detect("cpu").device_name)
    assert ringtune("report", "--device", "cpu", "--output", tmp_path / "r.html").exit_code == 0


@pytest.mark.parametrize("command", ["show", "report", "verify"])
def test_commands_say_that_there_is_no_profile(command: str) -> None:
    assert "ringtune probe" in one_line_error(ringtune(command, "--device", "cpu"), 4)


def test_an_absent_device_is_exit_3() -> None:
    for command in ("which", "doctor", "explain"):
        assert "mps" in one_line_error(ringtune(command, "--device", "mps"), 3)


def test_validate_here(at_home: Path, gpu_file: Path) -> None:
    result = ringtune("validate", "--here", "--device", "cpu", at_home)
    assert result.exit_code == 0
    assert "runs here (tier exact)" in result.stdout
    line = one_line_error(ringtune("validate", "--here", "--device", "cpu", gpu_file), 1)
    assert "does not fit this machine" in line


def test_validate_here_names_the_plan_that_cannot_run(tmp_path: Path) -> None:
    impossible = replace(measured_entry(), choice=Choice(plan("cudnn", "flash-cpu", dtype="fp32")))
    path = tmp_path / "odd.yaml"
    save_profile(profile_of_this_machine(measured_entry(1024), impossible), path)
    line = one_line_error(ringtune("validate", "--here", "--device", "cpu", path), 1)
    assert "plans[1]" in line
    assert "forward cudnn: runs on NVIDIA GPUs only" in line
    assert ringtune("validate", path).exit_code == 0


# --- explain ----------------------------------------------------------------------------------------------------

SHAPE = ("--device", "cpu", "--heads", "4", "--head-dim", "32")


def explained(*arguments: str | Path) -> dict[str, Any]:
    result = ringtune("explain", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def test_explain_says_what_the_module_will_run(at_home: Path) -> None:
    import torch

    from ringattn import RingAttention

    attn = RingAttention(4, 32, causal=True, device="cpu")
    for seq_len in (1, 400, 512, 700, 5000):
        for mode in ("train", "infer"):
            said = explained(*SHAPE, "--seq-len", str(seq_len), "--mode", mode)
            runs = attn.plan_for(seq_len, torch.float32, mode == "train").tunables
            assert [(b["forward"], b["backward"], b["gather"]) for b in said["tunables"]["branches"]] == [
                (b.forward, b.backward, b.gather) for b in runs.branches
            ]
            assert said["tunables"]["dtype"] == runs.dtype


def test_explain_names_the_row_its_evidence_and_its_failures(at_home: Path) -> None:
    said = explained(*SHAPE, "--seq-len", "600")
    assert (said["bucket"], said["origin"], said["tier"], said["path"]) == (512, "profile", "exact", str(at_home))
    assert said["evidence"]["median_ms"] == 2.0
    assert said["failures"] == [{"candidate": "math/math fp32", "kind": "oom", "message": "needs 3 GiB"}]
    text = ringtune("explain", *SHAPE, "--seq-len", "600").stdout
    for part in ("math/flash-cpu fp32", "1.25x", "nearest measured length is 512", "needs 3 GiB", "this-machine.yaml"):
        assert part in text


def test_explain_gives_a_reason_for_every_kernel_that_is_not_in_the_plan(at_home: Path) -> None:
    from ringattn.kernels import KERNELS

    said = explained(*SHAPE, "--seq-len", "512")
    told = {(v["kernel"], d) for v in said["kernels"] for d in directions_of(v)}
    used = {(b[d], d) for b in said["tunables"]["branches"] for d in ("forward", "backward")}
    assert told | used == {(name, d) for name in KERNELS for d in ("forward", "backward")}
    assert not told & used
    for verdict in said["kernels"]:
        assert verdict["reasons"] or verdict["evidence"]
    cudnn = next(v for v in said["kernels"] if v["kernel"] == "cudnn")
    assert cudnn["reasons"] == ["runs on NVIDIA GPUs only"]
    rival = next(v for v in said["kernels"] if v["kernel"] == "flash-cpu")
    assert "1.25x the time of the chosen plan" in rival["evidence"]


def directions_of(verdict: dict[str, Any]) -> tuple[str, ...]:
    return ("forward", "backward") if verdict["direction"] == "both" else (verdict["direction"],)


def test_explain_says_why_the_heuristic_decides(at_home: Path) -> None:
    assert "this length is outside" in explained(*SHAPE, "--seq-len", "100000")["why"]
    assert "measured nothing of this kind" in explained(*SHAPE, "--seq-len", "512", "--no-causal")["why"]
    at_home.unlink()
    assert "no measured profile serves this machine" in explained(*SHAPE, "--seq-len", "512")["why"]


def test_explain_takes_a_profile(at_home: Path) -> None:
    assert explained(at_home, *SHAPE, "--seq-len", "512")["path"] == str(at_home)


def test_explain_covers_dilated_patterns(at_home: Path) -> None:
    said = explained(*SHAPE, "--segment-lengths", "64,128", "--dilation-rates", "1,2", "--seq-len", "256")
    assert len(said["tunables"]["branches"]) == 2


# --- verify -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stale", "inconclusive", "code"),
    [((), (), 0), (("train dense",), (), 5), ((), ("noise",), 6), (("a",), ("b",), 5)],
)
def test_verify(
    monkeypatch: pytest.MonkeyPatch, gpu_file: Path, stale: tuple[str, ...], inconclusive: tuple[str, ...], code: int
) -> None:
    seen: list[tuple[Path, ProbeRequest]] = []
    cell = VerifiedCell(
        Workload("train", True, 64, 1, 8, "fp32"),
        plan("math", "math"),
        plan("math", "math"),
        1.0,
        0.9,
        1.1,
        bool(stale),
    )

    def fake(path: Path, request: ProbeRequest, observer: ProbeObserver) -> VerifyResult:
        seen.append((path, request))
        return VerifyResult(stale, (cell,), 4.0, inconclusive)

    monkeypatch.setattr(autotune.tuning, "verify_profile", fake)
    options = ("--effort", "full", "--budget", "9", "--seed", "3", "--device", "cpu")
    result = ringtune("verify", gpu_file, *options)
    assert result.exit_code == code
    path, request = seen[0]
    assert path == gpu_file
    assert (request.effort, request.budget_s, request.seed, request.device) == ("full", 9.0, 3, "cpu")
    assert ("stale  train" if stale else "holds  train") in result.stdout
    document = json.loads(ringtune("verify", "--json", gpu_file).stdout)
    assert document["stale"] == list(stale)


def test_a_verify_that_judged_nothing_does_not_say_that_winners_win(
    monkeypatch: pytest.MonkeyPatch, gpu_file: Path
) -> None:
    nothing = VerifyResult((), (), 4.0, ("train dense: no time was left",))
    monkeypatch.setattr(autotune.tuning, "verify_profile", lambda path, request, observer: nothing)
    result = ringtune("verify", gpu_file)
    assert result.exit_code == ExitCode.INCONCLUSIVE
    assert "nothing could be judged" in result.stdout
    assert "wins" not in result.stdout


def test_heuristics_have_nothing_to_show_but_their_policy(tmp_path: Path) -> None:
    path = tmp_path / "h.yaml"
    save_profile(heuristic_profile(), path)
    text = ringtune("show", path).stdout
    assert "Any nvidia device" in text
    assert "cudnn, flash, efficient, math" in text
