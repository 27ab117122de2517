"""Of all nodes of a kind that ask at once, one measures; a dead one's place is taken; all end with one file."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cli_runs import measured_entry, one_line_error, profile_of_this_machine, ringtune
from machine_samples import H100, H100_PCIE, dense_entry, measured

import autotune.probe.tuning
from autotune.cli.probing.once import OncePerKind
from autotune.exit_codes import ProbeFailure
from autotune.probe.request import CellReport, ProbeObserver, ProbeRequest, ProbeResult, VerifiedCell, VerifyResult
from ringattn.errors import StoreError
from ringattn.profile.yaml_io import load_profile, save_profile
from ringattn.store.backends.folder import Folder
from ringattn.store.lease import Lease
from ringattn.store.lookup import stored_profiles
from ringattn.store.store import Store

ROOT = Path(__file__).parents[4]
KIND = "nvidia-h100-sxm-80g"

NODE = """
import os, sys, time
from functools import partial
from pathlib import Path
sys.path.insert(0, "tests/support/ringattn")
from machine_samples import H100, dense_entry, measured
from autotune.cli.probing.once import OncePerKind
from ringattn.profile.yaml_io import save_profile
from ringattn.store.backends.folder import Folder
from ringattn.store.lease import Lease
from ringattn.store.store import Store

shared, own, hang = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] == "hang"

def measure(earlier):
    with (shared.parent / "measured.txt").open("a") as file:
        file.write(f"{os.getpid()}\\n")
    print("measuring", flush=True)
    time.sleep(600 if hang else 0.3)
    save_profile(measured(H100, dense_entry(1024 + os.getpid())), own / "measured.yaml")
    return own / "measured.yaml"

