"""Lease on a database that studies go to: one probe at a time writes them, also from several hosts.

A lease is a running trial of the study ``probe runs``, which Optuna's own heartbeat keeps alive: the database says how
old a beat is, so that clocks of hosts need not agree. Numbers of trials are given out one at a time. Of the trials that
run, the one with the lowest number holds the lease; the beats of a process that was killed end, and it lapses.
"""

from __future__ import annotations

import os
import socket
import threading
import time
import warnings

import optuna
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.storages import RDBStorage
from optuna.trial import FrozenTrial, TrialState

from autotune.exit_codes import DeviceBusy, ProbeFailure

RUNS = "probe runs"
BEAT_S = 5
LAPSE_S = 20  # four beats: a machine that is busy, or a database that is locked, costs one or two
_POLL_S = 0.2
_HOLDER = "holder"  # the attribute that a lease has once it beats


class Lease:
    """Holds the database of ``url`` until ``release``, or until this process ends; ``shown`` names it in messages."""

    def __init__(self, url: str, shown: str) -> None:
        """Raises DeviceBusy where another process holds it, and what Optuna raises where it cannot be reached."""
        self._shown = shown
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            # Not the storage of the studies, whose trials do not beat: Optuna warns of asking for one where they do.
            self._storage = RDBStorage(url, heartbeat_interval=BEAT_S, grace_period=LAPSE_S)
        self._study = optuna.create_study(study_name=RUNS, storage=self._storage, load_if_exists=True)
        self._lost = False
        self._released = threading.Event()
        self._began_s = self._last_beat_s = time.monotonic()
        self._trial_id = self._storage.create_new_trial(self._study._study_id)
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        try:
            self._storage.record_heartbeat(self._trial_id)
            self._storage.set_trial_user_attr(
                self._trial_id, _HOLDER, f"process {os.getpid()} on {socket.gethostname()}"
            )
            self._thread.start()
            self._wait_for_those_before()
        except BaseException:
            self._released.set()
            self._storage.set_trial_state_values(self._trial_id, TrialState.FAIL)
            raise

    def _wait_for_those_before(self) -> None:
        """Return when no trial before this one runs; DeviceBusy where one of them beats."""
        number = self._storage.get_trial(self._trial_id).number
        began_s = time.monotonic()
        while before := [trial for trial in self._running() if trial.number < number]:
            if holders := [trial.user_attrs[_HOLDER] for trial in before if _HOLDER in trial.user_attrs]:
                raise DeviceBusy(
                    f"{self._shown}: another probe ({holders[0]}) is writing its studies; wait for it, "
                    f"or name another database. One that was killed is forgotten after {LAPSE_S} s"
                )
            if time.monotonic() - began_s > LAPSE_S:  # it was killed before its first beat
                for trial in before:
                    self._storage.set_trial_state_values(trial._trial_id, TrialState.FAIL)
            time.sleep(_POLL_S)

    def _running(self) -> list[FrozenTrial]:
        """Return the trials that run, without those that have not beaten for LAPSE_S."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ExperimentalWarning)
            optuna.storages.fail_stale_trials(self._study)
        return self._storage.get_all_trials(self._study._study_id, states=(TrialState.RUNNING,))

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            try:
                if self._has_lapsed():
                    return
                self._storage.record_heartbeat(self._trial_id)
                self._last_beat_s = time.monotonic()
            except StorageInternalError:  # locked or out of reach: the next beat may come through, or it lapses
                continue

    def _has_lapsed(self) -> bool:
        self._lost = self._lost or self._storage.get_trial(self._trial_id).state != TrialState.RUNNING
        return self._lost

    def check(self) -> None:
        """Raise ProbeFailure where the lease has lapsed and another probe has taken it."""
        asleep = time.monotonic() - self._last_beat_s > LAPSE_S  # this process was held, its thread with it
        if self._lost or (asleep and self._has_lapsed()):
            raise ProbeFailure(
                f"{self._shown}: this probe gave no sign of life for {LAPSE_S} s, and another one has taken over; "
                "wait for that, then run the same command to go on"
            )

    def release(self) -> None:
        """Let the next probe begin. Of a database that is out of reach the lease lapses by itself."""
        self._released.set()
        self._thread.join()
        if not self._lost:
            try:
                held_s = round(time.monotonic() - self._began_s, 3)
                self._storage.set_trial_state_values(self._trial_id, TrialState.COMPLETE, [held_s])
            except (StorageInternalError, optuna.exceptions.UpdateFinishedTrialError):
                self._lost = True
        self._storage.remove_session()
