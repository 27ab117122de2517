"""What commands print: one document with --json, colours on a terminal alone, and where the profile is."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import engine, measured_entry, profile_of_this_machine, ringtune
from patience import LIMIT_S
from report_samples import evidence, gpu_profile, heuristic_profile, plan

from autotune.cli.probing.probe_result import _how_to_use
from autotune.probe.request import CellReport, DryCell, DryRun, ProbeObserver, ProbeRequest, ProbeResult
from autotune.report.wording.plan_text import pieces
from autotune.trial_outcome import TrialOutcome
from ringattn.errors import KernelReason
from ringattn.profile.schema import Choice, PlanEntry
from ringattn.profile.yaml_io import load_profile, save_profile
from ringattn.workload import BranchTunables, Pattern, Tunables, Workload, describe

ROOT = Path(__file__).parents[3]


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
        (f"cudnn {dtype}", tuple(KernelReason(n, "forward", "cudnn", "runs on NVIDIA GPUs only") for n in range(3)))
        for dtype in ("fp32", "bf16")
    )
    cell = DryCell(w, ("flash-cpu", "math"), 12, 4.0, rejected)
    dry = DryRun((cell,), 4.0, (("gather", ("view", "copy")),))
    engine(monkeypatch, lambda observer: ProbeResult(Path("there/m.yaml"), None, (), 0.1, dry_run=dry))
    text = ringtune("probe", "--dry-run").stdout
    for part in ("1 cell, about 4 s", "flash-cpu, math", "12", "gather", "view, copy", "runs on NVIDIA GPUs only"):
        assert part in text
    assert text.count("runs on NVIDIA GPUs only") == 1
    assert text.endswith("The profile would be there/m.yaml\n")
    document = json.loads(ringtune("probe", "--dry-run", "--json").stdout)
    assert document["profile_path"] == "there/m.yaml"
    assert document["dry_run"]["cells"][0]["candidates"] == 12


@pytest.fixture
def with_long_plans(tmp_path: Path) -> Path:
    """A profile whose plans have more names than a narrow terminal has room for beside their figures."""
    branches = [BranchTunables("flash-attn-4", "cudnn"), BranchTunables("cudnn", "flash-attn-4")] * 2
    tunables = Tunables("bf16", tuple(branches), checkpoint="none", pool_threshold_mib=1024)
    workload = Workload("train", True, 4096, 4, 64, "bf16", pattern=Pattern.of([512, 1024, 2048, 4096], [1, 2, 4, 8]))
    entry = PlanEntry(workload, Choice(tunables, evidence(2.0, 0.8, 4)))
    path = tmp_path / "long.yaml"
    save_profile(replace(gpu_profile(), plans=(entry,)), path)
    return path


@pytest.mark.parametrize("columns", ["60", "80", "110"])
@pytest.mark.parametrize("command", ["show", "explain"])
def test_no_name_of_a_plan_is_broken(with_long_plans: Path, command: str, columns: str) -> None:
    (entry,) = load_profile(with_long_plans).plans
    shape = ("--seq-len", "4096", "--heads", "4", "--head-dim", "64") if command == "explain" else ()
    pattern = ("--segment-lengths", "512,1024,2048,4096", "--dilation-rates", "1,2,4,8") if shape else ()
    text = ringtune(command, with_long_plans, *shape, *pattern, COLUMNS=columns).stdout
    assert entry.choice is not None
    for piece in pieces(describe(entry.choice.tunables)):
        assert piece.strip() in text, text
    assert max(map(len, text.splitlines())) <= int(columns)


@pytest.mark.parametrize("columns", ["60", "80", "110"])
def test_no_figure_of_a_profile_is_cut(columns: str) -> None:
    shipped = sorted((ROOT / "profiles").glob("nvidia-*.yaml"))
    assert shipped
    for path in shipped:
        text = ringtune("show", path, COLUMNS=columns).stdout
        assert "\N{HORIZONTAL ELLIPSIS}" not in text, text
        assert max(map(len, text.splitlines())) <= int(columns)


@pytest.mark.parametrize("columns", ["44", "60", "110"])
def test_every_line_below_a_title_keeps_its_indentation(columns: str, tmp_path: Path) -> None:
    """Tables that were split had no edge, and what was longer than a line went on at the left of the terminal."""
    (tmp_path / f"{'long-' * 16}name.yaml").write_text("schema: 99\n")
    commands: list[tuple[str | Path, ...]] = [("show", path) for path in sorted((ROOT / "profiles").glob("*.yaml"))]
    commands.append(("doctor", "--device", "cpu"))
    for command in commands:
        lines = ringtune(*command, COLUMNS=columns, RINGTUNE_PROFILE_PATH=str(tmp_path)).stdout.splitlines()
        indented = False
        for line in lines:
            starts = line.startswith(("Where nothing was measured:", "Profiles, in search order", "In use"))
            indented = starts or set(line.strip()) == {"\N{BOX DRAWINGS LIGHT HORIZONTAL}"} or (indented and bool(line))
            assert starts or not indented or line.startswith(" "), "\n".join(lines)


def test_no_kernel_of_a_dry_run_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    w = Workload("train", True, 4096, 4, 64, "bf16", pattern=Pattern.of([512, 1024, 2048, 4096], [1, 2, 4, 8]))
    kernels = ("flash-attn-4/flash-attn-2", "cudnn/flash-attn-4", "flash-attn-3/flash-attn-3")
    dry = DryRun((DryCell(w, kernels, 36864, 4.0, ()),), 4.0, ())
    engine(monkeypatch, lambda observer: ProbeResult(Path("there/m.yaml"), None, (), 0.1, dry_run=dry))
    text = ringtune("probe", "--dry-run", COLUMNS="60").stdout
    assert all(name in text for name in kernels), text


def test_piped_tables_have_no_spaces_at_line_ends(with_long_plans: Path) -> None:
    explained = ("explain", with_long_plans, "--seq-len", "4096", "--heads", "4", "--head-dim", "64")
    for arguments in (("show", with_long_plans), explained, ("doctor", "--device", "cpu")):
        lines = ringtune(*arguments).stdout.splitlines()
        assert len(lines) > 5
        assert [line for line in lines if line != line.rstrip()] == []


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
    assert child.wait(timeout=LIMIT_S) == 0, shown.decode()
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


def test_a_profile_that_the_runtime_does_not_find_says_how_to_use_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, elsewhere = tmp_path / "found" / "m.yaml", tmp_path / "m.yaml"
    for path in (found, elsewhere):
        save_profile(profile_of_this_machine(measured_entry()), path)
    monkeypatch.setenv("RINGTUNE_PROFILE_PATH", str(found.parent))
    assert _how_to_use(found, "cpu") == "RingAttention(profile='auto') uses it from now on"
    assert _how_to_use(elsewhere) == f"RINGTUNE_PROFILE={elsewhere} or RingAttention(profile='{elsewhere}') uses it"
    first = found.with_name("a.yaml")
    save_profile(load_profile(found), first)
    assert _how_to_use(found, "cpu") == (
        f"{first} comes before it, so that RingAttention(profile='auto') uses it for what that has not measured"
    )
    monkeypatch.setenv("RINGTUNE_PROFILE", str(elsewhere))
    assert "from now on" in _how_to_use(elsewhere, "cpu")
    assert _how_to_use(found, "cpu").endswith(f"uses it only as RINGTUNE_PROFILE={found}")


def test_heuristics_have_nothing_to_show_but_their_policy(tmp_path: Path) -> None:
    path = tmp_path / "h.yaml"
    save_profile(heuristic_profile(), path)
    text = ringtune("show", path).stdout
    assert "Any nvidia device" in text
    assert "cudnn, flash, efficient, math" in text
