"""The record of a probe: an Optuna journal with one study per stage and cell, safe against being killed.

Optuna's journal breaks for good when something is appended after a half-written line, and an orphaned lock of
its file backend blocks a reader or writer for thirty seconds. So one process writes, under a lock of our own that
dies with it; opening cuts the file to its last whole line and removes locks nobody can hold.

Every candidate is a trial: asked when it enters a stage, reported block by block, told when it leaves. A probe
that is killed finds all of it again, down to the last block of a race.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.storages import BaseStorage, InMemoryStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.study import Study
from optuna.trial import FrozenTrial, Trial, TrialState

from ringattn.wording import plural
from ringattn.workload import Tunables, Workload

from .evaluator import Checked, Fault
from .exit_codes import DeviceBusy, ProbeFailure
from .space import Assignment, Value, candidate_key, encode, from_key

HEADER = "probe"
RUNS = "runs"  # the constraint every trial has: above 0 where the candidate gave no number
_BLOCK = "default_ms:"
_TAIL_BYTES = 2**20
_OPTUNA_LOCK_SUFFIXES = (".lock", ".rename")


def _cut_to_whole_lines(path: Path) -> int:
    """Drops a half-written tail, and what follows the first line in it that is no JSON; returns the bytes dropped.

    Only the end of an appended file can be damaged by a process or a machine that stopped.
    """
    size = path.stat().st_size
    keep = 0
    with path.open("rb") as journal:
        if size > _TAIL_BYTES:
            journal.seek(size - _TAIL_BYTES)
            journal.readline()  # the rest of a line
            keep = journal.tell()
        for line in journal:
            if not line.endswith(b"\n"):
                break
            try:
                json.loads(line)
            except ValueError:
                break
            keep += len(line)
    if keep < size:
        os.truncate(path, keep)
    return size - keep


def _is_foreign(path: Path) -> bool:
    """Whether the first whole line is no JSON: no record cut off while it was written, but somebody's file."""
    with path.open("rb") as file:
        first = file.readline(2**20)
    try:
        json.loads(first)
    except ValueError:
        return first.endswith(b"\n")
    return False


def _clear_optuna_locks(path: Path) -> list[str]:
    """Removes the locks of Optuna's file backend: only who holds our own lock writes, so they are orphans."""
    cleared = []
    for orphan in path.parent.glob(f"{path.name}*"):
        if orphan.name.endswith(_OPTUNA_LOCK_SUFFIXES) and orphan.name != f"{path.name}.writer":
            orphan.unlink(missing_ok=True)
            cleared.append(orphan.name)
    return cleared


class _JournalFile(JournalFileBackend):
    """Optuna's journal file, written by us alone: no lock per line, and on the disk when a trial is told.

    The stock backend takes a lock and waits for the disk at every one of a trial's two dozen lines, which on a busy
    disk costs more than the trial. What is written survives this process being killed either way.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._lines = path.open("ab", buffering=0)

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        with self._naming_the_file():
            self._lines.write("".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs).encode())

    def sync(self) -> None:
        with self._naming_the_file():
            os.fsync(self._lines.fileno())

    @contextlib.contextmanager
    def _naming_the_file(self) -> Iterator[None]:
        """A full disk is reported without a name."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, self._lines.name) from error

    def close(self) -> None:
        self._lines.close()


def _check_regular(path: Path) -> None:
    """ProbeFailure for a pipe, device or folder in a file's place: opening a pipe would wait forever."""
    if path.exists() and not path.is_file():
        raise ProbeFailure(f"{path}: is not a regular file; move it away or choose another --output")


class _WriterLock:
    """An advisory lock on a file beside the journal; the kernel drops it when the process ends, however it ends."""

    def __init__(self, journal: Path) -> None:
        self._path = journal.with_name(journal.name + ".writer")
        _check_regular(self._path)
        self._file = self._path.open("a+")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read(16).strip() or "unknown"
            self._file.close()
            raise DeviceBusy(
                f"{journal}: another probe (process {holder}) is writing it; wait for it or choose another --output"
            ) from None
        self._file.truncate(0)
        self._file.write(str(os.getpid()))
        self._file.flush()

    def release(self) -> None:
        self._file.close()
        # The file stays: removing it would let a waiting process lock a file that is gone.


def journal_path(profile: Path, environ: Mapping[str, str], home: Path) -> Path:
    """Beside the profile where that folder can be written, else in the user's state folder.

    Raises OSError when neither can.
    """
    beside = profile.with_name(profile.name + ".journal")
    with contextlib.suppress(OSError):
        profile.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=profile.parent):
            return beside
    state = Path(environ.get("XDG_STATE_HOME") or home / ".local" / "state") / "ringtune"
    state.mkdir(parents=True, exist_ok=True)
    return state / beside.name


