"""Workers of one search: of many one holds a part, and one that was killed keeps nobody waiting for long."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path

import optuna
import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState
from patience import LIMIT_S

from autotune.exit_codes import DeviceBusy, ExitCode, ProbeFailure
from autotune.journal.sharing import lease, process_identity
from autotune.journal.sharing.lease import RUNS, WHOLE, Worker
from autotune.journal.storage.storages import close_storage, open_storage
from autotune.journal.store import HEADER, Store
from ringattn.workload import Workload

CELL = Workload("infer", True, 1024, 4, 64, "fp32")
_context = multiprocessing.get_context("spawn")


@pytest.fixture(params=["database", "journal"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/studies.db" if request.param == "database" else f"{tmp_path}/studies.journal"


@pytest.fixture
def storage(place: str) -> Iterator[BaseStorage]:
    opened = open_storage(place)
    yield opened
    close_storage(opened)


def worker(storage: BaseStorage, *, fresh: bool = False) -> Worker:
    joined = Worker(storage, "--storage x", alone=False)
    joined.open(fresh=fresh)
    return joined


def states(place: str) -> list[TrialState]:
    return [trial.state for trial in optuna.load_study(study_name=RUNS, storage=open_storage(place)).trials]


def test_a_part_is_one_worker_s_until_it_is_freed(storage: BaseStorage) -> None:
    one, two = worker(storage), worker(storage)
    assert one.take("a")
    assert not two.take("a")
    assert two.take("b")
    assert not one.take("b")
    one.free("a")
    assert one.untouched("a")
    assert two.take("a")
    two.free("a")
    assert not one.untouched("a")
    assert one.take("a")
    one.free("a")
    with two.held("a", reads=True):
        assert not one.take("a")
    assert one.untouched("a")
    for each in (one, two):
        each.leave()


def test_the_whole_overlaps_every_part(storage: BaseStorage) -> None:
    one, two = worker(storage), worker(storage)
    assert one.take("a")
    assert not two.take(WHOLE)
    one.free("a")
    assert two.take(WHOLE)
    assert not one.take("b")
    two.free(WHOLE)
    assert one.take("b")
    for each in (one, two):
        each.leave()


def hold(place: str, barrier: Barrier | None, told: multiprocessing.Queue[str], skew_s: float = 0.0) -> None:
    if skew_s:
        lease.BEAT_S = 0.05
        monotonic, clock = time.monotonic, time.time
        time.monotonic, time.time = lambda: monotonic() + skew_s, lambda: clock() - skew_s
        process_identity.pid_scope = lambda: ("another host", "")
    opened = open_storage(place)
    joined = worker(opened)
    if barrier is not None:
        barrier.wait()
    told.put("holds" if joined.take("a") else "refused")
    _context.Event().wait(LIMIT_S)


def test_of_many_that_ask_at_once_one_gets_it(place: str, storage: BaseStorage) -> None:
    barrier, told = _context.Barrier(4), _context.Queue()
    processes = [_context.Process(target=hold, args=(place, barrier, told)) for _ in range(4)]
    try:
        for process in processes:
            process.start()
        answers = [told.get(timeout=LIMIT_S) for _ in processes]
        assert answers.count("holds") == 1, answers
    finally:
        for process in processes:
            process.kill()
            process.join()


def killed_holder(place: str) -> None:
    told = _context.Queue()
    holder = _context.Process(target=hold, args=(place, None, told))
    holder.start()
    assert told.get(timeout=LIMIT_S) == "holds"
    holder.kill()
    holder.join()


def test_a_killed_process_of_this_host_is_not_waited_for(
    place: str, storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_holder(place)
    monkeypatch.setattr(lease, "LAPSE_S", 1e9)
    successor = worker(storage)
    assert successor.others() == []
    assert successor.take("a")
    successor.leave()
    assert states(place) == [TrialState.FAIL, TrialState.FAIL, TrialState.COMPLETE, TrialState.COMPLETE]


def test_one_of_another_host_lapses_when_its_beats_have_ended(
    place: str, storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_holder(place)
    monkeypatch.setattr(process_identity, "pid_scope", lambda: ("another host", ""))
    now_s = time.monotonic()
    successor = worker(storage)
    assert not successor.take("a")
    monkeypatch.setattr(time, "monotonic", lambda: now_s + 2 * lease.LAPSE_S)
    assert successor.take("a")
    successor.leave()


def test_one_that_beats_is_never_taken_for_dead(storage: BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_S", 0.05)
    holder, other = worker(storage), worker(storage)
    assert holder.take("a")
    assert not other.take("a")
    seen = {number: beats for number, (beats, _) in other._seen.items()}
    began_s = time.monotonic()
    while {number: beats for number, (beats, _) in other._seen.items()} == seen:
        assert not other.take("a")
        assert time.monotonic() - began_s < LIMIT_S
    for each in (holder, other):
        each.leave()


def test_clocks_of_hosts_need_not_agree(place: str, storage: BaseStorage) -> None:
    told = _context.Queue()
    holder = _context.Process(target=hold, args=(place, None, told, 1e6))
    holder.start()
    try:
        assert told.get(timeout=LIMIT_S) == "holds"
        other, began_s, seen = worker(storage), time.monotonic(), set()
        while len(seen) < 4:
            assert not other.take("a")
            seen |= {beats for beats, _ in other._seen.values()}
            assert time.monotonic() - began_s < LIMIT_S
    finally:
        holder.kill()
        holder.join()
    other.leave()


@pytest.mark.parametrize("scope", [None, ["another host", ""]])
def test_a_pid_says_nothing_of_a_process_that_is_no_neighbour(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch, scope: list[str] | None
) -> None:
    """In a container the same number is another process."""
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(
            process_identity,
            "this_process",
            lambda: {"process": "x", "pid": 2**22 + 1, "started": "1", "scope": scope},
        )
        holder = worker(storage)
        assert holder.take("a")
    assert not worker(storage).take("a")


def test_a_number_that_another_process_has_by_now_is_not_the_holder(
    storage: BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as earlier:
        ours = process_identity.this_process()
        earlier.setattr(process_identity, "this_process", lambda: {**ours, "started": "1"})
        assert worker(storage).take("a")
    assert worker(storage).take("a")


def test_who_was_taken_for_dead_writes_no_more(tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = Store(None, identity="a", url=place)
    first.remember("a fact", 1)
    with Store(None, identity="a", url=place) as second:
        second.worker._end([first.worker._id])  # as who takes it over does
        monkeypatch.setattr(lease, "_DOUBT_S", 0)  # its thread has not beaten for longer
        with pytest.raises(ProbeFailure, match="another one has taken over; run the same command to join it"):
            first.remember("another fact", 2)
        first.close()


def test_who_was_taken_for_dead_writes_no_trial_of_its_successor(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It wakes up in the middle of a cell, which another has by then: before it writes, and not at the next sync."""
    first = Store(None, identity="a", url=place)
    study = first.study(CELL)
    trial = study.ask()
    with Store(None, identity="a", url=place) as second:
        second.worker._end([first.worker._id])
        monkeypatch.setattr(lease, "_DOUBT_S", 0)
        for write in (lambda: study.tell(trial, 1.0), lambda: study.set_user_attr("result", 1), study.ask):
            with pytest.raises(ProbeFailure, match="another one has taken over"):
                write()
        (kept,) = second.study(CELL).trials
        assert kept.state == TrialState.RUNNING
        assert not second.study(CELL).user_attrs
        first.close()


