"""The history of a search: read from what the probe recorded, for the profile that it wrote, and never written to."""

from __future__ import annotations

import contextlib
import dataclasses
import sqlite3
from pathlib import Path

import optuna
import pytest
from cli_runs import one_line_error, ringtune
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from probed_machine import Machine, Watching, request_for

from autotune.exit_codes import ProbeFailure
from autotune.journal.history import search_histories
from autotune.probe.tuning import run_probe
from ringattn.profile.yaml_io import load_profile, save_profile
from ringattn.workload import describe


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A profile that a probe in simulated time wrote, and its journal."""
    place = tmp_path_factory.mktemp("probed")
    run_probe(request_for(place / "m.yaml"), Watching(), Machine(place).environment)
    return place


def test_every_workload_has_the_trials_that_its_probe_made(folder: Path) -> None:
    path, journal = folder / "m.yaml", folder / "m.yaml.journal"
    profile, before = load_profile(path), journal.read_bytes()
    histories = search_histories(profile, str(journal))
    assert [history.workload for history in histories] == [entry.workload for entry in profile.plans]
    for history, entry in zip(histories, profile.plans, strict=True):
        assert entry.choice is not None
        assert entry.evidence is not None
        ends = [trial.elapsed_s for trial in history.trials]
        assert ends == sorted(ends)
        assert ends[0] >= 0
        assert history.timed >= 2, "the default and another plan"
        mine = [t.speedup for t in history.trials if t.tip.startswith(f"{describe(entry.choice.tunables)}: ")]
        assert mine
        assert mine[-1] == pytest.approx(1 / entry.evidence.default_ratio, rel=0.05)
    assert journal.read_bytes() == before, "reading writes nothing"


@pytest.mark.parametrize("there", [False, True], ids=["no file", "another program's"])
def test_reading_makes_no_database_and_no_tables_in_one(tmp_path: Path, folder: Path, there: bool) -> None:
    database, page = tmp_path / "studies.db", tmp_path / "r.html"
    if there:
        with contextlib.closing(sqlite3.connect(database)) as made:
            made.execute("CREATE TABLE theirs (name TEXT)")
    before = database.read_bytes() if there else None
    result = ringtune("report", folder / "m.yaml", "--storage", f"sqlite:///{database}", "--output", page)
    line = one_line_error(result, 1)
    assert ("holds no studies of Optuna" if there else "no such file") in line
    assert (database.read_bytes() if database.exists() else None) == before
    assert not page.exists()


def test_an_optuna_storage_serves_as_well(tmp_path: Path, folder: Path) -> None:
    profile, url = load_profile(folder / "m.yaml"), f"sqlite:///{tmp_path}/studies.db"
    journal = JournalStorage(JournalFileBackend(str(folder / "m.yaml.journal")))
    name = str(profile.plans[0].workload)
    optuna.copy_study(from_study_name=name, from_storage=journal, to_storage=url)
    (copied,) = search_histories(profile, url)
    assert copied == search_histories(profile, str(folder / "m.yaml.journal"))[0]


def test_the_record_of_another_probe_is_refused(folder: Path) -> None:
    profile = load_profile(folder / "m.yaml")
    others = tuple(
        dataclasses.replace(entry, workload=dataclasses.replace(entry.workload, heads=8)) for entry in profile.plans
    )
    with pytest.raises(ProbeFailure, match="holds no search of this profile's plans"):
        search_histories(dataclasses.replace(profile, plans=others), str(folder / "m.yaml.journal"))


@pytest.mark.parametrize("content", [b"", b"not a journal\n", b'{"op_code": 99}\n', b"\xff\xfe\n", b"[1]\n"])
def test_what_is_no_journal_is_one_line(tmp_path: Path, folder: Path, content: bytes) -> None:
    path = tmp_path / "other.journal"
    path.write_bytes(content)
    with pytest.raises(ProbeFailure, match=r"other\.journal: ") as caught:
        search_histories(load_profile(folder / "m.yaml"), str(path))
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_not_made(tmp_path: Path, folder: Path) -> None:
    missing = tmp_path / "missing.journal"
    line = one_line_error(
        ringtune("report", folder / "m.yaml", "--storage", missing, "--output", tmp_path / "r.html"), 1
    )
    assert line.startswith(f"Error: {missing}: no such file; ")
    assert list(tmp_path.iterdir()) == []


def test_report_takes_the_journal_beside_the_profile(tmp_path: Path, folder: Path) -> None:
    page = tmp_path / "r.html"
    assert ringtune("report", folder / "m.yaml", "--output", page).exit_code == 0
    assert "How the search went" in page.read_text()
    moved = tmp_path / "moved.yaml"
    save_profile(load_profile(folder / "m.yaml"), moved)
    assert ringtune("report", moved, "--output", page).exit_code == 0
    assert "How the search went" not in page.read_text()
    named = ringtune("report", moved, "--storage", folder / "m.yaml.journal", "--output", page)
    assert named.exit_code == 0
    assert "How the search went" in page.read_text()


def test_a_journal_beside_the_profile_that_is_of_another_probe_is_said(tmp_path: Path, folder: Path) -> None:
    path = tmp_path / "m.yaml"
    save_profile(load_profile(folder / "m.yaml"), path)
    (tmp_path / "m.yaml.journal").write_bytes(b"")
    result = ringtune("report", path, "--output", tmp_path / "r.html")
    assert result.exit_code == 0
    assert "no history of the search: " in result.stderr


def test_two_profiles_have_one_page_and_no_history(tmp_path: Path, folder: Path) -> None:
    path, page = folder / "m.yaml", tmp_path / "both.html"
    assert ringtune("report", path, path, "--output", page).exit_code == 0
    assert "B / A" in page.read_text()
    assert ringtune("report", path, path, "--storage", "x", "--output", page).exit_code == 2
    other = tmp_path / "other.yaml"
    save_profile(load_profile(path), other)
    assert "is the profile itself" in one_line_error(ringtune("report", path, other, "--output", other), 1)
    assert load_profile(other) == load_profile(path)
