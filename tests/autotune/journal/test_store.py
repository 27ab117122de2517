"""The journal: nothing finished is lost, whatever moment the process dies at."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import textwrap
import time
import wsgiref.util
from dataclasses import replace
from pathlib import Path

import optuna
import pytest
from machines import environment_of, invented, plan, workload
from optuna.trial import TrialState, create_trial

from autotune.cli.main import exit_code_of
from autotune.exit_codes import DeviceBusy, ExitCode, ProbeFailure
from autotune.journal.storage.journal_file import JournalFile
from autotune.journal.store import Store
from autotune.journal.study.cell_study import QUEUE, SAMPLER, CellStudy
from autotune.journal.study.entry import Entry, PairedBlock
from autotune.journal.study.parameters import Parameters
from autotune.measure.evaluator import (
    Cause,
    Checked,
    Ended,
    Fault,
    KernelUnavailable,
    Killed,
    PeerFailed,
    Proven,
    Sample,
    Stopped,
)
from autotune.probe.machine.device_lock import device_lock
from autotune.probe.request import ProbeRequest
from autotune.space.space import build_space
from ringattn.workload import Tunables

CELL = workload()
SPACE = build_space(CELL, invented(), plan(CELL), ("bf16",))
QUICK, SWIFT, MATH = (plan(CELL, name) for name in ("quick", "swift", "math"))
CHECKED = Checked(5.0, 1e-3, 1000, 7.0, 20.0)
REPO = Path(__file__).resolve().parents[3]
SUPPORT = REPO / "tests" / "support" / "autotune"


def study_of(store: Store) -> CellStudy:
    return CellStudy(store.study(CELL), CELL, SPACE.knobs, store.sync)


def tell(study: CellStudy, entry: Entry, number: int, ratio: float) -> PairedBlock:
    """A block with a reading of one plan."""
    block = PairedBlock(entry.tunables, {entry.tunables: (Sample(5.0, 20.0), Sample(5.5, 21.0))})
    study.block(number, block)
    study.reading(entry, number, ratio)
    return block


def finish_one(study: CellStudy, tunables: Tunables = QUICK) -> None:
    """One plan with two readings, told."""
    entry = Entry(tunables, CHECKED)
    study.open(entry, SAMPLER)
    study.checked(entry)
    for number, ratio in ((1, 0.1), (2, 0.2)):
        tell(study, entry, number, ratio)
    study.complete(entry, 0.15, {"memory": -0.5}, "stood to the end")


def test_everything_told_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "p.journal"
    with Store(path, identity="a") as store:
        study = study_of(store)
        finish_one(study)
        study.failed(Entry(SWIFT), Fault("crash", "killed by SIGSEGV"))
        half = Entry(MATH, CHECKED)
        study.checked(half)
        told = tell(study, half, 3, 0.7)
        half.validated = Proven(8.0)
        study.validated(half)
        study.note("fact of the cell", [1])
        store.remember("fact", {"x": 1})
    with Store(path, identity="a") as store:
        assert store.resumed
        assert store.recall("fact", tuple[tuple[str, int], ...]) == (("x", 1),)
        study = study_of(store)
        quick, swift, half = (study.recalled[p] for p in (QUICK, SWIFT, MATH))
        assert (quick.open, quick.checked) == (False, CHECKED)
        assert (swift.open, swift.fault) == (False, Fault("crash", "killed by SIGSEGV"))
        assert (half.open, half.validated) == (True, Proven(8.0))
        assert list(study.blocks) == [1, 2, 3]
        assert study.blocks[3] == told
        assert study.study.user_attrs["fact of the cell"] == [1]
        tell(study, half, 4, 0.8)  # it goes on where it was
        study.complete(half, 0.75, {}, "")
    with Store(path, identity="a") as store:
        study = study_of(store)
        assert [n for n, block in study.blocks.items() if MATH in block.samples] == [3, 4]
        assert study.study.trials[study.number_of(MATH)].intermediate_values == {3: 0.7, 4: 0.8}


def test_a_plan_that_is_timed_again_has_a_second_trial_for_the_further_readings(tmp_path: Path) -> None:
    with Store(tmp_path / "p.journal") as store:
        study = study_of(store)
        finish_one(study)
        entry = Entry(QUICK, CHECKED)
        tell(study, entry, 3, 0.3)
        study.complete(entry, 0.2, {}, "final")
        assert [trial.intermediate_values for trial in study.study.trials] == [{1: 0.1, 2: 0.2}, {3: 0.3}]
        assert study.study.trials[1].user_attrs["repeats"] == 0
    with Store(tmp_path / "p.journal") as store:
        assert [n for n, block in study_of(store).blocks.items() if QUICK in block.samples] == [1, 2, 3]


CAUSES: dict[str, Cause] = {
    "killed": Killed(9),
    "held": Stopped(),
    "ended": Ended(),
    "kernel-unavailable": KernelUnavailable("lost", "import lost: no"),
    "peer-failed": PeerFailed(),
}


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_outlives_the_process_under_a_name_of_its_own(tmp_path: Path, name: str) -> None:
    fault = Fault("crash", "ended", CAUSES[name])
    assert fault.plain()["cause"]["is"] == name
    assert Fault.of(json.loads(json.dumps(fault.plain()))) == fault
    with Store(tmp_path / "p.journal", identity="a") as store:
        study_of(store).failed(Entry(SWIFT), fault)
    with Store(tmp_path / "p.journal", identity="a") as store:
        assert study_of(store).recalled[SWIFT].fault == fault


def test_a_fault_that_was_recorded_without_a_cause_has_none() -> None:
    assert Fault.of({"kind": "crash", "message": "SIGKILL"}) == Fault("crash", "SIGKILL")
    assert Fault("crash", "SIGKILL").plain() == {"kind": "crash", "message": "SIGKILL"}
    assert not Fault("crash", "the worker was killed by SIGKILL").from_outside


def test_outcomes_are_told_in_fields_that_plain_optuna_reads(tmp_path: Path) -> None:
    """Over a limit: COMPLETE with a positive constraint. No number: PRUNED with one. FAIL only for what is neither."""
    with Store(tmp_path / "p.journal") as store:
        study = study_of(store)
        over = Entry(QUICK, CHECKED)
        study.checked(over)
        tell(study, over, 1, 0.3)
        study.complete(over, 0.3, {"memory": 0.25}, "breaks a limit")
        study.failed(Entry(SWIFT), Fault("oom", "out of memory"))
        left = Entry(MATH)
        study.open(left, QUEUE)
        study.abandon(left, "no time")
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "p.journal")))
    found = optuna.load_study(study_name=str(CELL), storage=storage)
    over_, failed, left_ = found.trials
    assert (over_.state, over_.value, over_.constraints) == (TrialState.COMPLETE, 0.3, {"runs": 0.0, "memory": 0.25})
    assert over_.params["forward.0"] == "quick"
    assert over_.intermediate_values == {1: 0.3}
    assert (failed.state, failed.constraints, failed.user_attrs["kind"]) == (TrialState.PRUNED, {"runs": 1.0}, "oom")
    assert left_.state == TrialState.FAIL


def test_every_plan_of_a_space_is_its_parameters() -> None:
    parameters = Parameters(CELL, SPACE.knobs)
    for move in SPACE.neighbours(SPACE.default):
        params = parameters.of(move.tunables)
        assert parameters.plan(params) == move.tunables
        assert ("pool_strategy" in params) == (move.tunables.pool_threshold_mib is not None)
        assert all(value in parameters.distributions[name].choices for name, value in params.items())  # type: ignore[attr-defined]


def test_a_study_of_two_thousand_trials_opens_in_few_lines(tmp_path: Path) -> None:
    """A line takes 35 us to read back: ten for each trial are 0.7 s."""
    with Store(tmp_path / "p.journal") as store:
        study = study_of(store)
        for number in range(20):
            finish_one(study, replace(QUICK, checkpoint=("full", "offload")[number % 2]))
    lines = (tmp_path / "p.journal").read_bytes().count(b"\n")
    assert lines <= 20 * 14 + 60


def test_the_dashboard_serves_the_journal(tmp_path: Path) -> None:
    dashboard = pytest.importorskip("optuna_dashboard")
    with Store(tmp_path / "p.journal") as store:
        finish_one(study_of(store))
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "p.journal")))
    answers: list[str] = []

    def page(path: str) -> bytes:
        environ: dict[str, object] = {}
        wsgiref.util.setup_testing_defaults(environ)
        environ |= {"PATH_INFO": path, "REQUEST_METHOD": "GET"}
        return b"".join(dashboard.wsgi(storage)(environ, lambda status, headers, *_: answers.append(status)))

    studies = json.loads(page("/api/studies"))["study_summaries"]
    assert str(CELL) in {study["study_name"] for study in studies}
    number = next(study["study_id"] for study in studies if study["study_name"] == str(CELL))
    trials = json.loads(page(f"/api/studies/{number}"))["trials"]
    assert [trial["values"] for trial in trials] == [[0.15]]
    assert page("/dashboard/").startswith(b"<!DOCTYPE html>")
    assert {answer[:3] for answer in answers} == {"200"}


def test_another_storage_is_opened_by_its_url_and_one_that_cannot_be_says_so(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/studies.db"
    with Store(tmp_path / "p.journal", identity="a", url=url) as store:
        finish_one(study_of(store))
    assert str(CELL) in optuna.get_all_study_names(url)
    with Store(tmp_path / "p.journal", identity="a", url=url) as store:
        assert store.resumed
        assert list(study_of(store).blocks) == [1, 2]
    optuna.create_study(study_name="somebody else's", storage=url)
    with pytest.raises(ProbeFailure, match="holds the studies of another machine, software or request; name another"):
        Store(tmp_path / "p.journal", identity="b", url=url)
    assert str(CELL) in optuna.get_all_study_names(url)
    with Store(tmp_path / "p.journal", identity="b", url=url, fresh=True) as store:
        assert study_of(store).recalled == {}
    assert "somebody else's" in optuna.get_all_study_names(url)
    with pytest.raises(ProbeFailure, match="--storage nonsense: names no storage"):
        Store(tmp_path / "q.journal", url="nonsense")
    with pytest.raises(ProbeFailure) as failure:
        Store(tmp_path / "q.journal", url="nosuch://me:secret@host/studies")
    assert "secret" not in str(failure.value)
    assert "nosuch://me:***@host/studies" in str(failure.value)


@pytest.mark.parametrize("broken", ["foreign tables", "read only"])
def test_a_storage_that_cannot_be_written_says_so(tmp_path: Path, broken: str) -> None:
    file = tmp_path / "studies.db"
    with sqlite3.connect(file) as database:
        database.execute("create table studies (colour text)")
    database.close()
    url = f"sqlite:///{file}" if broken == "foreign tables" else f"sqlite:///file:{file}?mode=ro&uri=true"
    with pytest.raises(ProbeFailure, match="cannot be opened"):
        Store(tmp_path / "p.journal", url=url)


@pytest.mark.parametrize("tail", [b'{"op_code": 5, "wor', b"\x00\x00\x00", b'{"op_code": 9}garbage\n', b"\n{"])
def test_a_half_written_tail_is_cut(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "p.journal"
    with Store(path, identity="a") as store:
        finish_one(study_of(store))
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with Store(path, identity="a") as store:
        study = study_of(store)
        assert not study.recalled[QUICK].open
        assert any("half-written" in note for note in store.notes)
        study.open(Entry(SWIFT), QUEUE)  # and the journal can be written again
    with Store(path, identity="a") as store:
        assert study_of(store).recalled[SWIFT].open


def test_a_journal_cut_at_any_byte_opens_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "p.journal"
    with Store(path, identity="a") as store:
        finish_one(study_of(store))
    whole = path.read_bytes()
    for cut in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:cut])
        with Store(path, identity="a") as store:
            study = study_of(store)
            found = study.recalled.get(QUICK)
            if found is None or found.open:
                entry = found or Entry(QUICK)
                if entry.checked is None:
                    entry.checked = CHECKED
                    study.checked(entry)
                tell(study, entry, 9, 0.1)
                study.complete(entry, 0.1, {}, "")
        with Store(path, identity="a") as store:
            assert not study_of(store).recalled[QUICK].open


@pytest.mark.parametrize("content", ["my diary\n", "{}\n", "[1]\n", "1\n", '{"op_code": 99, "worker_id": "x"}\n'])
def test_a_file_of_something_else_is_set_aside_whole(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.journal"
    path.write_text(content)
    with Store(path, identity="a") as store:
        assert not store.resumed
        assert any("p.journal.unreadable" in note for note in store.notes)
        finish_one(study_of(store))
    assert (tmp_path / "p.journal.unreadable").read_text() == content
    with Store(path, identity="a") as store:
        assert store.resumed


@pytest.mark.parametrize("name", ["p.journal", "p.journal.writer"])
def test_a_pipe_in_the_place_of_the_journal_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ProbeFailure, match=f"{name}: is not a regular file"):
        Store(tmp_path / "p.journal")


def test_a_writer_s_file_of_something_else_keeps_nobody_out(tmp_path: Path) -> None:
    (tmp_path / "p.journal.writer").write_bytes(b"\x82\xff" * 1000)
    with Store(tmp_path / "p.journal", identity="a") as store:
        finish_one(study_of(store))
    with Store(tmp_path / "p.journal", identity="a") as store:
        assert store.resumed
        assert not store.notes


def test_a_full_disk_is_told_with_the_name_of_the_journal(tmp_path: Path) -> None:
    full = JournalFile(Path("/dev/full"))
    told = "/dev/full: cannot be written .No space left on device.; finished trials are kept: make room, then run the"
    with pytest.raises(ProbeFailure, match=told) as caught:
        full.append_logs([{"op_code": 0}])
    assert exit_code_of(caught.value) == ExitCode.ERROR


def test_orphaned_locks_of_optuna_cost_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna would wait for an orphan for its grace period of 30 s, asleep most of the time."""
    path = tmp_path / "p.journal"
    with Store(path) as store:
        finish_one(study_of(store))
    (tmp_path / "p.journal.lock").symlink_to(path)
    (tmp_path / "p.journal.lock1234.rename").touch()
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("somebody waits for a lock"))
    with Store(path) as store:
        study_of(store).open(Entry(SWIFT), QUEUE)
    assert not list(tmp_path.glob("*.rename"))


