"""What commands write: never over something else, and where it cannot be written they say so at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from cli_runs import one_line_error, ringtune

from autotune.probe.request import ProbeRequest


@pytest.mark.parametrize("more", [(), ("--dry-run",)], ids=["probe", "dry run"])
@pytest.mark.parametrize("place", ["missing/p.yaml", "file/p.yaml", ".", "/proc/p.yaml"])
def test_probe_says_at_once_that_the_output_cannot_be_written(
    asked: list[ProbeRequest], tmp_path: Path, place: str, more: tuple[str, ...]
) -> None:
    (tmp_path / "file").write_text("x")
    line = one_line_error(ringtune("probe", *more, "--output", tmp_path / place), 1) if place != "." else None
    if line is None:
        assert ringtune("probe", *more, "--output", tmp_path).exit_code == 2
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


@pytest.mark.parametrize("command", ["report", "compare"])
def test_a_page_takes_the_place_of_pages_alone(gpu_file: Path, tmp_path: Path, command: str) -> None:
    other = tmp_path / "measured-for-hours.yaml"
    other.write_bytes(gpu_file.read_bytes())
    given = ("report", gpu_file) if command == "report" else ("compare", "--device", "cpu", "--seq-len", "64")
    told = one_line_error(ringtune(*given, "--output", other), 1)
    assert told == f"Error: {other}: exists and is no web page; choose another --output, or remove it"
    assert other.read_bytes() == gpu_file.read_bytes()
    page = tmp_path / "page.html"
    assert ringtune("report", gpu_file, "--output", page).exit_code == 0
    assert ringtune("report", gpu_file, "--output", page).exit_code == 0


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


@pytest.mark.usefixtures("fresh_interpreters")  # and how they close their streams
@pytest.mark.parametrize("buffered", [True, False])
@pytest.mark.parametrize(
    "arguments", [["show", "{file}"], ["show", "{file}", "--json"], ["show", "missing.yaml", "--json"], ["--version"]]
)
def test_a_full_stdout_is_one_line_and_code_1(gpu_file: Path, arguments: list[str], buffered: bool) -> None:
    """Python itself ends with code 120 where its buffer cannot be written at the end."""
    command = [sys.executable, "-m", "autotune", *(word.format(file=gpu_file) for word in arguments)]
    environ = os.environ | {"PYTHONUNBUFFERED": "" if buffered else "1"}
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(command, env=environ, stdout=full, stderr=subprocess.PIPE, text=True)
        both_full = subprocess.run(command, env=environ, stdout=full, stderr=full)
    assert ended.returncode == both_full.returncode == 1
    if "missing.yaml" in arguments:  # the answer of an error, which comes first
        assert ended.stderr.startswith("Error: missing.yaml: no such file;")
        assert len(ended.stderr.splitlines()) == 1
    else:
        assert ended.stderr == (
            "Error: stdout: No space left on device; make room where it goes, or redirect it to another place\n"
        )


def test_report_writes_the_page(gpu_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ringtune("report", gpu_file).stdout == "Report written: gpu.html\n"
    page = (tmp_path / "gpu.html").read_text("utf-8")
    assert page.startswith("<!DOCTYPE html>")
    assert ringtune("report", gpu_file, "--output", "-").stdout == page
    document = json.loads(ringtune("report", gpu_file, "--json", "--output", "x.html").stdout)
    assert document == {"report_path": "x.html", "profile_path": str(gpu_file)}
    assert {p.name for p in tmp_path.iterdir()} == {"gpu.yaml", "gpu.html", "x.html"}