@dataclass(slots=True, eq=False)
class Entry:
    """One candidate in one stage: its place in the journal, and everything known of it so far.

    ``log_ratios`` maps the number of a block to log(t / t_default) in it; a time in ms is that against the time
    of the default in the same block, which ``StageRecord.default_ms`` keeps.
    """

    tunables: Tunables
    trial: Trial | None  # None: finished in an earlier run
    number: int
    log_ratios: dict[int, float] = field(default_factory=dict)
    checked: Checked | None = None
    fault: Fault | None = None
    finished: bool = False
    constrained: frozenset[str] = frozenset()  # constraints that a run cut off while telling had set already


class StageRecord:
    """One Optuna study: the candidates of one stage of one cell.

    Constraints: ``runs`` is above 0 for a candidate that gave no number (told PRUNED, with its kind), ``memory``
    and ``error`` above 0 for one over a limit (told COMPLETE: its time is as true as any other).

    With a ``base`` plan the parameters of a trial are what its candidate changes of it. A sampler needs all of them.
    """

    def __init__(
        self,
        study: Study,
        workload: Workload,
        knobs: Mapping[str, tuple[Value, ...]],
        sync: Callable[[], None],
        base: Tunables | None,
    ) -> None:
        self.study = study
        self._sync = sync
        self._workload = workload
        self._knobs = dict(knobs)
        self._distributions: dict[str, BaseDistribution] = {
            name: CategoricalDistribution(values) for name, values in knobs.items()
        }
        self._base = {} if base is None else encode(workload, base)
        self._entries: dict[str, Entry] = {}
        self.default_ms: dict[int, float] = {}  # by block
        self.repeated_default: list[float] = []  # log of one of two readings over the other
        for name, value in study.user_attrs.items():
            if name.startswith(_BLOCK):
                self._keep_block(int(name.removeprefix(_BLOCK)), *value)
        for frozen in study.get_trials(deepcopy=False):
            self._recall(frozen)

    def _recall(self, frozen: FrozenTrial) -> None:
        key = frozen.user_attrs.get("candidate")
        if key is None or frozen.state in (TrialState.FAIL, TrialState.WAITING):
            if frozen.state in (TrialState.RUNNING, TrialState.WAITING):
                self._abandon(frozen)
            return
        running = frozen.state == TrialState.RUNNING
        entry = Entry(
            tunables=from_key(key),
            trial=Trial(self.study, frozen._trial_id) if running else None,
            number=frozen.number,
            log_ratios=dict(frozen.intermediate_values),
            finished=not running,
            constrained=frozenset(frozen.constraints),
        )
        if "checked" in frozen.user_attrs:
            entry.checked = Checked(**frozen.user_attrs["checked"])
        if "kind" in frozen.user_attrs and frozen.state == TrialState.PRUNED:
            entry.fault = Fault(frozen.user_attrs["kind"], frozen.user_attrs.get("message", ""))
        self._entries[key] = entry

    def _abandon(self, frozen: FrozenTrial) -> None:
        """A trial cut off before its candidate was even named holds nothing: failed, so that no sampler reads it."""
        storage = self.study._storage
        if frozen.state == TrialState.WAITING:
            storage.set_trial_state_values(frozen._trial_id, TrialState.RUNNING)
        storage.set_trial_state_values(frozen._trial_id, TrialState.FAIL)

    def entries(self) -> tuple[Entry, ...]:
        return tuple(self._entries.values())

    def find(self, tunables: Tunables) -> Entry | None:
        return self._entries.get(candidate_key(tunables))

    def open(self, tunables: Tunables) -> Entry:
        """The entry of this plan: a recorded one, or a trial asked now."""
        key = candidate_key(tunables)
        if key in self._entries:
            return self._entries[key]
        params = self._params(tunables)
        assert params is not None, f"a plan outside its own space: {key}"
        changed = {name: value for name, value in params.items() if name not in self._base or self._base[name] != value}
        self.study.enqueue_trial(changed, user_attrs={"candidate": key})
        trial = self.study.ask({name: self._distributions[name] for name in changed})
        return self._add(key, Entry(tunables, trial, trial.number))

    def _params(self, tunables: Tunables) -> Assignment | None:
        """The plan as values of this study's knobs; None where the study does not have one of them."""
        plan = encode(self._workload, tunables)
        params = {name: plan.get(name, values[0]) for name, values in self._knobs.items()}
        return params if all(params[name] in values for name, values in self._knobs.items()) else None

    def ask(self) -> tuple[Trial, Assignment]:
        """A trial whose values the study's sampler chose; hand it to ``adopt`` or ``reject``."""
        trial = self.study.ask(self._distributions)
        return trial, dict(trial.params)

    def adopt(self, trial: Trial, tunables: Tunables) -> Entry:
        """The asked trial becomes this candidate's entry."""
        key = candidate_key(tunables)
        trial.set_user_attr("candidate", key)
        return self._add(key, Entry(tunables, trial, trial.number))

    def reject(self, trial: Trial, reasons: Sequence[str]) -> None:
        """An asked plan that cannot run: the sampler learns it, and nothing was measured."""
        trial.set_user_attr("kind", "rejected")
        trial.set_user_attr("message", "; ".join(reasons)[:400])
        trial.set_constraint(RUNS, 1.0)
        self.study.tell(trial, state=TrialState.PRUNED)

    def repeat(self, trial: Trial, value: float) -> None:
        """An asked plan that is known already: told its known value, so that the sampler moves on."""
        trial.set_constraint(RUNS, 0.0)
        trial.set_user_attr("repeats", True)
        self.study.tell(trial, value)

    def learn(self, tunables: Tunables, value: float | None, constraints: Mapping[str, float]) -> None:
        """Adds what another stage found out, for the sampler; None for a plan that gave no number."""
        params = self._params(tunables)
        if params is None:
            return  # of a wider space, such as one with more dtypes
        self.study.add_trial(
            optuna.trial.create_trial(
                state=TrialState.PRUNED if value is None else TrialState.COMPLETE,
                value=value,
                params=params,
                distributions=self._distributions,
                constraints={RUNS: 1.0 if value is None else 0.0, **constraints},
                user_attrs={"learned": candidate_key(tunables)},
            )
        )

    def _add(self, key: str, entry: Entry) -> Entry:
        assert key not in self._entries, f"asked twice in one stage: {key}"
        self._entries[key] = entry
        return entry

    def checked(self, entry: Entry, checked: Checked) -> None:
        entry.checked = checked
        if entry.trial is not None:
            entry.trial.set_user_attr("checked", {name: getattr(checked, name) for name in Checked.__slots__})

    def begin_block(self, block: int, default_ms: float, repeated: float | None = None) -> None:
        """The default's own time in a block whose ratios are about to be reported.

        ``repeated`` is the log of one of its two readings over the other.
        """
        self._keep_block(block, default_ms, repeated)
        self.study.set_user_attr(f"{_BLOCK}{block}", [default_ms, repeated])

    def _keep_block(self, block: int, default_ms: float, repeated: float | None) -> None:
        self.default_ms[block] = default_ms
        if repeated is not None:
            self.repeated_default.append(repeated)

    def report(self, entry: Entry, block: int, log_ratio: float) -> None:
        """One paired repetition; a block is told once."""
        entry.log_ratios[block] = log_ratio
        if entry.trial is not None and not entry.finished:
            entry.trial.report(log_ratio, block)

    def complete(
        self, entry: Entry, value: float, constraints: Mapping[str, float], **attributes: Value | float
    ) -> None:
        """The candidate has a time: ``value`` is log(t / t_default), constraints above 0 are limits it broke."""
        assert math.isfinite(value)
        if entry.trial is None or entry.finished:
            return
        for name, attribute in attributes.items():
            entry.trial.set_user_attr(name, attribute)
        self._constrain(entry, {RUNS: 0.0, **constraints})
        self.study.tell(entry.trial, value)
        entry.finished = True
        self._sync()

    def fail(self, entry: Entry, fault: Fault) -> None:
        """The candidate gave no number: PRUNED with the kind, never a bad score and never FAIL (TPE ignores FAIL)."""
        entry.fault = fault
        if entry.trial is None or entry.finished:
            return
        entry.trial.set_user_attr("kind", fault.kind)
        entry.trial.set_user_attr("message", fault.message)
        self._constrain(entry, {RUNS: 1.0})
        self.study.tell(entry.trial, state=TrialState.PRUNED)
        entry.finished = True
        self._sync()

    def _constrain(self, entry: Entry, constraints: Mapping[str, float]) -> None:
        assert entry.trial is not None
        for name, value in constraints.items():
            if name not in entry.constrained:
                entry.trial.set_constraint(name, value)

    def abandon_open(self, reason: str) -> None:
        """What was asked and never timed is told FAIL, which no sampler reads: it is neither good nor bad."""
        for entry in self._entries.values():
            if entry.trial is not None and not entry.finished:
                entry.trial.set_user_attr("message", reason)
                self.study.tell(entry.trial, state=TrialState.FAIL)
                entry.finished = True

    def note(self, name: str, value: Any) -> None:
        self.study.set_user_attr(name, value)

    def noted(self, name: str) -> Any:
        return self.study.user_attrs.get(name)


