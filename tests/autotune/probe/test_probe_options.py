"""Options of ``ringtune probe`` whose values have units, and what the command says of the files it leaves."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from autotune.cli.main import cli
from autotune.cli.options import seconds
from autotune.journal.file import journal_path
from autotune.journal.store import Store


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
    with Store(journal_path(profile, {}, tmp_path), identity="one", fresh=False):
        pass
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == ["PROFILE.journal", "PROFILE.journal.writer"]
    for name in left:
        assert f"{name}," in shown