def test_one_writer_at_a_time_and_the_second_is_told_who(tmp_path: Path) -> None:
    path = tmp_path / "p.journal"
    with Store(path):
        for _ in range(2):  # one that is turned away must not wipe out whom the next is to hear of
            with pytest.raises(DeviceBusy, match=f"process {os.getpid()}") as caught:
                Store(path)
            assert caught.value.exit_code == ExitCode.BUSY
    Store(path).close()


def test_a_killed_holder_keeps_nobody_waiting(tmp_path: Path) -> None:
    """Neither of the journal nor of the device: the kernel drops both locks with the process."""
    script = textwrap.dedent(
        """
        import sys, time
        from pathlib import Path
        from machines import environment_of, invented
        from autotune.probe.machine.device_lock import device_lock
        from autotune.probe.request import ProbeRequest
        from autotune.journal.store import Store
        folder = Path(sys.argv[1])
        store = Store(folder / "p.journal")
        with device_lock(ProbeRequest(), environment_of(folder, None, None, invented()), print):
            print("holds", flush=True)
            time.sleep(600)
        """
    )
    environ = os.environ | {"PYTHONPATH": os.pathsep.join((str(SUPPORT), *sys.path))}
    environment = environment_of(tmp_path, None, None, invented())  # type: ignore[arg-type]
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environ
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "holds\n"
        with pytest.raises(DeviceBusy, match=f"process {holder.pid}"):
            Store(tmp_path / "p.journal")
        held = pytest.raises(DeviceBusy, match=f"measuring it .process {holder.pid} on ")
        with held, device_lock(ProbeRequest(), environment, print):
            pass
        holder.kill()
        holder.wait()
    Store(tmp_path / "p.journal").close()
    for _ in range(2):  # and it is free again when its block is left
        with device_lock(ProbeRequest(), environment, print):
            pass