def test_a_trial_that_another_ended_is_one_line(place: str) -> None:
    def tell(store: Store) -> None:
        with store:
            study = store.study(CELL)
            trial = study.ask()
            optuna.load_study(study_name=str(CELL), storage=open_storage(place)).tell(trial.number, 1.0)
            study.tell(trial, 2.0)

    opened = Store(None, identity="a", url=place)
    with pytest.raises(ProbeFailure, match="another process has ended a trial of this one; run the same") as caught:
        tell(opened)
    assert "\n" not in str(caught.value)


def test_who_was_taken_for_dead_takes_no_lease(storage: BaseStorage) -> None:
    """Its trial is over, so that everybody would end its leases, and nobody else would know of them."""
    slow, other = worker(storage), worker(storage)
    other._end([slow._id])  # as who takes it over does
    with pytest.raises(ProbeFailure, match="another one has taken over"):
        slow.take("a")
    assert other.take("a")
    for each in (slow, other):
        each.leave()


# --- the search ------------------------------------------------------------------------------------------------------


def test_workers_that_overlap_in_time_are_one_run(storage: BaseStorage) -> None:
    one, two = worker(storage), worker(storage)
    one.leave()
    three = worker(storage)
    assert one.run == two.run == three.run
    two.leave()
    three.leave()
    four = worker(storage)
    assert four.run != one.run
    four.leave()


