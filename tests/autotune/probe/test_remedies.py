"""What an error tells to do works when it is done."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
from machines import FACTS
from probed_machine import Machine, Watching

from autotune.cli.locate import chosen_profile_path
from autotune.cli.options import check_writable
from autotune.exit_codes import ProbeFailure
from autotune.folders import made_folder
from autotune.journal.storage.journal_file import JournalFile
from autotune.probe.checks import check_output
from autotune.probe.output import writer
from autotune.probe.request import ProbeRequest
from autotune.probe.tuning import run_probe
from ringattn.errors import ProfileError
from ringattn.planning.heuristic import NO_WISHES
from ringattn.planning.unmeasured_workloads import VARIABLE, record_path
from ringattn.profile.locations import Located
from ringattn.profile.resolve import resolve
from ringattn.profile.schema import Profile
from ringattn.profile.whole_file import replace_file
from ringattn.profile.yaml_io import load_profile


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "m.yaml"


def probe(machine: Machine, path: Path, **changes: object) -> Watching:
    heard = Watching()
    request = ProbeRequest(output=path, effort="quick", seq_lens=(512,), modes=("train",))
    run_probe(replace(request, **changes), heard, machine.environment)  # type: ignore[arg-type]
    return heard


@pytest.mark.parametrize(
    "spoil", [("median_ms: ", "median_ms: 1"), ("schema: 1", "schema: 99")], ids=["edit", "schema"]
)
def test_a_refused_file_is_replaced_by_the_command_it_names(
    machine: Machine, path: Path, spoil: tuple[str, str]
) -> None:
    probe(machine, path)
    path.write_text(path.read_text().replace(*spoil, 1))
    with pytest.raises(ProfileError, match="`ringtune probe --fresh --output FILE`"):
        probe(machine, path)
    probe(machine, path, resume=False)
    assert load_profile(path).plans


def test_a_disk_that_is_full_at_the_end_loses_nothing(
    machine: Machine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(profile: Profile, target: Path) -> None:
        raise ProfileError(str(target), "cannot be written: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(writer, "save_profile", full)
        with pytest.raises(ProbeFailure, match=r"No space left on device.*run the same command to go on"):
            probe(machine, path)
    assert not path.exists()
    heard = probe(machine, path)
    assert load_profile(path).plans
    assert heard.trials == []


def test_a_disk_that_fills_up_meanwhile_costs_what_was_not_told(
    machine: Machine, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Filling:
        def __init__(self, file: object) -> None:
            self.file, self.name, self.left = file, file.name, 30  # type: ignore[attr-defined]

        def write(self, content: bytes) -> int:
            self.left -= 1
            if self.left < 0:
                self.file.write(content[: len(content) // 2])  # type: ignore[attr-defined]
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return self.file.write(content)  # type: ignore[attr-defined,no-any-return]

        def __getattr__(self, name: str) -> object:
            return getattr(self.file, name)

    start = JournalFile.__init__

    def on_a_small_disk(self: JournalFile, journal: Path) -> None:
        start(self, journal)
        self._lines = Filling(self._lines)  # type: ignore[assignment]

    with monkeypatch.context() as patched:
        patched.setattr(JournalFile, "__init__", on_a_small_disk)
        with pytest.raises(ProbeFailure, match=r"journal: cannot be written .No space.*make room, then run the same"):
            probe(machine, path)
    heard = probe(machine, path)
    assert load_profile(path).plans
    assert any("continues" in note for note in heard.notes)


@pytest.mark.parametrize(
    ("origin", "remedy"),
    [("env", "Unset RINGTUNE_PROFILE"), ("argument", "Name none, so that this machine's own serves")],
)
def test_a_bound_profile_of_another_machine_names_what_binds_it(
    machine: Machine, path: Path, origin: str, remedy: str
) -> None:
    probe(machine, path)
    bound = Located(str(path), load_profile(path), origin)  # type: ignore[arg-type]
    with pytest.raises(ProfileError, match=remedy):
        resolve((bound,), replace(FACTS, arch="riscv64"))
    resolve((), replace(FACTS, arch="riscv64"))


def test_no_profile_for_ranks_names_the_probe_of_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    with pytest.raises(ProbeFailure, match="run `ringtune probe --nproc 4` first"):
        chosen_profile_path(None, "cpu", 4)


def test_folders_that_may_not_be_looked_into_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    real = os.stat

    def stat(place: object, **options: object) -> object:
        if str(place).startswith(f"{locked}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(place))
        return real(place, **options)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "stat", stat)
    monkeypatch.setattr("autotune.probe.checks.write_trouble", lambda folder: f"Permission denied: {folder.name}")
    with pytest.raises(ProbeFailure, match=r"Permission denied: locked.; name a file elsewhere with --output"):
        check_output(locked / ".config" / "ringtune" / "m.yaml")
    with pytest.raises(ProbeFailure, match="--output"):
        check_writable(locked / "folder" / "m.yaml")


def test_a_folder_that_cannot_be_made_names_the_variable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file" / "x", Path("/proc/x")):
        with pytest.raises(ProbeFailure, match="set XDG_CACHE_HOME to a folder that can be"):
            made_folder(folder, "XDG_CACHE_HOME")
    assert made_folder(tmp_path / "a" / "b", "XDG_CACHE_HOME").is_dir()


def test_a_file_system_that_syncs_no_folder_keeps_the_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(descriptor: int) -> None:
        if Path(f"/proc/self/fd/{descriptor}").resolve().is_dir():
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    replace_file(tmp_path / "p.yaml", b"new")
    assert (tmp_path / "p.yaml").read_bytes() == b"new"


def test_a_record_below_a_home_that_is_unknown_is_no_error_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "~nobody-of-this-name/missed.jsonl")
    assert record_path("auto", NO_WISHES).endswith("~nobody-of-this-name/missed.jsonl")
