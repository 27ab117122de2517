"""One probe at a time writes the studies of a database; one that was killed keeps nobody waiting for long."""

from __future__ import annotations

import multiprocessing
import os
import sqlite3
import time
from multiprocessing.synchronize import Barrier
from pathlib import Path

import optuna
import pytest
from machines import environment_of
from optuna.storages import RDBStorage
from optuna.trial import TrialState
from patience import LIMIT_S
from probed_machine import Machine, request_for

from autotune.exit_codes import DeviceBusy, ExitCode, ProbeFailure
from autotune.journal import lease
from autotune.journal.lease import RUNS
from autotune.journal.store import HEADER, Store
from autotune.measure.evaluator import Evaluator
from autotune.measure.simulated import SimulatedClock
from autotune.probe.tuning import run_probe

_context = multiprocessing.get_context("spawn")


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/studies.db"


def states(url: str) -> list[TrialState]:
    return [trial.state for trial in optuna.load_study(study_name=RUNS, storage=url).trials]


def test_two_probes_of_one_request_do_not_share_a_database(tmp_path: Path, url: str) -> None:
    """The second has another profile, machine folder and process; what it is told names the first."""
    path = tmp_path / "one" / "p.yaml"
    refused: list[DeviceBusy] = []
    clock = SimulatedClock()

    def evaluator() -> Evaluator:
        other = Machine(tmp_path / "two")
        with pytest.raises(DeviceBusy) as caught:
            run_probe(request_for(tmp_path / "two" / "p.yaml", storage=url), None, other.environment)
        refused.append(caught.value)
        assert not other.made  # it measured nothing
        raise KeyboardInterrupt  # a whole probe takes a minute where each line of a database waits for the disk

    with pytest.raises(KeyboardInterrupt):
        run_probe(request_for(path, storage=url), None, environment_of(tmp_path / "one", evaluator, clock))
    assert str(refused[0]).startswith(f"--storage {url}: another probe (process {os.getpid()} on ")
    assert refused[0].exit_code == ExitCode.BUSY
    assert states(url) == [TrialState.COMPLETE, TrialState.FAIL]
    third = Machine(tmp_path / "three")  # and after the first anybody may
    third.interrupt_after = 0
    with pytest.raises(KeyboardInterrupt):
        run_probe(request_for(tmp_path / "three" / "p.yaml", storage=url), None, third.environment)


def hold(folder: str, url: str, barrier: Barrier | None, told: multiprocessing.Queue[str]) -> None:
    if barrier is not None:
        barrier.wait()
    try:
        with Store(Path(folder) / f"{os.getpid()}.journal", identity="a", url=url):
            told.put("holds")
            _context.Event().wait(LIMIT_S)
    except DeviceBusy:
        told.put("refused")
    except Exception as error:  # noqa: BLE001  the test shows it, and need not wait
        told.put(f"{type(error).__name__}: {error}")


def test_of_many_that_start_at_once_one_holds_it(tmp_path: Path, url: str) -> None:
    optuna.create_study(study_name="somebody else's", storage=url)  # tables are made once: Optuna's own race
    barrier, told = _context.Barrier(4), _context.Queue()
    processes = [_context.Process(target=hold, args=(str(tmp_path), url, barrier, told)) for _ in range(4)]
    try:
        for process in processes:
            process.start()
        assert sorted(told.get(timeout=LIMIT_S) for _ in processes) == ["holds", "refused", "refused", "refused"]
    finally:
        for process in processes:
            process.kill()
            process.join()


def test_a_killed_holder_is_forgotten_when_its_beats_have_ended(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = _context.Queue()
    holder = _context.Process(target=hold, args=(str(tmp_path), url, None, told))
    holder.start()
    began_s = time.monotonic()
    while told.empty():
        assert holder.is_alive(), f"ended with {holder.exitcode}"
        assert time.monotonic() - began_s < LIMIT_S
        time.sleep(0.05)
    assert told.get() == "holds"
    holder.kill()
    holder.join()
    with pytest.raises(DeviceBusy, match=rf"process {holder.pid} on .* was killed is forgotten after 20 s"):
        Store(tmp_path / "p.journal", identity="a", url=url)
    with sqlite3.connect(tmp_path / "studies.db") as database:  # 21 s later
        database.execute("update trial_heartbeats set heartbeat = datetime(heartbeat, '-21 seconds')")
    database.close()
    with Store(tmp_path / "p.journal", identity="a", url=url) as store:
        assert store.resumed
    assert states(url) == [TrialState.FAIL, TrialState.FAIL, TrialState.COMPLETE]


def test_one_killed_before_its_first_beat_is_waited_for_and_forgotten(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    optuna.create_study(study_name=RUNS, storage=url).ask()
    monkeypatch.setattr(lease, "BEAT_S", 1)
    monkeypatch.setattr(lease, "LAPSE_S", 3)
    with Store(tmp_path / "p.journal", url=url):
        assert states(url) == [TrialState.FAIL, TrialState.RUNNING]


def test_a_holder_that_was_asleep_too_long_writes_no_more(
    tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Store(tmp_path / "p.journal", identity="a", url=url)
    first.remember("a fact", 1)
    taken = optuna.load_study(study_name=RUNS, storage=url)
    taken._storage.set_trial_state_values(taken.trials[0]._trial_id, TrialState.FAIL)  # as who takes it over does
    with Store(tmp_path / "q.journal", identity="a", url=url):
        monkeypatch.setattr(lease, "LAPSE_S", 0)  # its thread has not beaten for longer
        with pytest.raises(ProbeFailure, match="another one has taken over; wait for that, then run the same command"):
            first.remember("another fact", 2)
        first.close()
        assert states(url) == [TrialState.FAIL, TrialState.RUNNING]


def test_it_beats_while_it_is_held(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[int] = []
    ordinary = RDBStorage.record_heartbeat

    def beat(storage: RDBStorage, trial: int) -> None:
        beats.append(trial)
        ordinary(storage, trial)
        if len(beats) == 3:
            thrice.set()

    thrice = multiprocessing.Event()
    monkeypatch.setattr(RDBStorage, "record_heartbeat", beat)
    monkeypatch.setattr(lease, "BEAT_S", 1)
    with Store(tmp_path / "p.journal", url=url):
        assert thrice.wait(LIMIT_S)
    assert len(set(beats)) == 1


def test_every_study_is_made_once(tmp_path: Path, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    ordinary = RDBStorage.create_new_study

    def create(storage: RDBStorage, directions: object, study_name: str) -> int:
        made.append(study_name)
        return ordinary(storage, directions, study_name)  # type: ignore[arg-type]

    monkeypatch.setattr(RDBStorage, "create_new_study", create)
    with Store(tmp_path / "p.journal", url=url):
        assert sorted(made) == [HEADER, RUNS]


def test_a_database_that_breaks_meanwhile_is_one_line(tmp_path: Path, url: str) -> None:
    def lose_a_table() -> None:
        with Store(tmp_path / "p.journal", url=url) as store:
            with sqlite3.connect(tmp_path / "studies.db") as database:
                database.execute("drop table study_user_attributes")
            database.close()
            store.remember("a fact", 1)

    with pytest.raises(ProbeFailure, match=r"studies.db: cannot be used any more \(.*no such table.*\)"):
        lose_a_table()