def test_facts_of_dead_workers_stay(storage: BaseStorage) -> None:
    one, two = worker(storage), worker(storage)
    one.note("used_s", 3.0)
    one.leave()
    two.note("used_s", 4.0)
    assert two.noted("used_s") == [3.0, 4.0]
    assert two.noted("used_s", own=False) == [3.0]
    two.leave()


def test_another_request_is_refused_in_one_line(tmp_path: Path, place: str) -> None:
    with Store(None, identity="a", url=place) as first:
        with pytest.raises(ProbeFailure, match="holds the studies of another machine, software or request") as caught:
            Store(None, identity="b", url=place)
        assert "\n" not in str(caught.value)
        first.remember("a fact", 1)
    with Store(None, identity="a", url=place) as again:
        assert again.recall("a fact", int) == 1


def test_fresh_deletes_nothing_that_another_works_on(place: str) -> None:
    with Store(None, identity="a", url=place) as first:
        first.remember("a fact", 1)
        with pytest.raises(DeviceBusy, match=rf"process {os.getpid()} on .* leave --fresh out to join it") as caught:
            Store(None, identity="a", url=place, fresh=True)
        assert caught.value.exit_code == ExitCode.BUSY
        assert first.recall("a fact", int) == 1
    with Store(None, identity="a", url=place, fresh=True) as second:
        assert second.recall("a fact", int) is None
        second.remember("a fact", 2)
        with Store(None, identity="a", url=place, fresh=True) as beside:  # begun anew together
            assert beside.recall("a fact", int) == 2


def test_a_finished_search_is_taken_or_done_again(place: str) -> None:
    with Store(None, identity="a", url=place) as first:
        first.remember("finished", True)
    with Store(None, identity="a", url=place, again=lambda store: False) as taken:
        assert taken.resumed
        with Store(None, identity="a", url=place) as beside:  # never under the hands of another
            assert beside.resumed
    with Store(None, identity="a", url=place) as anew:
        assert not anew.resumed
        assert anew.recall("finished", bool) is None


def test_a_search_is_forgotten_whole_also_where_the_forgetting_was_killed(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(None, identity="a", url=place) as first:
        first.study(CELL).ask()
    with monkeypatch.context() as killed:
        delete, deleted = optuna.delete_study, []

        def once(study_name: str, storage: BaseStorage) -> None:
            if deleted:
                raise KeyboardInterrupt
            deleted.append(study_name)
            delete(study_name=study_name, storage=storage)

        killed.setattr(optuna, "delete_study", once)
        with pytest.raises(KeyboardInterrupt):
            Store(None, identity="a", url=place, fresh=True)
    with Store(None, identity="a", url=place, fresh=True) as anew:
        assert not anew.resumed
        assert not anew.study(CELL).trials


def test_every_study_of_a_search_is_made_once(place: str) -> None:
    with Store(None, url=place), Store(None, url=place):
        assert sorted(optuna.get_all_study_names(open_storage(place))) == [HEADER, RUNS]
