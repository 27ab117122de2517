"""The commands where a host allows little: aids are not conditions, and what the end needs is asked for first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from bare_host import REPO, BareHost, Ended, can_remount, environ_of
from cli_runs import measured_entry, profile_of_this_machine

from ringattn.profile.yaml_io import dump_profile

bare = pytest.mark.skipif(not can_remount(), reason="needs mount namespaces")

CELL = [
    "--effort",
    "quick",
    "--seq-len",
    "64",
    "--heads",
    "1",
    "--head-dim",
    "16",
    "--mode",
    "infer",
    "--dense",
    "--causal",
    "--device",
    "cpu",
]
PROBE = ("probe", "--budget", "20", *CELL)
OVER_TWO = (*PROBE, "--nproc", "2")
MODULE = """
import torch, ringattn
q = torch.randn(1, 96, 2, 16)
print(ringattn.RingAttention(2, 16, profile="auto")(q, q, q).shape)
"""


def assert_measured(ended: Ended) -> None:
    """It got to its end, be it with a line that nothing could be believed on a busy machine (6, 7)."""
    assert ended.code in (0, 6, 7), ended.text
    assert "Traceback" not in ended.text, ended.text
    assert "default" in ended.text


def assert_refused(ended: Ended, remedy: str) -> None:
    """One line with the remedy, and nothing was measured."""
    assert ended.code == 1, ended.text
    (error,) = [line for line in ended.lines if line.startswith("Error: ")]
    assert remedy in error
    assert ended.lines[-1] == error
    assert "cell" not in ended.text


@pytest.fixture
def room(tmp_path: Path) -> Path:
    folder = tmp_path / "room"
    folder.mkdir()
    return folder


# --- nothing can be written but one folder, there is no /dev/shm, and files have no locks ---------------------------


@bare
@pytest.mark.parametrize(("words", "flock_errno"), [(PROBE, "ENOSYS"), (OVER_TWO, "")], ids=["alone", "ranks"])
def test_a_probe_needs_the_folder_of_its_profile_alone(room: Path, words: tuple[str, ...], flock_errno: str) -> None:
    ended = BareHost(room, environ=environ_of(flock_errno=flock_errno)).ringtune(*words, "--output", f"{room}/p.yaml")
    assert_measured(ended)
    assert "no folder for temporary files" in ended.text
    assert "let no other probe measure cpu meanwhile" in ended.text
    assert ("p.yaml.journal.writer: cannot be locked" in ended.text) is bool(flock_errno)


@bare
def test_commands_that_write_nothing_need_no_folder(room: Path) -> None:
    profile = room / "p.yaml"
    profile.write_text(dump_profile(profile_of_this_machine(measured_entry())))
    host = BareHost(room, room="", environ=environ_of(home=str(room), flock_errno="ENOSYS"))
    threads = str(profile_of_this_machine().fingerprint.threads)
    host.environ["OMP_NUM_THREADS"] = threads
    told = {
        ("doctor", "--device", "cpu"): "works",
        ("which", "--device", "cpu"): "tier: heuristic",
        ("verify", str(profile), "--budget", "20"): " of 1 cell",
        ("validate", "--here", str(profile)): "runs here",
    }
    for words, ended in zip(told, host.ringtune_each(*((str(room), words) for words in told)), strict=True):
        assert "Traceback" not in ended.text, ended.text
        assert "Error" not in ended.text, ended.text
        assert told[words] in ended.text


@bare
def test_a_module_needs_no_folder(room: Path) -> None:
    ended = BareHost(room, room="", environ=environ_of(home=str(room))).run(sys.executable, "-c", MODULE)
    assert (ended.code, ended.lines[-1]) == (0, "torch.Size([1, 96, 2, 16])"), ended.text


# --- the profile could not be written at the end --------------------------------------------------------------------


@bare
@pytest.mark.parametrize(
    ("size", "asked"),
    [
        ("64m", {"home": PROBE, "home of ranks": OVER_TWO, "root": PROBE, "proc": PROBE, "relative": PROBE}),
        (
            "64k",
            {
                "full": (*PROBE, "--output", "p.yaml"),
                "full for ranks": (*OVER_TWO, "--output", "p.yaml"),
                "full for a dry run": (*PROBE, "--dry-run", "--output", "p.yaml"),
            },
        ),
    ],
    ids=["no home", "full"],
)
def test_a_profile_that_could_not_be_written_is_told_first(
    room: Path, size: str, asked: dict[str, tuple[str, ...]]
) -> None:
    homes = {"root": "/", "proc": "/proc", "relative": "relative"}
    commands = [
        (homes.get(case, "/root"), tuple(str(room / word) if word == "p.yaml" else word for word in words))
        for case, words in asked.items()
    ]
    for case, ended in zip(asked, BareHost(room, size, environ_of()).ringtune_each(*commands), strict=True):
        assert_refused(ended, "--output")
        assert ("No space left on device" in ended.text) is (size == "64k"), case


# --- the working folder ---------------------------------------------------------------------------------------------

SHADOWS = ("autotune", "ringattn", "random", "queue", "yaml", "torch", "json", "pynvml", "socket", "sitecustomize")


@pytest.mark.parametrize(
    "words",
    [("doctor", "--device", "cpu"), (*OVER_TWO, "--output", "p.yaml")],  # each rank starts the worker of a probe alone
    ids=["doctor", "ranks"],
)
def test_children_import_nothing_from_the_working_folder(tmp_path: Path, words: tuple[str, ...]) -> None:
    """PYTHONPATH with an empty entry means the working folder, too."""
    for name in SHADOWS:
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported {name} from the working folder')\n")
    started = f"import os, sys; os.chdir({str(tmp_path)!r}); from autotune.__main__ import main; main()"
    ended = subprocess.run(
        [sys.executable, "-P", "-c", started, *words],
        cwd=REPO,  # where this process, started with PYTHONPATH, would meet the same files
        env={**os.environ, "PYTHONPATH": f"{REPO}{os.pathsep}", "XDG_STATE_HOME": str(tmp_path / "state")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert "working folder" not in ended.stdout + ended.stderr
    assert_measured(Ended(ended.returncode, ended.stdout + ended.stderr)) if words[0] == "probe" else None
    assert ended.returncode != 1, ended.stderr
