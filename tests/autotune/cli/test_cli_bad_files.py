"""Profiles that are wrong, missing or not to be read: one line with the remedy, and nothing changes."""

from __future__ import annotations

import errno
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from cli_runs import measured_entry, one_line_error, profile_of_this_machine, ringtune
from report_samples import plan

from ringattn.profile.schema import Choice, PlanEntry
from ringattn.profile.yaml_io import save_profile

ROOT = Path(__file__).parents[3]


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


@pytest.mark.parametrize("content", ['{"model_type": "llama", "hidden_size": 64}', "a: 1\n", "[1, 2]", "{}"])
@pytest.mark.parametrize("command", ["show", "validate", "report", "explain"])
def test_a_file_of_another_kind_is_said_to_be_no_profile(tmp_path: Path, command: str, content: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    line = one_line_error(ringtune(command, path), 1)
    assert "is no hardware profile" in line
    assert "`ringtune which -v`" in line


def test_a_profile_without_its_first_line_is_said_to_lack_it(gpu_file: Path, tmp_path: Path) -> None:
    path = tmp_path / "cut.yaml"
    path.write_text(gpu_file.read_text().replace("schema: 1\n", ""))
    assert one_line_error(ringtune("show", path), 1).endswith("schema: is missing")


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


def test_validate_says_how_many_plans_were_not_measured(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    kept = PlanEntry(measured_entry(1024).workload, Choice(plan("flash-cpu", "flash-cpu", dtype="fp32")))
    save_profile(profile_of_this_machine(measured_entry(), kept), path)
    for here in ((), ("--here", "--device", "cpu")):
        result = ringtune("validate", *here, path)
        assert result.exit_code == 0
        assert f"{path}: 2 plans, 1 of them a default that was not measured" in result.stdout
        assert json.loads(ringtune("validate", *here, "--json", path).stdout)[0]["unmeasured"] == 1
    save_profile(profile_of_this_machine(measured_entry()), path)
    assert ringtune("validate", path).stdout == f"ok  {path}: 1 plan\n"


def test_every_shipped_profile_is_valid() -> None:
    result = ringtune("validate", *sorted((ROOT / "profiles").glob("*.yaml")))
    assert result.exit_code == 0, result.stderr


@pytest.mark.parametrize("command", ["show", "validate", "report", "explain", "verify"])
def test_a_file_that_may_not_be_read_is_an_error_and_not_misuse(
    command: str, gpu_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordinary = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if path == gpu_file:
            raise PermissionError(13, "Permission denied", str(path))
        return ordinary(path, *args, **kwargs)

    monkeypatch.setattr(os, "access", lambda path, mode: False)  # tests may run as root, who may read all
    monkeypatch.setattr(os, "open", refuse)
    assert "cannot be read: Permission denied" in one_line_error(ringtune(command, gpu_file), 1)


def no_files(folder: Path) -> dict[str, tuple[Path, str]]:
    """Paths that are no regular file of a usual size, with what is said of each."""
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    with (folder / "huge").open("wb") as file:
        file.truncate(2**31)
    return {
        "pipe": (folder / "pipe", "it is not a regular file"),
        "device": (Path("/dev/zero"), "it is not a regular file"),
        "folder": (folder / "folder" / "..", "it is a directory"),
        "huge": (folder / "huge", "it has 2147483648 bytes, more than"),
        "missing": (folder / "none", "No such file or directory"),
    }


@pytest.mark.parametrize("option", ["--like", "--model"])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "huge", "missing"])
def test_what_is_no_file_of_a_usual_size_is_refused_unread(tmp_path: Path, option: str, kind: str) -> None:
    path, why = no_files(tmp_path)[kind]
    if option == "--model" and kind == "folder":  # a folder is one with a config.json in it
        path, why = tmp_path / "folder", "No such file or directory"
    line = one_line_error(ringtune("probe", option, path), 2)
    assert f"cannot be read ({why}" in line
    assert option in line


def test_a_folder_of_a_model_whose_config_is_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    assert "config.json: cannot be read (it is not a regular file)" in one_line_error(
        ringtune("probe", "--model", tmp_path), 2
    )


@pytest.mark.parametrize("option", ["--like", "--model"])
def test_standard_input_is_no_file(option: str) -> None:
    assert "-: cannot be read (No such file or directory)" in one_line_error(ringtune("probe", option, "-"), 2)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--seq-len", 10**13), ("--heads", 10**19), ("--head-dim", 10**19), ("--batch-size", 10**400),
        ("--segment-lengths", 10**400), ("--memory-limit", 10**19), ("--memory-limit", "9" * 5000),
        ("--seed", 2**63), ("--seed", 10**400), ("--nproc", "9" * 5000), ("--nproc", 10**19), ("--device", "9" * 5000),
        ("--device", "cuda:" + "9" * 5000), ("--max-error", "1e999"), ("--budget", "1e999"), ("--budget", "nan"),
    ],
)  # fmt: skip
def test_a_number_beyond_all_bounds_is_a_usage_error(option: str, value: object) -> None:
    result = ringtune("probe", "--dry-run", option, str(value))
    assert result.exit_code == 2, (result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    assert option in result.stderr


@pytest.mark.parametrize("command", ["show", "report", "verify"])
def test_a_profile_of_ones_own_that_is_damaged_is_named(at_home: Path, command: str) -> None:
    at_home.write_text(at_home.read_text().replace("math", "efficient", 1))
    told = one_line_error(ringtune(command, *(("--device", "cpu") if command != "report" else ())), 4)
    assert str(at_home) in told
    assert "checksum" in told


def test_a_folder_that_cannot_be_read_is_not_called_empty(at_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iterdir = Path.iterdir

    def denied(folder: Path) -> Any:
        if folder == at_home.parent:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return iterdir(folder)

    monkeypatch.setattr(Path, "iterdir", denied)
    shown = "".join(ringtune("doctor", "--device", "cpu").stdout.split())
    assert f"{at_home.parent}:cannotberead" in shown, "wherever its lines end"
    told = one_line_error(ringtune("show"), 4)
    assert f"{at_home.parent}: skipped, it cannot be read: Permission denied" in told
