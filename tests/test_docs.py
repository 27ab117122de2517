"""The pages of docs/ are true: commands and Python run, the profile loads, what they name and link exists.

``make docs`` builds them with warnings as errors, which checks links between pages, their sections and API names.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from documents import PAGES, ROOT, as_run, blocks, commands, run, text_of
from warm_start import start_warm

import ringattn
from autotune.cli.main import cli
from autotune.exit_codes import ExitCode
from ringattn import errors
from ringattn.distributed.peer_errors import PeerError
from ringattn.planning.unmeasured_workloads import line_of
from ringattn.profile.yaml_io import parse_profile
from ringattn.versions import TESTED_TORCH
from ringattn.workload import Workload

DOCS = ROOT / "docs"
OVER_RANKS = DOCS / "howto" / "ring.md"
DOCUMENTS = (*PAGES, ROOT / "CONTRIBUTING.md")
ALL = "\n".join(map(text_of, DOCUMENTS))

RUN_BLOCKS = """
import json, sys
for page, number, code in json.load(open(sys.argv[1])):
    exec(compile(code, f"{page}, Python block {number}", "exec"), {"__name__": "__main__"})
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all commands, so that what one writes the next one finds, as for a reader who has these files."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "my-model").mkdir()
    (folder / "shared").mkdir()
    model = {"model_type": "gpt2", "n_head": 2, "n_embd": 64, "n_positions": 256}
    (folder / "my-model" / "config.json").write_text(json.dumps(model), encoding="utf-8")
    missed = line_of({Workload("infer", True, 128, 2, 32, "fp32"): 1})
    (folder / "missed.jsonl").write_text(missed, encoding="utf-8")
    return folder


