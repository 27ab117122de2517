"""The journal: nothing finished is lost, whatever moment the process dies at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import optuna
import pytest
from machines import environment_of, invented, plan, workload
from optuna.trial import TrialState

from autotune.cli.main import exit_code_of
from autotune.exit_codes import DeviceBusy, ExitCode, ProbeFailure
from autotune.journal.file import JournalFile, journal_path
from autotune.journal.stage_record import StageRecord
from autotune.journal.store import Store
from autotune.measure.evaluator import Cause, Checked, Ended, Fault, KernelUnavailable, Killed, PeerFailed, Stopped
from autotune.probe.device_lock import device_lock
from autotune.probe.request import ProbeRequest
from autotune.space.space import build_space, candidate_key

CELL = workload()
SPACE = build_space(CELL, invented(), plan(CELL), ("bf16",))
QUICK, SWIFT, MATH = (plan(CELL, name) for name in ("quick", "swift", "math"))
CHECKED = Checked(5.0, 1e-3, 1000, 7.0, 20.0)
REPO = Path(__file__).resolve().parents[3]
SUPPORT = REPO / "tests" / "support" / "autotune"


def stage_of(store: Store, name: str = "race") -> StageRecord:
    return store.stage(CELL, name, SPACE.knobs)


def finish_one(record: StageRecord) -> None:
    entry = record.open(QUICK)
    record.checked(entry, CHECKED)
    record.begin_block(0, 5.0)
    record.report(entry, 0, 0.1)
    record.begin_block(1, 5.5)
    record.report(entry, 1, 0.2)
    record.complete(entry, 0.15, {"memory": -0.5}, reason="stood to the end")


def test_everything_told_is_found_again(tmp_path: Path) -> None:
    path = tmp_path / "p.journal"
    with Store(path, identity="a") as store:
        record = stage_of(store)
        finish_one(record)
        record.fail(record.open(SWIFT), Fault("crash", "killed by SIGSEGV"))
        half = record.open(MATH)
        record.checked(half, CHECKED)
        record.begin_block(2, 5.0)
        record.report(half, 2, 0.7)
        record.note("standing", [candidate_key(QUICK)])
        store.remember("fact", {"x": 1})
    with Store(path, identity="a") as store:
        assert store.resumed
        assert store.recall("fact") == {"x": 1}
        record = stage_of(store)
        quick, swift, half = (record.find(p) for p in (QUICK, SWIFT, MATH))
        assert quick is not None
        assert (quick.finished, quick.log_ratios, quick.checked) == (True, {0: 0.1, 1: 0.2}, CHECKED)
        assert swift is not None
        assert (swift.finished, swift.fault) == (True, Fault("crash", "killed by SIGSEGV"))
        assert half is not None
        assert (half.finished, half.log_ratios, half.checked) == (False, {2: 0.7}, CHECKED)
        assert record.default_ms == {0: 5.0, 1: 5.5, 2: 5.0}
        assert record.noted("standing") == [candidate_key(QUICK)]
        record.report(half, 3, 0.8)  # it goes on where it was
        record.complete(half, 0.75, {})
    with Store(path, identity="a") as store:
        found = stage_of(store).find(MATH)
        assert found is not None
        assert found.log_ratios == {2: 0.7, 3: 0.8}


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
        stage_of(store).fail(stage_of(store).open(SWIFT), fault)
    with Store(tmp_path / "p.journal", identity="a") as store:
        found = stage_of(store).find(SWIFT)
        assert found is not None
        assert found.fault == fault


def test_a_fault_that_was_recorded_without_a_cause_has_none() -> None:
    assert Fault.of({"kind": "crash", "message": "SIGKILL"}) == Fault("crash", "SIGKILL")
    assert Fault("crash", "SIGKILL").plain() == {"kind": "crash", "message": "SIGKILL"}
    assert not Fault("crash", "the worker was killed by SIGKILL").from_outside


def test_outcomes_are_told_as_the_sampler_must_read_them(tmp_path: Path) -> None:
    """Over a limit: COMPLETE with a positive constraint. No number: PRUNED with one. FAIL only for what is neither."""
    with Store(tmp_path / "p.journal") as store:
        record = stage_of(store)
        entry = record.open(QUICK)
        record.report(entry, 0, 0.3)
        record.complete(entry, 0.3, {"memory": 0.25})
        record.fail(record.open(SWIFT), Fault("oom", "out of memory"))
        record.open(MATH)
        record.abandon_open("no time")
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(tmp_path / "p.journal")))
    study = optuna.load_study(study_name=f"{CELL} | race", storage=storage)
    over, failed, left = study.trials
    assert (over.state, over.value, over.constraints) == (TrialState.COMPLETE, 0.3, {"runs": 0.0, "memory": 0.25})
    assert (failed.state, failed.constraints, failed.user_attrs["kind"]) == (TrialState.PRUNED, {"runs": 1.0}, "oom")
    assert left.state == TrialState.FAIL


def test_a_plan_is_one_trial_of_a_stage(tmp_path: Path) -> None:
    with Store(tmp_path / "p.journal") as store:
        record = stage_of(store)
        assert record.open(QUICK) is record.open(QUICK)
        assert len(record.study.trials) == 1
        params = record.study.trials[0].params
        assert params["forward.0"] == "quick"
        assert set(params) == set(SPACE.knobs)


def test_beside_a_base_only_what_changes_is_written(tmp_path: Path) -> None:
    with Store(tmp_path / "p.journal") as store:
        record = store.stage(CELL, "race", SPACE.knobs, base=QUICK)
        record.open(QUICK)
        record.open(SWIFT)
        assert [trial.params for trial in record.study.trials] == [
            {},
            {f"{side}.{n}": "swift" for n in range(3) for side in ("forward", "backward")},
        ]
    with Store(tmp_path / "p.journal") as store:
        assert {entry.tunables for entry in store.stage(CELL, "race", SPACE.knobs, base=QUICK).entries()} == {
            QUICK,
            SWIFT,
        }


@pytest.mark.parametrize("tail", [b'{"op_code": 5, "wor', b"\x00\x00\x00", b'{"op_code": 9}garbage\n', b"\n{"])
def test_a_half_written_tail_is_cut(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "p.journal"
    with Store(path, identity="a") as store:
        finish_one(stage_of(store))
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    with Store(path, identity="a") as store:
        record = stage_of(store)
        found = record.find(QUICK)
        assert found is not None
        assert found.finished
        assert any("half-written" in note for note in store.notes)
        record.open(SWIFT)  # and the journal can be written again
    with Store(path, identity="a") as store:
        assert stage_of(store).find(SWIFT) is not None


def test_a_journal_cut_at_any_byte_opens_and_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "p.journal"
    with Store(path, identity="a") as store:
        finish_one(stage_of(store))
    whole = path.read_bytes()
    for cut in range(0, len(whole), max(1, len(whole) // 40)):
        path.write_bytes(whole[:cut])
        with Store(path, identity="a") as store:
            finished = stage_of(store).find(QUICK)
            if finished is None or not finished.finished:
                record = stage_of(store)
                entry = record.open(QUICK)
                record.report(entry, 9, 0.1)
                record.complete(entry, 0.1, {})
        with Store(path, identity="a") as store:
            found = stage_of(store).find(QUICK)
            assert found is not None
            assert found.finished


@pytest.mark.parametrize("content", ["my diary\n", "{}\n", "[1]\n", "1\n", '{"op_code": 99, "worker_id": "x"}\n'])
def test_a_file_of_something_else_is_set_aside_whole(tmp_path: Path, content: str) -> None:
    path = tmp_path / "p.journal"
    path.write_text(content)
    with Store(path, identity="a") as store:
        assert not store.resumed
        assert any("p.journal.unreadable" in note for note in store.notes)
        finish_one(stage_of(store))
    assert (tmp_path / "p.journal.unreadable").read_text() == content
    with Store(path, identity="a") as store:
        assert store.resumed


@pytest.mark.parametrize("name", ["p.journal", "p.journal.writer"])
def test_a_pipe_in_the_place_of_the_journal_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(ProbeFailure, match=f"{name}: is not a regular file"):
        Store(tmp_path / "p.journal")


def test_a_full_disk_is_told_with_the_name_of_the_journal(tmp_path: Path) -> None:
    full = JournalFile(Path("/dev/full"))
    with pytest.raises(OSError, match="No space left on device: '/dev/full'") as caught:
        full.append_logs([{"op_code": 0}])
    assert exit_code_of(caught.value) == ExitCode.ERROR


def test_orphaned_locks_of_optuna_cost_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Optuna would wait for an orphan for its grace period of 30 s, asleep most of the time."""
    path = tmp_path / "p.journal"
    with Store(path) as store:
        finish_one(stage_of(store))
    (tmp_path / "p.journal.lock").symlink_to(path)
    (tmp_path / "p.journal.lock1234.rename").touch()
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("somebody waits for a lock"))
    with Store(path) as store:
        stage_of(store).open(SWIFT)
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
        from autotune.probe.device_lock import device_lock
        from autotune.probe.request import ProbeRequest
        from autotune.journal.store import Store
        folder = Path(sys.argv[1])
        store = Store(folder / "p.journal")
        with device_lock(ProbeRequest(), environment_of(folder, None, None, invented())):
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
        with pytest.raises(DeviceBusy, match="another probe is measuring it"), device_lock(ProbeRequest(), environment):
            pass
        holder.kill()
        holder.wait()
    Store(tmp_path / "p.journal").close()
    for _ in range(2):  # and it is free again when its block is left
        with device_lock(ProbeRequest(), environment):
            pass