def test_another_identity_or_fresh_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "p.journal"
    with Store(path, identity="a") as store:
        store.remember("fact", 1)
    with Store(path, identity="b") as store:
        assert not store.resumed
        assert store.recall("fact", int) is None
        assert any("rows of a profile are not" in note for note in store.notes)
        store.remember("fact", 2)
    with Store(path, identity="b", fresh=True) as store:
        assert store.recall("fact", int) is None


WRITER = """
    import sys
    from pathlib import Path
    sys.path[:0] = [{here!r}, {tests!r}, {repo!r}]
    from test_store import CELL, SPACE, CHECKED, study_of, tell
    from autotune.journal.study.entry import Entry
    from autotune.journal.store import Store
    with Store(Path({path!r}), identity="a") as store:
        study = study_of(store)
        for number, plan in enumerate(move.tunables for move in SPACE.neighbours(SPACE.default)):
            entry = Entry(plan, CHECKED)
            study.checked(entry)
            tell(study, entry, number + 1, 0.01 * number)
            study.complete(entry, 0.01 * number, {{}}, "")
            print(number, flush=True)
"""


@pytest.mark.parametrize("after", [0, 3, 7])
def test_a_killed_writer_loses_no_finished_trial(tmp_path: Path, after: int) -> None:
    path = tmp_path / "p.journal"
    code = textwrap.dedent(WRITER).format(
        here=str(Path(__file__).parent), tests=str(SUPPORT), repo=str(REPO), path=str(path)
    )
    writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    told = [int(writer.stdout.readline()) for _ in range(after + 1)]
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    with Store(path, identity="a") as store:
        study = study_of(store)
        finished = [trial for trial in study.study.trials if trial.state.is_finished()]
        ratios = {ratio for trial in finished for ratio in trial.intermediate_values.values()}
        assert ratios >= {0.01 * number for number in told}
        assert study.blocks.keys() >= {number + 1 for number in told}


