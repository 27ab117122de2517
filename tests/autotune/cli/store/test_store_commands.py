"""push, pull, list, merge, diff, forget and which, on a folder and on a URL."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import click
import pytest
from cli_runs import measured_entry, one_line_error, profile_of_this_machine, ringtune
from machine_samples import A100, H100, dense_entry, measured

from autotune.cli.machine.doctor import search_path_contents
from autotune.cli.store.candidates import store_contents
from ringattn.hardware.facts import detect
from ringattn.profile.precedence import origin_of
from ringattn.profile.schema import Fingerprint, Profile, Provenance
from ringattn.profile.yaml_io import load_profile, save_profile
from ringattn.store.backends.backend import open_backend
from ringattn.store.lookup import stored_profiles
from ringattn.store.names import kind_of
from ringattn.store.signatures.trust import Signatures
from ringattn.store.store import Store


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    stored_profiles.cache_clear()
    yield
    stored_profiles.cache_clear()


@pytest.fixture(params=["folder", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "memory":
        pytest.importorskip("fsspec")
        found = f"memory://{tmp_path.name}/store"
    else:
        (tmp_path / "shared").mkdir()
        found = str(tmp_path / "shared")
    monkeypatch.setenv("RINGTUNE_STORE", found)
    return found


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "shared").mkdir()
    monkeypatch.setenv("RINGTUNE_STORE", str(tmp_path / "shared"))
    return tmp_path / "shared"


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    save_profile(profile_of_this_machine(measured_entry()), path)
    return path


def document(*arguments: str | Path) -> Any:
    result = ringtune(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def probed(path: Path, effort: str, date: str, *entries: Any) -> Profile:
    profile = replace(measured(H100, *entries), provenance=Provenance("0.1.0", date, effort))
    save_profile(profile, path)
    return profile


def test_what_is_pushed_serves_this_machine_and_is_pulled(place: str, mine: Path, tmp_path: Path) -> None:
    assert ringtune("which", "--device", "cpu").exit_code == 4
    stored_profiles.cache_clear()  # as in another process
    (pushed,) = document("push", mine)["pushed"]
    told = document("which", "--device", "cpu")
    assert told["tier"] == "exact"
    assert load_profile(told["path"]) == load_profile(mine)
    assert told["path"].endswith(pushed["name"])
    (written,) = document("pull", "--output", tmp_path / "here", "--device", "cpu")["written"]
    assert load_profile(written) == load_profile(mine)
    assert document("forget", pushed["name"])["removed"] == [pushed["name"]]
    assert ringtune("list").stdout == "nothing there\n"
    assert one_line_error(ringtune("pull", "--device", "cpu"), 4)


def test_what_is_pulled_joins_the_one_file_of_this_machine(folder: Path, mine: Path, tmp_path: Path) -> None:
    own = load_profile(mine)
    usual = tmp_path / "config" / "ringtune" / f"{kind_of(own.fingerprint)}.yaml"
    save_profile(own, usual)
    Store(open_backend(str(folder))).push(replace(own, plans=(measured_entry(4096),)))
    for _ in range(2):  # the second time nothing is added
        assert document("pull", "--device", "cpu")["written"] == [str(usual)]
        assert list(usual.parent.iterdir()) == [usual]
        assert {entry.workload.seq_len for entry in load_profile(usual).plans} == {512, 4096}
    assert document("which", "--device", "cpu")["path"] == str(usual)


def test_a_pull_leaves_a_file_of_other_software_alone(folder: Path, mine: Path, tmp_path: Path) -> None:
    profile = load_profile(mine)
    other = replace(profile, software=(("torch", "1.0"),))
    usual = tmp_path / "here" / f"{kind_of(profile.fingerprint)}.yaml"
    save_profile(other, usual)
    Store(open_backend(str(folder))).push(profile)
    for _ in range(2):
        (written,) = document("pull", "--output", usual.parent, "--device", "cpu")["written"]
        assert load_profile(usual) == other
        assert load_profile(written) == profile
    assert len(list(usual.parent.iterdir())) == 2
    usual.write_text("schema: 1\n")
    assert document("pull", "--output", usual.parent, "--device", "cpu")["written"] == [written]
    save_profile(profile, usual)
    assert document("pull", "--output", usual.parent, "--device", "cpu")["written"] == [str(usual)]


def test_a_pull_loses_no_row_of_its_file_to_lower_or_older_ones(folder: Path, tmp_path: Path) -> None:
    """Also once the file has taken over some of theirs, for which it claims as little as they do."""
    pull = ("pull", "--output", tmp_path / "pulled", "--device", "cpu")

    def push(effort: str, date: str, *lengths: int) -> None:
        rows = profile_of_this_machine(*map(measured_entry, lengths))
        save_profile(replace(rows, provenance=Provenance("0.1.0", date, effort)), tmp_path / "theirs.yaml")
        assert ringtune("push", tmp_path / "theirs.yaml").exit_code == 0

    def pulled() -> dict[int, tuple[str, str]]:
        document(*pull)
        (path,) = (tmp_path / "pulled").iterdir()
        profile = load_profile(path)
        origins = ((entry.workload.seq_len, origin_of(profile, entry)) for entry in profile.plans)
        return {length: (origin.effort, origin.date) for length, origin in origins}

    push("full", "2026-03-01", 512)
    assert pulled() == {512: ("full", "2026-03-01")}
    for path in folder.rglob("*.yaml"):
        path.unlink()
    push("quick", "2026-01-01", 1024)
    assert pulled() == {512: ("full", "2026-03-01"), 1024: ("quick", "2026-01-01")}
    push("standard", "2026-02-01", 512, 1024)
    assert pulled() == {512: ("full", "2026-03-01"), 1024: ("standard", "2026-02-01")}


def test_a_pull_of_all_passes_over_what_another_version_wrote(folder: Path, mine: Path, tmp_path: Path) -> None:
    newer = mine.read_text().replace("schema: 1", "schema: 2")
    of_kind = folder / "profiles" / kind_of(Fingerprint.of(detect("cpu")))
    of_kind.mkdir(parents=True)
    name = f"x1-{hashlib.sha256(newer.encode()).hexdigest()}.yaml"
    (of_kind / name).write_text(newer)
    pull = ("pull", "--output", tmp_path / "pulled", "--device", "cpu")
    alone = ringtune(*pull)
    assert alone.exit_code == 4
    assert "schema: is 2, and this version reads 1" in alone.stderr
    assert "holds no profile of" in alone.stderr
    ringtune("push", mine)
    both = ringtune(*pull)
    assert both.exit_code == 0, both.stderr
    assert "schema: is 2" in both.stderr
    assert [load_profile(path) for path in (tmp_path / "pulled").iterdir()] == [load_profile(mine)]
    assert "schema: is 2" in one_line_error(ringtune(*pull, name.removeprefix("x1-")[:12]), 1)  # asked for by name


def test_a_folder_that_cannot_be_pulled_into_says_so(folder: Path, mine: Path, tmp_path: Path) -> None:
    assert ringtune("push", mine).exit_code == 0
    told = one_line_error(ringtune("pull", "--output", tmp_path / ("x" * 300), "--device", "cpu"), 1)
    assert "cannot be written: File name too long" in told


def test_pushing_without_a_file_pushes_what_this_machine_uses(place: str, at_home: Path) -> None:
    (pushed,) = document("push", "--device", "cpu")["pushed"]
    assert pushed["file"] == str(at_home)


def test_which_takes_a_store_that_no_variable_names(folder: Path, mine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert ringtune("push", mine).exit_code == 0
    monkeypatch.delenv("RINGTUNE_STORE")
    assert ringtune("which", "--device", "cpu").exit_code == 4
    assert ringtune("which", "--device", "cpu", "--store", folder).exit_code == 0


def test_a_relative_folder_is_the_same_store_in_the_variable_and_the_option(
    folder: Path, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RINGTUNE_STORE")
    assert ringtune("push", mine, "--store", "shared").exit_code == 0
    monkeypatch.setenv("RINGTUNE_STORE", "shared")
    told = ringtune("which", "--device", "cpu")
    assert told.exit_code == 0
    assert told.stderr == ""
    assert document("push", mine)["store"] == str(folder)


def test_all_files_are_read_before_one_is_pushed(folder: Path, mine: Path, tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("schema: 1\n")
    assert "bad.yaml" in one_line_error(ringtune("push", mine, tmp_path / "bad.yaml"), 1)
    assert list(folder.iterdir()) == []


def test_list_counts_by_kind_and_shows_one_kind_in_full(place: str, tmp_path: Path) -> None:
    store = Store(open_backend(place))
    for profile in (
        measured(H100, dense_entry(1024)),
        measured(H100, dense_entry(2048)),
        measured(A100, dense_entry()),
    ):
        store.push(profile)
    assert [(row["kind"], row["ranks"], row["profiles"]) for row in document("list")] == [
        ("nvidia-a100-sxm-80g", 1, 1),
        ("nvidia-h100-sxm-80g", 1, 2),
    ]
    rows = document("list", "nvidia-h100-sxm-80g")
    assert {row["name"] for row in rows} == {name.short for name in store.names("nvidia-h100-sxm-80g")}
    assert "nvidia-a100-sxm-80g" in ringtune("list").stdout
    assert "no name in a store" in one_line_error(ringtune("list", "../.."), 1)


def test_merge_joins_files_and_lists_conflicts(tmp_path: Path) -> None:
    slow = dense_entry(1024, "math")
    assert slow.choice is not None
    assert slow.evidence is not None
    apart = replace(slow.evidence, default_ratio=0.95, ratio_low=0.94, ratio_high=0.96)
    slow = replace(slow, choice=replace(slow.choice, evidence=apart))
    probed(tmp_path / "full.yaml", "full", "2026-01-01", dense_entry(1024, "cudnn"))
    probed(tmp_path / "quick.yaml", "quick", "2026-02-01", slow, dense_entry(2048))
    result = ringtune("merge", tmp_path / "full.yaml", tmp_path / "quick.yaml", "--output", tmp_path / "both.yaml")
    assert result.exit_code == 0
    assert "2 rows of 2 profiles" in result.stdout
    (line,) = result.stderr.splitlines()
    assert line.startswith("conflict: ")
    assert "kept cudnn/cudnn bf16" in line
    both = load_profile(tmp_path / "both.yaml")
    assert {entry.workload.seq_len for entry in both.plans} == {1024, 2048}
    save_profile(measured(A100, dense_entry()), tmp_path / "other.yaml")
    line = one_line_error(
        ringtune("merge", tmp_path / "full.yaml", tmp_path / "other.yaml", "--output", tmp_path / "both.yaml"), 1
    )
    assert "is of another machine or other software than" in line
    assert load_profile(tmp_path / "both.yaml") == both


def test_merge_removes_from_a_store_what_gives_no_row(place: str, tmp_path: Path) -> None:
    store = Store(open_backend(place))
    (old,) = store.push(probed(tmp_path / "a.yaml", "quick", "2026-01-01", dense_entry(1024, "math")))
    (new,) = store.push(probed(tmp_path / "b.yaml", "full", "2026-02-01", dense_entry(1024), dense_entry(2048)))
    (own,) = store.push(probed(tmp_path / "c.yaml", "quick", "2026-01-01", dense_entry(4096)))
    assert document("merge")["removed"] == [old.short]
    assert set(store.names()) == {new, own}
    assert ringtune("merge").stdout == "every profile gives some row; nothing to remove\n"


def test_merge_keeps_what_is_signed_for_those_who_believe_nothing_else(place: str, tmp_path: Path) -> None:
    store = Store(open_backend(place))
    (old,) = store.push(probed(tmp_path / "a.yaml", "quick", "2026-01-01", dense_entry(1024, "math")))
    (signed,) = store.push(probed(tmp_path / "b.yaml", "standard", "2026-01-01", dense_entry(1024)))
    (newest,) = store.push(probed(tmp_path / "c.yaml", "full", "2026-01-01", dense_entry(1024)))
    for name in (old, signed):
        store.keep_signatures(name, Signatures(ssh=b"a signature", bundle=None))
    assert document("merge")["removed"] == [old.short]  # whose row a signed one gives
    assert set(store.names()) == {signed, newest}
    store.keep_signatures(signed, Signatures())
    assert document("merge")["removed"] == [signed.short]


def test_diff_says_in_what_two_profiles_differ(folder: Path, tmp_path: Path) -> None:
    one = probed(tmp_path / "one.yaml", "quick", "2026-01-01", dense_entry(1024, "flash"), dense_entry(2048))
    other = replace(
        measured(replace(H100, power_limit_w=500), dense_entry(1024, "cudnn"), dense_entry(4096)),
        software=(("torch", "2.12.0"),),
    )
    (name,) = Store(open_backend(str(folder))).push(other)
    told = document("diff", tmp_path / "one.yaml", name.short)
    assert "power_limit_w: 700 in A, 500 in B" in told["machine"]
    assert "torch: 2.11.0 in A, 2.12.0 in B" in told["machine"]
    assert [line.split(": ")[1].split(",")[0].split(" in ")[-1] for line in told["rows"]][1:] == [
        "in A alone",
        "in B alone",
    ]
    assert "within noise" in told["rows"][0]
    assert one != other
    same = ringtune("diff", tmp_path / "one.yaml", tmp_path / "one.yaml")
    assert same.stdout == "no difference\n"


def test_a_name_is_looked_for_in_every_store(folder: Path, mine: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (name,) = Store(open_backend(str(folder))).push(load_profile(mine))
    both = ("--store", tmp_path / "empty", "--store", folder)
    assert document("pull", name.short, "--output", tmp_path / "own", *both)["written"]
    assert document("diff", mine, name.short, *both) == {"machine": [], "rows": []}
    told = one_line_error(ringtune("pull", "nowhere", *both), 1)
    assert told.startswith(f"Error: {folder}: nowhere: is not there")


def test_what_is_damaged_in_one_store_is_pulled_from_the_next(folder: Path, mine: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (name,) = Store(open_backend(str(damaged))).push(load_profile(mine))
    (damaged / str(name)).write_text("cut short")
    both = ("--store", damaged, "--store", folder)
    assert ringtune("pull", "--device", "cpu", *both).exit_code == 4
    Store(open_backend(str(folder))).push(load_profile(mine))
    result = ringtune("pull", "--device", "cpu", *both)
    assert result.exit_code == 0
    assert "its content is not that of its name" in result.stderr
    assert "in B" not in one_line_error(ringtune("diff", mine, name.short, *both), 1)


@pytest.mark.parametrize("name", ["../../etc/passwd", "/etc/passwd", "..", "a/../b", "x\n"])
@pytest.mark.parametrize("command", ["forget", "pull"])
def test_names_that_lead_out_of_a_store_are_one_line(folder: Path, command: str, name: str) -> None:
    outside = folder.parent / "etc"
    outside.mkdir()
    (outside / "passwd").write_text("kept")
    assert "is no name in a store" in one_line_error(ringtune(command, name), 1)
    assert (outside / "passwd").read_text() == "kept"


def test_which_prints_every_candidate_and_what_differs(folder: Path, mine: Path, tmp_path: Path) -> None:
    assert ringtune("push", mine).exit_code == 0
    profile = load_profile(mine)
    store = Store(open_backend(str(folder)))
    more = replace(profile.fingerprint, sm_count=profile.fingerprint.sm_count + 1)
    store.push(replace(profile, fingerprint=more))
    store.push(replace(profile, software=(("torch", "0.0.1"),)))
    result = ringtune("which", "-v", "--device", "cpu")
    assert result.exit_code == 0
    told = document("which", "-v", "--device", "cpu")["candidates"]
    assert [candidate["tier"] for candidate in told if candidate["origin"] == "store"] == ["exact", "same-silicon", ""]
    last = next(c for c in reversed(told) if c["origin"] == "store")
    assert "not looked at, of another kind; would be nearest: sm_count" in last["why"]
    assert last["why"] in result.stdout
    shipped = [candidate["why"] for candidate in told if candidate["origin"] == "shipped"]
    assert set(shipped) == {"made for vendor nvidia, and this device's is cpu"}
    assert ringtune("which", "-v", "--path-only").exit_code == 2


def test_doctor_lists_the_stores_in_search_order(
    place: str, mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pushed,) = document("push", mine)["pushed"]
    monkeypatch.setenv("RINGTUNE_STORE", f"{place} {tmp_path / 'absent'}")
    here, gone = store_contents(detect("cpu"))
    assert here["files"] == [{"file": Path(pushed["name"]).name, "source": "measured", "error": ""}]
    assert (here["error"], gone["files"]) == ("", [])
    assert "no such folder" in str(gone["error"])
    order = [told["origin"] for told in search_path_contents([here, gone])]
    assert order[:3] == ["user", "store", "store"]
    assert order[-1] == "shipped"


def test_nodes_report_what_they_run_and_the_fleet_is_listed(
    place: str, mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ringtune("which", "--report", "--device", "cpu").exit_code == 4
    kind = kind_of(Fingerprint.of(load_profile(mine).fingerprint))  # type: ignore[arg-type]  # has the same fields
    (row,) = document("list", "--fleet")
    assert (row["kind"], row["ranks"], row["tier"]) == (kind, 1, "heuristic")
    assert (row["nodes"], row["silent"]) == (f"1: {os.uname().nodename} (0 min ago)", "0")
    assert row["profile"] == "no measured profile fits"
    assert ringtune("push", mine).exit_code == 0
    stored_profiles.cache_clear()
    assert ringtune("which", "--report", "--device", "cpu").exit_code == 0
    (row,) = document("list", "--fleet")  # the node's earlier note is replaced
    for pod in ("a", "b"):  # whose host's name is another one after each start
        monkeypatch.setattr("platform.node", lambda pod=pod: f"ringtune-{pod}")
        monkeypatch.setenv("RINGTUNE_NODE", "node-7")
        assert ringtune("which", "--report", "--device", "cpu").exit_code == 0
    (row,) = document("list", "--fleet")
    assert row["nodes"].startswith("2: ")
    assert "node-7" in row["nodes"]
    assert row["tier"] == "exact"
    for variables in ({"COLUMNS": "40"}, {"COLUMNS": "40", "FORCE_COLOR": "1", "NO_COLOR": "1"}):  # as a terminal
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            shown = ringtune("list", "--fleet").stdout
        assert {kind, row["profile"]} <= {*click.unstyle(shown).split()}, shown  # a name that is folded is no use
        assert any(kind in line and row["profile"] in line for line in shown.splitlines()) == (len(variables) == 1)
    assert ringtune("list", "--fleet", kind).exit_code == 2


def test_a_node_that_is_gone_is_counted_apart(folder: Path) -> None:
    """It left its last note, and was counted as if it were there."""
    assert ringtune("which", "--report", "--device", "cpu").exit_code == 4
    ((path,),) = (list(kind.iterdir()) for kind in (folder / "beacons").iterdir())
    note = json.loads(path.read_text())
    now = datetime.now(tz=UTC)
    ages = {"fresh": timedelta(hours=5), "quiet": timedelta(days=3, hours=1), "gone": timedelta(days=40)}
    for node, age in ages.items():
        path.with_name(f"{node}.json").write_text(json.dumps(note | {"node": node, "seen": (now - age).isoformat()}))
    del note["seen"]
    path.write_text(json.dumps(note | {"node": "old", "day": (now - timedelta(days=90)).date().isoformat()}))
    (row,) = document("list", "--fleet")
    assert row["nodes"] == "1: fresh (5 h ago)"
    assert row["silent"] == "3: quiet (3 days ago), gone (40 days ago), old (90 days ago)"
    (row,) = document("list", "--fleet", "--within", "7")
    assert row["nodes"] == "2: fresh (5 h ago), quiet (3 days ago)"
    assert "--within is about the notes of nodes; give --fleet" in ringtune("list", "--within", "7").stderr


def test_a_broken_beacon_costs_itself_alone(folder: Path) -> None:
    assert ringtune("which", "--report", "--device", "cpu").exit_code == 4
    (kind,) = (folder / "beacons").iterdir()
    (kind / "empty.json").write_text("")
    (kind / "list.json").write_text("[]")
    (kind / "deep.json").write_text("[" * 4000)
    (kind / "large.json").write_text(
        json.dumps({**json.loads(next(kind.glob("*-x1.json")).read_text()), "world": 1e999})
    )
    (kind / "link.json").symlink_to("/etc/passwd")
    (kind / "steer.json").write_text(
        json.dumps({**json.loads(next(kind.glob("*-x1.json")).read_text()), "node": "\x1b[2J"})
    )
    result = ringtune("list", "--fleet")
    assert result.exit_code == 0
    assert len(result.stderr.splitlines()) == 5
    assert "\x1b[2J" not in result.output


@pytest.mark.parametrize(
    "command", [("push",), ("pull",), ("list",), ("merge",), ("forget", "x"), ("which", "--report")]
)
def test_without_a_store_it_is_a_usage_error(command: tuple[str, ...]) -> None:
    result = ringtune(*command)
    assert result.exit_code == 2
    assert "no store is named; give --store, or set RINGTUNE_STORE" in result.stderr


@pytest.mark.parametrize("command", [("list",), ("merge",), ("forget", "abc"), ("pull", "abc")])
def test_a_store_that_is_not_there_is_one_line(command: tuple[str, ...], tmp_path: Path) -> None:
    line = one_line_error(ringtune(*command, "--store", tmp_path / "absent"), 1)
    assert "no such folder; mount it" in line


class Hanging:
    """A store that never answers, as one on a file server that is gone."""

    url = "/gone/store"

    def __init__(self) -> None:
        self.ended = threading.Event()

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.ended.wait()


@pytest.mark.parametrize(
    "command",
    [
        ("list",),
        ("list", "--fleet"),
        ("list", "some-kind"),
        ("pull",),
        ("push", "mine.yaml"),
        ("merge",),
        ("forget", "cpu-x/x1-abcdef"),
        ("diff", "cpu-x/x1-abcdef", "mine.yaml"),
        ("sign", "cpu-x/x1-abcdef"),
        ("probe", "--device", "cpu"),
    ],
    ids=" ".join,
)
def test_a_store_that_does_not_answer_holds_no_command(
    command: tuple[str, ...], mine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = Hanging()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("RINGTUNE_SIGNING_KEY", str(tmp_path / "key"))
    (tmp_path / "key").touch()
    monkeypatch.setattr(Store, "signed", lambda *arguments: b"")
    monkeypatch.setattr("ringattn.store.backends.backend.open_backend", lambda place: hanging)
    monkeypatch.setattr("ringattn.store.backends.bounded_backend.COMMAND_S", 0.2)
    try:
        result = ringtune(*command, "--store", str(tmp_path))
    finally:
        hanging.ended.set()
    assert one_line_error(result, 1) == "Error: /gone/store: did not answer within 0.2 s"


def test_a_mount_point_without_its_file_system_is_told_from_an_empty_store(folder: Path, mine: Path) -> None:
    """It looked empty, and what was read of it before was forgotten."""
    assert ringtune("push", mine).exit_code == 0
    which = ("which", "--device", "cpu", "--path-only")
    path = ringtune(*which)
    assert path.exit_code == 0
    mounted = folder.rename(folder.with_name("mounted"))
    folder.mkdir()
    told = f"{folder}: is an empty folder, and 1 profile was read of it before; mount it, or remove "
    for command in (("list",), ("list", "--fleet"), ("merge",)):
        result = ringtune(*command)
        assert (result.exit_code, result.stderr.startswith(f"warning: {told}")) == (0, True), result.output
    for _ in range(2):
        stored_profiles.cache_clear()
        result = ringtune(*which)
        assert (result.exit_code, result.stdout) == (0, path.stdout)
        assert result.stderr.startswith(f"warning: {told}")
        assert result.stderr.endswith("; 1 profile read of it before will do\n")
    folder.rmdir()
    mounted.rename(folder)
    for name in Store(open_backend(str(folder))).names():
        assert ringtune("forget", name.short).exit_code == 0
    stored_profiles.cache_clear()
    result = ringtune(*which)  # emptied by commands, it has its folders and is believed
    assert (result.exit_code, result.stdout) == (4, "")
    assert "mount" not in result.stderr


def test_a_store_that_was_always_empty_is_no_news(folder: Path) -> None:
    assert ringtune("list").stderr == ""
    assert "mount" not in ringtune("which", "--device", "cpu").stderr
