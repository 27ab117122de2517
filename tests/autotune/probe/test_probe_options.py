"""Options of ``ringtune probe`` whose values have units, and what the command says of the files it leaves."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from probed_machine import Machine, request_for

from autotune.cli.main import cli
from autotune.cli.options import seconds
from autotune.exit_codes import ProbeFailure
from autotune.journal.storage.journal_file import journal_path
from autotune.journal.store import Store
from autotune.probe.tuning import run_probe


@pytest.mark.parametrize(
    ("text", "value"), [("90", 90.0), ("90s", 90.0), ("3m", 180.0), ("1.5M", 90.0), (" 2 s ", 2.0), (12.5, 12.5)]
)
def test_a_budget_may_have_a_unit(text: str | float, value: float) -> None:
    assert seconds(text) == value


@pytest.mark.parametrize("text", ["", "s", "m", "0", "0m", "-3", "90ms", "3h", "inf", "nan", "nanm", "infs"])
def test_what_is_no_time_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(click.BadParameter, match="is not a number above 0 of seconds, such as 90, 90s or 3m"):
        seconds(text)


@pytest.mark.parametrize("command", ["probe", "verify"])
def test_the_help_says_the_unit(command: str) -> None:
    shown = " ".join(CliRunner().invoke(cli, [command, "--help"], terminal_width=88).output.split())
    assert "--budget SECONDS Seconds to spend once torch is loaded; 90s and 3m work, too." in shown


def test_the_files_beside_a_profile_are_those_that_the_help_names(tmp_path: Path) -> None:
    shown = " ".join(CliRunner().invoke(cli, ["probe", "--help"], terminal_width=88).output.split())
    profile = tmp_path / "PROFILE"
    with Store(journal_path(profile), identity="one", fresh=False):
        pass
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["PROFILE.journal", "PROFILE.journal.writer"]
    for name in left:
        assert f"{name}," in shown


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"sampler": "nonsense"}, "--sampler 'nonsense': is no sampler; give one of"),
        ({"sampler": "json:JSONDecoder"}, "--sampler 'json:JSONDecoder': is no optuna.samplers.BaseSampler"),
        ({"storage": "nonsense"}, "--storage nonsense: names no storage; give "),
        ({"storage": "nosuch://me:secret@host/x"}, r"--storage nosuch://me:\*\*\*@host/x: is no URL of a storage "),
        ({"storage": "sqlite:////nowhere/at/all.db"}, "the folder of /nowhere/at/all.db does not exist; make it"),
        ({"storage": "redis://localhost"}, "redis://localhost: is no URL of a storage "),
        ({"output": Path("/dev/null/p.yaml")}, "/dev/null/p.yaml: cannot be written in /dev/null .Not a directory."),
        ({"output": Path("/dev/null")}, "/dev/null: is not a regular file"),
    ],
)
def test_a_dry_run_refuses_what_a_probe_refuses(
    tmp_path: Path, machine: Machine, changes: dict[str, object], told: str, dry_run: bool
) -> None:
    with pytest.raises(ProbeFailure, match=told):
        run_probe(request_for(tmp_path / "p.yaml", dry_run=dry_run, **changes), None, machine.environment)
    assert machine.made == []
    assert not list(tmp_path.glob("p.yaml*"))


@pytest.mark.parametrize("sampler", ["auto", "tpe", "random", "grid", "optuna.samplers:RandomSampler"])
def test_a_dry_run_takes_every_sampler_and_makes_no_database(tmp_path: Path, machine: Machine, sampler: str) -> None:
    request = request_for(tmp_path / "p.yaml", dry_run=True, sampler=sampler, storage=f"sqlite:///{tmp_path}/s.db")
    assert run_probe(request, None, machine.environment).dry_run is not None
    assert not (tmp_path / "s.db").exists()


def test_a_default_place_that_cannot_be_written_is_told_before_anything_is_measured(
    tmp_path: Path, machine: Machine
) -> None:
    (tmp_path / "config").touch()  # stands for a folder that is read-only, which root could write
    for dry_run in (False, True):
        with pytest.raises(ProbeFailure, match=r"written in .*config \(Not a directory\); name a file"):
            run_probe(request_for(tmp_path, output=None, dry_run=dry_run), None, machine.environment)
    assert machine.made == []
