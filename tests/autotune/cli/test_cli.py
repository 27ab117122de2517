"""The help of the ``ringtune`` command; what a command imports."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from cli_runs import ringtune
from click.core import ParameterSource

from autotune.cli.main import cli
from autotune.exit_codes import ExitCode

ROOT = Path(__file__).parents[3]
COMMANDS = (
    *("probe", "show", "report", "explain", "trace", "which", "validate", "verify", "doctor", "compare"),
    *("push", "pull", "list", "merge", "diff", "forget", "sign", "verify-signature"),
)


def test_the_commands_are_those_documented() -> None:
    assert tuple(cli.commands) == COMMANDS


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_says_what_it_is_for(name: str) -> None:
    command = cli.commands[name]
    assert command.help
    assert command.short_help
    assert len(command.short_help) <= 60
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert parameter.help
    assert "--json" in {name for p in command.params for name in p.opts}
    result = ringtune(name, "--help")
    assert result.exit_code == 0
    assert all(len(line) <= 88 for line in result.output.splitlines())


EXAMPLES = [
    (name, example)
    for name in COMMANDS
    for example in re.findall(rf"(?:ringtune|-m autotune) {name}\b([^)\n]*)", cli.commands[name].help or "")
]


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_every_example_in_the_help_sets_what_it_names(name: str, example: str) -> None:
    words = example.split()
    context = cli.commands[name].make_context(name, list(words))
    named = {parameter.name for parameter in context.command.params if {*parameter.opts} & {*words}}
    given = {name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}
    arguments = {parameter.name for parameter in context.command.params if isinstance(parameter, click.Argument)}
    assert given - arguments == named


def test_the_help_has_examples() -> None:
    assert {name for name, _ in EXAMPLES} >= {"probe", "show", "report", "explain", "which", "validate"}


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
from autotune.cli.main import cli
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