@pytest.mark.alone  # some probe
@pytest.mark.parametrize("command", commands(*PAGES))
def test_commands_run(command: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_warm(monkeypatch)
    if command.startswith("pip install"):
        pytest.importorskip("hatchling", reason="pip install '.[dev]' brings it")
    done = run(as_run(command), home)
    told = f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    if "probe" in command and re.search(r"inconclusive|no cell could be measured|Error 6$", done.stderr, re.MULTILINE):
        pytest.skip("this machine is too busy to measure anything now")
    assert done.returncode == 0, told


def test_python_runs(tmp_path: Path) -> None:
    """All blocks in one process, each with names of its own."""
    pages = [page for page in PAGES if page.parent != ROOT and page != OVER_RANKS]
    found = [(block.page, number, block.text) for number, block in enumerate(blocks("python", *pages))]
    assert found
    listed = tmp_path / "blocks.json"
    listed.write_text(json.dumps(found), encoding="utf-8")
    done = run([sys.executable, "-c", RUN_BLOCKS, str(listed)], tmp_path)
    assert done.returncode == 0, done.stderr


def test_python_over_ranks_runs_on_two(tmp_path: Path) -> None:
    (block,) = blocks("python", OVER_RANKS)
    program = tmp_path / "ring.py"
    program.write_text(block.text, encoding="utf-8")
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([sys.executable, *start, str(program)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("torch.Size([1, 512, 4, 32])") == 2


def test_the_profile_loads() -> None:
    (block,) = blocks("yaml", *PAGES)
    profile = parse_profile(block.text, block.page)
    assert profile.source == "measured"
    assert profile.plans
    assert profile.plans[0].evidence is not None


def test_the_commands_they_name_are_those_there_are() -> None:
    run_here = {command.split()[1] for command in commands(*PAGES) if command.startswith("ringtune ")}
    assert run_here | set(re.findall(r"`ringtune\s([a-z][a-z-]*)", ALL)) == set(cli.commands)


def test_the_options_they_name_exist() -> None:
    known = {name for command in cli.commands.values() for p in command.params for name in (*p.opts, *p.secondary_opts)}
    known |= {"--help", "--version"}
    ours = re.sub(r"(torchrun|pip install|cosign) .*", "", ALL)  # whose options are their own
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", ours)) <= known


def test_the_reference_lists_every_command_in_the_order_of_the_help() -> None:
    (listed,) = re.findall(r"^ +:commands: (.*)$", text_of(DOCS / "cli.md"), re.MULTILINE)
    assert listed.split(", ") == list(cli.commands)


def test_the_exit_codes_are_those_there_are() -> None:
    listed = re.findall(r"^\| (\d+) \| [a-z]", text_of(DOCS / "cli.md"), re.MULTILINE)
    assert [int(code) for code in listed] == [int(code) for code in ExitCode]


def test_the_api_reference_lists_every_public_name() -> None:
    listed = re.findall(r"auto\w+:: ringattn\.(\w+)$", text_of(DOCS / "api.md"), re.MULTILINE)
    assert sorted(listed) == sorted(ringattn.__all__)


def test_the_page_on_failure_names_every_error_and_what_else_it_is() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:`(\w+)`)? ?\|", text_of(DOCS / "concepts" / "failure.md"), re.MULTILINE)
    found = {kind: kind.__mro__[1:] for kind in vars(errors).values() if isinstance(kind, type)}
    kinds = {kind.__name__: mro for kind, mro in found.items() if issubclass(kind, errors.RingAttentionError)}
    del kinds["RingAttentionError"]
    kinds["PeerError"] = PeerError.__mro__[1:]
    assert len(rows) == len(dict(rows))
    assert dict(rows).keys() == kinds.keys()
    for name, other in rows:
        assert not other or other in {kind.__name__ for kind in kinds[name]}, name


def test_the_reference_can_be_read_without_a_build(tmp_path: Path) -> None:
    (name,) = re.findall(r"`python -m pydoc ([\w.]+)`", text_of(DOCS / "api.md"))
    done = run([sys.executable, "-m", "pydoc", name], tmp_path)
    assert "Exact dense or dilated attention over one sequence" in done.stdout


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.name)
def test_the_files_they_link_exist(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", text_of(page)):
        if not target.startswith(("http://", "https://")):
            assert (page.parent / target).exists(), target


def test_the_extras_they_name_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    named = set(re.findall(r"(?:ringtune|'\.)\[(\w+)\]", ALL))
    assert {"flash", "flash4", "xformers"} <= named <= set(project["optional-dependencies"])


def test_nothing_is_installed_under_a_name_that_no_registry_has() -> None:
    """ringtune comes from a clone: ``pip install .``, with its extras ``'.[flash]'``."""
    sources = [
        path for folder in ("ringattn", "autotune", "tests", "examples") for path in (ROOT / folder).rglob("*.py")
    ]
    texts = {str(path.relative_to(ROOT)): text_of(path) for path in (*DOCUMENTS, ROOT / "Makefile", *sources)}
    unpublished = re.compile(r"pip install (?:-\S+ )*['\"]?(?:ringtune|ringattn)\b")
    assert [name for name, text in texts.items() if unpublished.search(text)] == []


def test_the_newest_torch_that_was_tested_is_the_one_they_name() -> None:
    named = re.findall(r"([\d.]+)\s+is\s+the\s+newest\s+that\s+was\s+tested", ALL)
    named += re.findall(r"newest\s+torch\s+that\s+was\s+tested\s+is\s+([\d.]+\d)", ALL)
    assert len(named) == 3
    assert set(named) == {".".join(map(str, TESTED_TORCH))}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_completion_they_describe_is_there(shell: str) -> None:
    assert f"{shell}_source" in text_of(DOCS / "cli.md")
    environ = {"_RINGTUNE_COMPLETE": f"{shell}_source"}
    script = CliRunner(env=environ).invoke(cli, prog_name="ringtune", complete_var="_RINGTUNE_COMPLETE")
    assert "_RINGTUNE_COMPLETE" in script.stdout


def test_a_word_is_completed() -> None:
    environ = {"_RINGTUNE_COMPLETE": "bash_complete", "COMP_WORDS": "ringtune ver", "COMP_CWORD": "1"}
    assert "verify" in CliRunner(env=environ).invoke(cli, prog_name="ringtune").stdout


def test_the_source_files_they_name_exist() -> None:
    named = set(re.findall(r"`((?:ringattn|autotune|tests|benchmarks|examples|profiles)/[\w./-]+)`", ALL))
    assert named
    for path in named:
        assert (ROOT / path).exists(), path