def test_a_trial_that_was_left_waiting_is_given_to_no_other_plan(tmp_path: Path) -> None:
    """A run that is killed between adding a trial and asking for it leaves one; so does ``enqueue_trial``."""
    path = tmp_path / "p.journal"
    with Store(path, identity="a") as store:
        study = study_of(store)
        finish_one(study)
        params = study.parameters.of(SWIFT)
        study.study.enqueue_trial(params)
        study.study.add_trial(
            create_trial(
                state=TrialState.WAITING,
                params=params,
                distributions={name: study.parameters.distributions[name] for name in params},
                system_attrs={"fixed_params": params},
                user_attrs={"plan": "left", "proposed_by": "sampler"},
            )
        )
    with Store(path, identity="a") as store:
        study = study_of(store)
        assert SWIFT not in study.recalled
        study.study.enqueue_trial(params)  # by somebody, while the probe runs
        study.open(Entry(MATH), SAMPLER)
        assert study.parameters.plan(study.study.get_trials()[study.number_of(MATH)].params) == MATH
    with Store(path, identity="a") as store:
        assert set(study_of(store).recalled) == {QUICK, MATH}


def test_a_storage_that_cannot_be_opened_leaves_no_file_behind(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml.journal"
    with pytest.raises(ProbeFailure, match=r"the folder of .* does not exist"):
        Store(path, url=f"sqlite:///{tmp_path}/no such folder/s.db")
    assert list(tmp_path.iterdir()) == []


def test_a_failure_leaves_the_lock_of_an_earlier_probe(tmp_path: Path) -> None:
    path = tmp_path / "p.yaml.journal"
    Store(path).close()
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ProbeFailure, match=r"the folder of .* does not exist"):
        Store(path, url=f"sqlite:///{tmp_path}/no such folder/s.db")
    assert sorted(tmp_path.iterdir()) == before


def test_workers_of_one_storage_have_a_profile_together_and_no_other_probe_has_it(tmp_path: Path) -> None:
    """Of eight GPUs of a host each has its worker, and all have one --output."""
    profile, shared = tmp_path / "p.yaml.journal", f"{tmp_path}/s.journal"
    with Store(profile, identity="a", url=shared), Store(profile, identity="a", url=shared):
        for journal in (profile, Path(shared)):
            with pytest.raises(DeviceBusy, match=r"another probe .* is writing it"):
                Store(journal)
    with Store(profile), pytest.raises(DeviceBusy, match=r"another probe .* is writing it"):
        Store(profile, identity="a", url=shared)
    with Store(Path(shared)), pytest.raises(DeviceBusy, match=r"another probe .* is writing it"):
        Store(profile, identity="a", url=shared)
