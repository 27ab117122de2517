"""Workers of one search and their leases: each part of it is one worker's at a time, also on several hosts.

A worker is a running trial of the study ``probe runs`` whose attribute ``beats`` grows while its process lives. A lease
is a running trial, too, which names its worker and the part. A storage gives numbers of trials out one at a time: of
the leases that exclude each other the one with the lowest number holds. That works in every storage of Optuna;
heartbeats are of databases alone, and not passed on by the gRPC proxy.

Clocks of hosts are never compared. A worker is dead when, by the clock of who looks, its beats have not changed for
LAPSE_S, or at once where it ran beside this one and its process has ended. Who finds it ends its trials.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import optuna
from optuna.exceptions import UpdateFinishedTrialError
from optuna.storages import BaseStorage
from optuna.trial import FrozenTrial, TrialState, create_trial

from autotune.exit_codes import DeviceBusy, ProbeFailure
from autotune.journal.storage.storages import storage_errors

from . import process_identity
from .process_identity import PID, PROCESS

RUNS = "probe runs"
WHOLE = "the whole search"  # a part that overlaps every other
BEAT_S = 5.0
# As a lease in a store. After 20 s two of four workers on two busy cores, at a load of 28, took each other for dead.
LAPSE_S = 60.0
_DOUBT_S = LAPSE_S / 2  # without a beat, after which a worker looks whether it was taken for dead
POLL_S = 0.2
# Attributes of a worker's trial, beside its process: its signs of life, and what it has since it opened the search; and
# of a lease's trial.
_BEATS, _RUN, _FRESH = "beats", "run", "fresh"
_PART, _WORKER, _READS = "part", "worker", "reads"


class Worker:
    """This process among the workers of a search, until ``leave`` or its end; ``shown`` names the storage."""

    def __init__(self, storage: BaseStorage, shown: str, *, alone: bool) -> None:
        """Join. ``alone`` says that no other process can write this storage, so that what runs in it is left over."""
        self._storage, self._shown, self._alone = storage, shown, alone
        study = optuna.create_study(study_name=RUNS, storage=storage, load_if_exists=True)
        self._study_id = study._study_id
        self._lost = False
        self._left = threading.Event()
        self._began_s = self._last_beat_s = time.monotonic()
        self._seen: dict[int, tuple[object, float]] = {}  # of other workers: their beats, and since when
        self._held: dict[str, int] = {}  # trials of the leases
        self._last: dict[str, int] = {}  # number of the last lease on each part
        self._id, self.number = self._begin({**process_identity.this_process(), _BEATS: 0})
        self.run = self.number  # of the first worker of those that overlap in time
        self._thread = threading.Thread(target=self._beat, name="ringtune-worker", daemon=True)
        if not alone:
            self._thread.start()

    def _begin(self, attributes: Mapping[str, Any]) -> tuple[int, int]:
        """Make a running trial with these attributes in one step; return its id and its number."""
        trial = create_trial(state=TrialState.RUNNING, user_attrs=dict(attributes))
        made = self._storage.create_new_trial(self._study_id, template_trial=trial)
        return made, self._storage.get_trial(made).number

    # --- signs of life ----------------------------------------------------------------------------------------------

    def _beat(self) -> None:
        beats = 0
        while not self._left.wait(BEAT_S):
            beats += 1
            try:
                self._storage.set_trial_user_attr(self._id, _BEATS, beats)
                self._last_beat_s = time.monotonic()
            except UpdateFinishedTrialError:
                self._lost = True
                return
            except storage_errors():  # locked or out of reach: the next beat may come through, or others take over
                continue

    def check(self) -> None:
        """Raise ProbeFailure where others took this process for dead, and its parts over."""
        if time.monotonic() - self._last_beat_s > _DOUBT_S and not self._alone:  # held, and its thread with it
            self._lost = self._lost or self._storage.get_trial(self._id).state != TrialState.RUNNING
        self._check_lost()

    def _check_lost(self) -> None:
        if self._lost:
            raise ProbeFailure(
                f"{self._shown}: this probe gave no sign of life for {LAPSE_S:.0f} s, and another one has taken over; "
                "run the same command to join it"
            )

    def _lives(self, worker: FrozenTrial) -> bool:
        if worker.number == self.number:
            return True
        attributes = worker.user_attrs
        if self._alone or process_identity.has_ended(attributes):
            return False
        beats, now_s = attributes.get(_BEATS), time.monotonic()
        if worker.number not in self._seen or self._seen[worker.number][0] != beats:
            self._seen[worker.number] = beats, now_s
        return now_s - self._seen[worker.number][1] < LAPSE_S

    def _living(self) -> tuple[list[FrozenTrial], list[FrozenTrial]]:
        """Return the workers that live and their leases, by number; end the trials of dead ones."""
        running = self._storage.get_all_trials(self._study_id, deepcopy=False, states=(TrialState.RUNNING,))
        workers = [trial for trial in running if PID in trial.user_attrs and self._lives(trial)]
        known = {worker.number for worker in workers}
        self._lost = self._lost or self.number not in known
        leases = [trial for trial in running if trial.user_attrs.get(_WORKER) in known]
        there = {trial.number for trial in (*workers, *leases)}
        self._end(trial._trial_id for trial in running if trial.number not in there)
        return workers, leases

    def _end(self, trials: Iterable[int], state: TrialState = TrialState.FAIL, value: float | None = None) -> None:
        for trial in trials:
            with contextlib.suppress(UpdateFinishedTrialError):  # another worker did
                self._storage.set_trial_state_values(trial, state, None if value is None else [value])

    # --- the search -------------------------------------------------------------------------------------------------

    def others(self) -> list[str]:
        """Return the processes that work on this search beside this one, as people are told."""
        return [str(worker.user_attrs.get(PROCESS)) for worker in self._others()]

    def _others(self) -> list[FrozenTrial]:
        workers, _ = self._living()
        return [worker for worker in workers if worker.number != self.number and _RUN in worker.user_attrs]

    def open(self, *, fresh: bool) -> bool:
        """Take part in the search; return whether nobody else does, and a ``fresh`` one may forget the old.

        Raises DeviceBusy where others go on with an old one.
        """
        others = self._others()
        if others and fresh and not all(other.user_attrs.get(_FRESH) for other in others):
            raise DeviceBusy(
                f"{self._shown}: another probe ({others[0].user_attrs.get(PROCESS)}) goes on with this search; wait "
                "for it, or leave --fresh out to join it"
            )
        self.run = min((int(other.user_attrs[_RUN]) for other in others), default=self.number)
        self._storage.set_trial_user_attr(self._id, _FRESH, fresh)
        self._storage.set_trial_user_attr(self._id, _RUN, self.run)
        return not others

    def note(self, name: str, value: Any) -> None:
        """Leave a fact of this worker (JSON) where the others see it."""
        with contextlib.suppress(UpdateFinishedTrialError):  # ``check`` says so
            self._storage.set_trial_user_attr(self._id, name, value)

    def noted(self, name: str, *, own: bool = True, since: int | None = None) -> list[Any]:
        """Return a fact of the workers that have it, dead or alive, in their order.

        They are those of this run, or all from the number ``since`` on; without this worker where ``own`` is false.
        """
        return [
            trial.user_attrs[name]
            for trial in self._storage.get_all_trials(self._study_id, deepcopy=False)
            if name in trial.user_attrs
            and PID in trial.user_attrs
            and (trial.user_attrs.get(_RUN) == self.run if since is None else trial.number >= since)
            and (own or trial.number != self.number)
        ]

    # --- leases -----------------------------------------------------------------------------------------------------

    def take(self, part: str, *, reads: bool = False) -> bool:
        """Take the lease on a part; False while another worker holds it, or one that overlaps it.

        Who only ``reads`` the part leaves it ``untouched``. Raises ProbeFailure as ``check`` does.
        """
        assert part not in self._held, f"{part} is held"
        taken = bool(self._before(part))
        self._check_lost()
        if taken:  # leaves no trial behind
            return False
        trial, number = self._begin({_PART: part, _WORKER: self.number, _READS: reads})
        if self._before(part, number):
            self._end([trial])
            return False
        self._held[part] = trial
        return True

    def _before(self, part: str, number: int | None = None) -> list[FrozenTrial]:
        """Return the leases of others that keep this worker from one on a part, with a number if it has one."""
        _, leases = self._living()
        return [
            lease
            for lease in leases
            if (number is None or lease.number < number)
            and lease.user_attrs[_WORKER] != self.number
            and (lease.user_attrs.get(_PART) in (part, WHOLE) or part == WHOLE)
        ]

    def untouched(self, part: str) -> bool:
        """Return whether nobody else had a lease on a part, but to read it, since this worker freed it."""
        last = self._last.get(part)
        return last is not None and not any(
            trial.number > last
            and trial.user_attrs.get(_PART) == part
            and trial.user_attrs.get(_WORKER) != self.number
            and not trial.user_attrs.get(_READS)
            for trial in self._storage.get_all_trials(self._study_id, deepcopy=False)
        )

    def free(self, part: str) -> None:
        """Give a lease back."""
        trial = self._held.pop(part)
        self._last[part] = self._storage.get_trial(trial).number
        self._end([trial], TrialState.COMPLETE, self._seconds())

    @contextlib.contextmanager
    def held(self, part: str, *, reads: bool = False) -> Iterator[None]:
        """Hold the lease on a part, which is waited for, until the block is left."""
        while not self.take(part, reads=reads):
            time.sleep(POLL_S)
        try:
            yield
        finally:
            self.free(part)

    def leave(self) -> None:
        """Give all leases back and end. In a storage that cannot be written any more they lapse by themselves."""
        self._left.set()
        if self._thread.is_alive():
            self._thread.join()
        with contextlib.suppress(ProbeFailure, *storage_errors()):
            self._end([*self._held.values(), self._id], TrialState.COMPLETE, self._seconds())
        self._held.clear()

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began_s, 3)