def test_another_identity_or_fresh_starts_over(tmp_path: Path) -> None:
    path = tmp_path / "p.journal"
    with Store(path, identity="a") as store:
        store.remember("fact", 1)
    with Store(path, identity="b") as store:
        assert not store.resumed
        assert store.recall("fact") is None
        assert any("starting over" in note for note in store.notes)
        store.remember("fact", 2)
    with Store(path, identity="b", fresh=True) as store:
        assert store.recall("fact") is None


def test_the_sampler_is_taught_what_other_stages_know() -> None:
    with Store(None) as store:
        record = store.stage(CELL, "explore", SPACE.knobs, optuna.samplers.TPESampler(seed=0))
        record.learn(QUICK, 0.1, {"memory": -1.0})
        record.learn(SWIFT, None, {})
        record.learn(plan(CELL, dtype="fp32"), 0.5, {})  # of a wider space: cannot be said in these knobs
        assert [trial.state for trial in record.study.trials] == [TrialState.COMPLETE, TrialState.PRUNED]
        trial, assignment = record.ask()
        assert set(assignment) == set(SPACE.knobs)
        record.reject(trial, ("cannot run",))
        assert record.study.trials[-1].constraints == {"runs": 1.0}


def test_the_journal_lies_beside_the_profile_or_in_the_state_folder(tmp_path: Path) -> None:
    profile = tmp_path / "made" / "machine.yaml"
    assert journal_path(profile, {}, tmp_path) == tmp_path / "made" / "machine.yaml.journal"
    # A folder that cannot be made stands for one that cannot be written, which root could.
    (tmp_path / "file").touch()
    elsewhere = journal_path(tmp_path / "file" / "x.yaml", {"XDG_STATE_HOME": str(tmp_path / "state")}, tmp_path)
    assert elsewhere == tmp_path / "state" / "ringtune" / "x.yaml.journal"


WRITER = """
    import sys
    from pathlib import Path
    sys.path[:0] = [{here!r}, {tests!r}, {repo!r}]
    from test_store import CELL, SPACE, CHECKED, stage_of
    from autotune.journal.store import Store
    with Store(Path({path!r}), identity="a") as store:
        record = stage_of(store)
        for number, plan in enumerate(move.tunables for move in SPACE.neighbours(SPACE.default)):
            entry = record.open(plan)
            record.checked(entry, CHECKED)
            record.begin_block(number, 5.0)
            record.report(entry, number, 0.01 * number)
            record.complete(entry, 0.01 * number, {{}})
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
        finished = [entry for entry in stage_of(store).entries() if entry.finished]
        assert {entry.log_ratios[entry.number] for entry in finished} >= {0.01 * number for number in told}


def test_a_long_journal_is_plain_lines_of_json(tmp_path: Path) -> None:
    path = tmp_path / "p.journal"
    with Store(path) as store:
        finish_one(stage_of(store))
    for line in path.read_text().splitlines():
        assert isinstance(json.loads(line), dict)