own.mkdir()
print("ready", flush=True)
sys.stdin.readline()
once = OncePerKind(
    Store(Folder(shared)), str(shared), own, H100, 1, lambda note: None,
    lease_of=partial(Lease, term_s=float(sys.argv[4])), sleep=lambda _: time.sleep(0.05),
)
print(once.run(measure, 300.0).name, flush=True)
"""


def node(tmp_path: Path, number: int, how: str = "", term_s: float = 30.0) -> subprocess.Popen[str]:
    """A node in a process of its own, with a cache of its own, that waits for a line to begin."""
    command = [sys.executable, "-c", NODE, str(tmp_path / "shared"), str(tmp_path / f"node{number}"), how, str(term_s)]
    started = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert started.stdout is not None
    assert started.stdout.readline() == "ready\n"
    return started


def begin(started: subprocess.Popen[str]) -> None:
    assert started.stdin is not None
    started.stdin.write("\n")
    started.stdin.flush()


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    (tmp_path / "shared").mkdir()
    return tmp_path / "shared"


def test_of_eight_nodes_at_once_one_measures_and_all_resolve_its_file(shared: Path, tmp_path: Path) -> None:
    nodes = [node(tmp_path, number) for number in range(8)]
    for started in nodes:
        begin(started)
    ended = [started.communicate()[0].split() for started in nodes]
    assert [started.returncode for started in nodes] == [0] * 8
    assert len((tmp_path / "measured.txt").read_text().split()) == 1
    (name,) = Store(Folder(shared)).names()
    assert {words[-1] for words in ended} == {Path(str(name)).name}
    assert sum(words[0] == "measuring" for words in ended) == 1


def test_another_takes_over_from_a_killed_holder(shared: Path, tmp_path: Path) -> None:
    dead, heir = node(tmp_path, 0, "hang", term_s=2.0), node(tmp_path, 1, term_s=2.0)
    begin(dead)
    assert dead.stdout is not None
    assert dead.stdout.readline() == "measuring\n"
    begin(heir)
    os.kill(dead.pid, signal.SIGKILL)
    assert dead.wait() == -signal.SIGKILL
    out, _ = heir.communicate()
    assert heir.returncode == 0
    assert (tmp_path / "measured.txt").read_text().split() == [str(dead.pid), str(heir.pid)]
    (name,) = Store(Folder(shared)).names()
    assert out.split() == ["measuring", Path(str(name)).name]


def once(shared: Path, tmp_path: Path, **changes: Any) -> OncePerKind:
    said: list[str] = []
    made = OncePerKind(Store(Folder(shared)), str(shared), tmp_path / "cache", H100, 1, said.append)
    return replace(made, **changes)


def never(earlier: Path | None) -> Path:
    raise AssertionError("measured")


def measuring(tmp_path: Path, *entries: Any) -> Any:
    def measure(earlier: Path | None) -> Path:
        save_profile(measured(H100, *entries), tmp_path / "measured.yaml")
        return tmp_path / "measured.yaml"

    return measure


def test_what_is_there_is_taken_and_nothing_measured(shared: Path, tmp_path: Path) -> None:
    profile = measured(H100, dense_entry())
    Store(Folder(shared)).push(profile)
    found = once(shared, tmp_path).run(never, None)
    assert found is not None
    assert load_profile(found) == profile
    newer = replace(H100, software=(("torch", "9.9.9"),))
    assert once(shared, tmp_path, facts=newer).run(never, None) == found
    assert Folder(shared).names("leases") == ()


@pytest.mark.parametrize("changes", [{"facts": H100_PCIE}, {"facts": replace(H100, power_limit_w=500)}, {"world": 4}])
def test_other_silicon_and_other_ranks_are_measured(shared: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    Store(Folder(shared)).push(measured(H100, dense_entry()))
    asked = once(shared, tmp_path, **changes)

    def measure(earlier: Path | None) -> Path:
        save_profile(measured(asked.facts, dense_entry(world=asked.world)), tmp_path / "measured.yaml")
        return tmp_path / "measured.yaml"

    found = asked.run(measure, None)
    assert asked.measured
    assert found is not None
    assert load_profile(found) == load_profile(tmp_path / "measured.yaml")
    assert len(Store(Folder(shared)).names()) == 2


def test_a_note_on_the_store_is_said_once_however_often_it_is_asked(shared: Path, tmp_path: Path) -> None:
    """A node that waited said it every two seconds."""
    folder = shared / "profiles" / KIND
    folder.mkdir(parents=True)
    (folder / "by-hand.yaml").touch()
    said: list[str] = []
    asked = once(shared, tmp_path, say=said.append)
    for _ in range(3):
        assert asked.found() is None
    (note,) = said
    assert "by-hand.yaml is passed over" in note


def test_what_another_measured_between_two_looks_is_taken(shared: Path, tmp_path: Path) -> None:
    class Late(Lease):
        def acquire(self) -> bool:
            Store(self._backend).push(measured(H100, dense_entry()))
            return super().acquire()

    asked = once(shared, tmp_path, lease_of=Late)
    assert asked.run(never, None) is not None
    assert not asked.measured
    assert Lease(Folder(shared), f"{KIND}-x1").acquire()  # it was freed


def test_without_waiting_one_goes_on(shared: Path, tmp_path: Path) -> None:
    assert Lease(Folder(shared), f"{KIND}-x1", node="node07").acquire()
    said: list[str] = []
    assert once(shared, tmp_path, say=said.append).run(never, None) is None
    assert said == [f"{shared}: node07 measures {KIND}"]


def test_waiting_ends_with_one_line(shared: Path, tmp_path: Path) -> None:
    assert Lease(Folder(shared), f"{KIND}-x1", node="node07").acquire()
    now = [0.0]

    def sleep(duration_s: float) -> None:
        now[0] += duration_s

    with pytest.raises(ProbeFailure, match=f"no profile of {KIND} after 5 s; the heuristic serves") as raised:
        once(shared, tmp_path, sleep=sleep, clock=lambda: now[0]).run(never, 5.0)
    assert raised.value.exit_code == 4
    assert now[0] == 5.0


def test_a_failed_measurement_frees_the_lease(shared: Path, tmp_path: Path) -> None:
    def fail(earlier: Path | None) -> Path:
        raise ProbeFailure("no numbers")

    with pytest.raises(ProbeFailure, match="no numbers"):
        once(shared, tmp_path).run(fail, None)
    assert once(shared, tmp_path).run(measuring(tmp_path, dense_entry()), None) is not None


def test_what_was_measured_is_not_lost_to_a_failed_request(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Folder, name: str, content: bytes) -> None:
        raise StoreError(self.url, "gone")

    asked = once(shared, tmp_path)
    measure = measuring(tmp_path, dense_entry())
    monkeypatch.setattr(Store, "push", lambda self, *_: fail(self.backend, "", b""))
    with pytest.raises(
        ProbeFailure, match=r"gone; what was measured is in .*measured\.yaml: `ringtune push .*` sends it"
    ):
        asked.run(measure, None)
    assert (tmp_path / "measured.yaml").exists()


def test_a_profile_of_other_versions_is_handed_on_to_be_renewed(shared: Path, tmp_path: Path) -> None:
    old = replace(measured(H100, dense_entry()), software=(("torch", "0.0.1"),))
    Store(Folder(shared)).push(old)
    given: list[Path | None] = []

    def measure(earlier: Path | None) -> Path:
        given.append(earlier)
        return Path(measuring(tmp_path, dense_entry(2048))(earlier))

    holder = Lease(Folder(shared), f"{KIND}-x1")
    assert holder.acquire()
    served = once(shared, tmp_path, exact=True).run(never, None)  # it serves until another node has renewed it
    assert served is not None
    assert load_profile(served) == old
    holder.release()
    found = once(shared, tmp_path, exact=True).run(measure, None)
    assert given == [served]
    assert found is not None
    assert load_profile(found) == measured(H100, dense_entry(2048))
    assert once(shared, tmp_path, exact=True).run(never, None) == found


# --- the command ------------------------------------------------------------------------------------------------


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[ProbeRequest]:
    """The engine writes a profile of this machine at once."""
    made: list[ProbeRequest] = []

    def probe(request: ProbeRequest, observer: ProbeObserver) -> ProbeResult:
        made.append(request)
        path = request.output or tmp_path / "default.yaml"
        profile = profile_of_this_machine(measured_entry())
        save_profile(profile, path)
        return ProbeResult(path, profile, (), 1.0)

    monkeypatch.setattr(autotune.probe.tuning, "run_probe", probe)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    stored_profiles.cache_clear()
    return made


def test_the_command_measures_once_and_both_nodes_print_one_file(
    requests: list[ProbeRequest], shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = ("probe", "--if-missing", "--store", shared, "--device", "cpu", "--json")
    first, second = ringtune(*ask), ringtune(*ask, "--wait", "5")
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    one, other = json.loads(first.stdout), json.loads(second.stdout)
    assert (one["measured"], other["measured"]) == (True, False)
    assert one["profile_path"] == other["profile_path"]
    assert len(requests) == 1
    assert requests[0].output is not None
    assert requests[0].output.is_relative_to(tmp_path / "cache")  # a file at home would hide the store's
    monkeypatch.setenv("RINGTUNE_STORE", str(shared))
    used = ringtune("which", "--path-only", "--device", "cpu")
    assert used.stdout == one["profile_path"] + "\n"
    assert "taken from the store" in ringtune("probe", "--if-missing", "--device", "cpu").stdout


def test_it_tells_the_noise_and_what_became_of_the_cells_as_probe_does(
    requests: list[ProbeRequest], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = (
        CellReport(measured_entry(512).workload, "tuned", noise=0.12),
        CellReport(measured_entry(1024).workload, "inconclusive", note="too busy"),
    )
    engine = autotune.probe.tuning.run_probe

    def probe(request: ProbeRequest, observer: ProbeObserver) -> ProbeResult:
        return replace(engine(request, observer), cells=cells, inconclusive=("S1024: too busy",))

    monkeypatch.setattr(autotune.probe.tuning, "run_probe", probe)
    told = ringtune("probe", "--if-missing", "--store", shared, "--device", "cpu").stderr
    assert "noise of one timing against the default's: 12.0 %" in told.replace("12.0%", "12.0 %")
    assert "inconclusive: S1024: too busy" in told
    assert "this probe, 2 cells: 1 measured now" in told


def test_a_store_that_cannot_be_written_is_told_before_measuring(requests: list[ProbeRequest], tmp_path: Path) -> None:
    line = one_line_error(ringtune("probe", "--store", tmp_path / "absent", "--device", "cpu"), 1)
    assert "no such folder; mount it" in line
    assert requests == []


def test_a_probe_with_a_store_pushes(requests: list[ProbeRequest], shared: Path) -> None:
    assert ringtune("probe", "--store", shared, "--device", "cpu").exit_code == 0
    assert len(Store(Folder(shared)).names()) == 1
    assert len(requests) == 1


def test_winners_of_other_versions_are_verified_and_the_lost_ones_searched(
    requests: list[ProbeRequest], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = profile_of_this_machine(measured_entry(512), measured_entry(1024), measured_entry(2048))
    Store(Folder(shared)).push(replace(old, software=(("torch", "0.0.1"),)))
    verified: list[Path] = []

    def verify(path: Path, request: ProbeRequest, observer: ProbeObserver) -> VerifyResult:
        verified.append(path)
        cells = []
        for entry in old.plans[:2]:
            assert entry.choice is not None
            plan = entry.choice.tunables
            lost = entry.workload.seq_len == 512  # which the engine of the fixture measures anew
            cells.append(VerifiedCell(entry.workload, plan, plan, 0.8, 0.7, 0.9, stale=lost))
        return VerifyResult(("512 lost",), tuple(cells), inconclusive=("2048: too busy",))

    monkeypatch.setattr(autotune.probe.tuning, "verify_profile", verify)
    ask = ("probe", "--if-stale", "--store", shared, "--device", "cpu", "--json")
    first, second = ringtune(*ask), ringtune(*ask)
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    path = json.loads(first.stdout)["profile_path"]
    assert json.loads(second.stdout) == {"profile_path": path, "measured": False, "store": str(shared)}
    assert len(verified) == 1
    assert [[workload.seq_len for workload, _ in request.recorded] for request in requests] == [[512]]
    renewed = load_profile(path)
    rows = {entry.workload: replace(entry, origin=None) for entry in renewed.plans}
    assert rows == {entry.workload: entry for entry in old.plans}
    assert renewed.software == old.software
    assert renewed.provenance.notes == ("1 row of an earlier day verified, 1 searched again, 1 not judged",)
    assert ringtune("probe", "--if-missing", "--store", shared, "--device", "cpu").exit_code == 0
    assert len(verified) == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--wait",), "it goes with --if-missing or --if-stale"),
        (("--if-missing",), "no store is named"),
        (("--if-missing", "--output", "x.yaml", "--store", "s"), "leave --output out"),
        (("--if-missing", "--dry-run", "--store", "s"), "leave --dry-run out"),
        (("--if-missing", "--wait", "x", "--store", "s"), "not a number above 0"),
    ],
)
def test_usage(requests: list[ProbeRequest], arguments: tuple[str, ...], told: str) -> None:
    result = ringtune("probe", *arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert requests == []


def test_ranks_of_torchrun_are_refused(requests: list[ProbeRequest], shared: Path) -> None:
    launched = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    result = ringtune("probe", "--if-missing", "--store", shared, **launched)
    assert result.exit_code == 2
    assert "use --nproc in place of torchrun" in result.stderr


def test_a_store_that_cannot_lease_is_one_line(
    requests: list[ProbeRequest], shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Folder, "lease_refusal", lambda self: "ftp cannot")
    line = one_line_error(ringtune("probe", "--if-missing", "--store", shared, "--device", "cpu"), 1)
    assert "cannot say who measures" in line
    assert requests == []


def test_who_waits_outlives_a_store_that_does_not_answer_for_a_while(shared: Path, tmp_path: Path) -> None:
    Lease(Folder(shared), f"{KIND}-x1", node="other").acquire()
    said: list[str] = []
    looks = 0

    def sleep(_s: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 1:
            shared.rename(tmp_path / "gone")
        elif looks == 4:
            (tmp_path / "gone").rename(shared)
            Store(Folder(shared)).push(measured(H100, dense_entry()))

    found = once(shared, tmp_path, say=said.append, sleep=sleep).run(never, 3600.0)
    assert found is not None
    assert said == [
        f"{shared}: other measures {KIND}",
        f"{shared}: no such folder; mount it, or make it with mkdir -p; asked again until it answers",
    ]


def test_a_store_that_cannot_be_written_from_the_start_is_not_waited_for(
    shared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Folder, name: str, content: bytes) -> bool:
        raise StoreError(self.url, "leases: Permission denied")

    monkeypatch.setattr(Folder, "create", refuse)
    waiting = once(shared, tmp_path, sleep=lambda _: pytest.fail("waited"))
    with pytest.raises(StoreError, match="Permission denied"):
        waiting.run(never, 3600.0)


def test_a_store_that_goes_away_while_a_node_measures_leaves_it_what_it_measured(shared: Path, tmp_path: Path) -> None:
    measure = measuring(tmp_path, dense_entry())

    def then_gone(earlier: Path | None) -> Path:
        found: Path = measure(earlier)
        shared.rename(tmp_path / "gone")
        return found

    with pytest.raises(ProbeFailure, match=r"what was measured is in .*measured\.yaml: `ringtune push .*` sends it"):
        once(shared, tmp_path).run(then_gone, None)