class Store:
    """All studies of one probe. ``path=None`` keeps them in memory (replay, tests)."""

    def __init__(self, path: Path | None, *, identity: str = "", fresh: bool = False) -> None:
        """Opens or starts the journal at ``path``.

        ``identity`` says what the probe is (machine, software, request); a journal with another one, or
        ``fresh``, is started over. Raises DeviceBusy when another process writes it, OSError when it cannot be written.
        """
        self.path = path
        self.notes: list[str] = []
        self.resumed = False
        self._lock: _WriterLock | None = None
        self._file: _JournalFile | None = None
        self._storage: BaseStorage = InMemoryStorage()
        if path is not None:
            self._lock = _WriterLock(path)
            try:
                self._storage = self._open_journal(path, fresh)
            except BaseException:
                self._lock.release()
                raise
        self._header = self._study(HEADER, None)
        self._identity = identity
        self.resumed = "identity" in self._header.user_attrs
        if not self.resumed:
            self._header.set_user_attr("identity", identity)
        elif self._header.user_attrs["identity"] != identity:
            assert path is not None, "a store in memory is always new"
            self.notes.append(f"{path.name}: of another machine, software or request; starting over")
            self.start_over()

    def start_over(self) -> None:
        """Forget everything; the lock stays held."""
        if self.path is not None:
            assert self._file is not None
            self._file.close()
            self.path.unlink()
            self._file = _JournalFile(self.path)
            self._storage = JournalStorage(self._file)
        else:
            self._storage = InMemoryStorage()
        self.resumed = False
        self._header = self._study(HEADER, None)
        self._header.set_user_attr("identity", self._identity)

    def _open_journal(self, path: Path, fresh: bool) -> JournalStorage:
        _check_regular(path)
        cleared = _clear_optuna_locks(path)
        if cleared:
            self.notes.append(f"removed orphaned locks: {', '.join(cleared)}")
        if fresh:
            path.unlink(missing_ok=True)
        if path.exists() and _is_foreign(path):
            self._set_aside(path)
        if path.exists():
            dropped = _cut_to_whole_lines(path)
            if dropped:
                self.notes.append(f"{path.name}: dropped {plural(dropped, 'byte')} of a half-written record")
        self._file = _JournalFile(path)
        try:
            return JournalStorage(self._file)
        except (LookupError, TypeError, ValueError, AssertionError, AttributeError):  # what Optuna ends with on it
            self._file.close()
            self._set_aside(path)
            self._file = _JournalFile(path)
            return JournalStorage(self._file)

    def _set_aside(self, path: Path) -> None:
        aside = path.with_name(path.name + ".unreadable")
        path.replace(aside)
        self.notes.append(f"{path.name}: holds no records of a probe; moved to {aside.name}, starting over")

    def _study(self, name: str, sampler: optuna.samplers.BaseSampler | None) -> Study:
        with _quiet_optuna():
            return optuna.create_study(
                study_name=name, storage=self._storage, sampler=sampler, direction="minimize", load_if_exists=True
            )

    def stage(
        self,
        workload: Workload,
        stage: str,
        knobs: Mapping[str, tuple[Value, ...]],
        sampler: optuna.samplers.BaseSampler | None = None,
        base: Tunables | None = None,
    ) -> StageRecord:
        """The study of one stage of one cell, with everything an earlier run recorded in it.

        ``base``: see StageRecord. Most of a journal, and of the time to open it, would be unchanged parameters.
        """
        study = self._study(f"{workload} | {stage}", sampler or optuna.samplers.RandomSampler(seed=0))
        return StageRecord(study, workload, knobs, self._sync, base)

    def remember(self, name: str, value: Any) -> None:
        """A fact of the whole probe (JSON), such as a cell that is done."""
        self._header.set_user_attr(name, value)
        self._sync()

    def _sync(self) -> None:
        if self._file is not None:
            self._file.sync()

    def recall(self, name: str) -> Any:
        return self._header.user_attrs.get(name)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


@contextlib.contextmanager
def _quiet_optuna() -> Iterator[None]:
    """Optuna announces every study on stderr; a progress display cannot use that."""
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(before)
