"""Record of the workloads that no measured plan served, which ``ringtune probe --like`` measures.

Where the environment variable ``RINGTUNE_RECORD`` names a file, each process appends lines of JSON to it. A line holds
what the process met since its last one: workloads with the number of their calls, no tensor data. Readers add lines
up. A line is one write to a file opened for appending, so that those of several processes do not mix on a local disk.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from multiprocessing import util as multiprocessing_util
from pathlib import Path
from typing import TYPE_CHECKING, ParamSpec, TypeVar

from ringattn.errors import InputError, ProfileError
from ringattn.profile.plain_data import from_plain, to_plain
from ringattn.profile.whole_file import check_regular, read_regular
from ringattn.workload import Workload

if TYPE_CHECKING:
    from .heuristic import Wishes
    from .plan import Plan

VARIABLE = "RINGTUNE_RECORD"
_SCHEMA = 1
MOST_BYTES = 64 * 2**20  # of a record that is read: a line of one workload has 150 bytes, one of sixteen 2 KiB
# A line is due at so many new workloads, whenever the number of calls has doubled, and at exit: a killed process loses
# at most half of its calls, and a million calls are 21 lines.
_NEW_WORKLOADS_PER_LINE = 16

_logger = logging.getLogger("ringattn")
Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class UnmeasuredWorkload:
    """One workload of a line. ``calls`` is 0 where only compiled graphs ran it, whose calls are not counted."""

    workload: Workload
    calls: int

    def __post_init__(self) -> None:
        if self.calls < 0:
            raise InputError(f"calls is {self.calls}; it must be an integer >= 0")


@dataclass(frozen=True, slots=True)
class _Line:
    schema: int
    missed: tuple[UnmeasuredWorkload, ...]

    def __post_init__(self) -> None:
        if self.schema != _SCHEMA:
            raise InputError(f"schema is {self.schema}, and this version reads {_SCHEMA}")


def probe_options(workload: Workload) -> str:
    """Return what to tell `ringtune probe` so that it measures this shape; length, dtype and mode apart."""
    options = [f"--heads {workload.heads}", f"--head-dim {workload.head_dim}"]
    if workload.kv_heads != workload.heads:
        options.insert(1, f"--kv-heads {workload.kv_heads}")
    options.append("--causal" if workload.causal else "--no-causal")
    if workload.pattern.dense:
        options.append("--dense")
    else:
        segments = ",".join(str(branch.segment) for branch in workload.pattern.branches)
        rates = ",".join(str(branch.rate) for branch in workload.pattern.branches)
        options += [f"--segment-lengths {segments}", f"--dilation-rates {rates}"]
        if workload.pattern.dilated and workload.pattern.head_offset != "interleaved":
            options.append(f"--head-offset {workload.pattern.head_offset}")
    if workload.world > 1:
        options.append(f"--nproc {workload.world}")
    return " ".join(options)


def call_options(workload: Workload) -> tuple[str, ...]:
    """Return what to tell `ringtune probe` beside its shape so that it measures this workload and no other."""
    w = workload
    options = [*_kind_options(w), length_option(w), *batch_options(w)]
    if w.world > 1 and w.seq_len == 1:  # no rank of the other layout holds so few
        options.append("--layout contiguous")
    return tuple(options)


def length_option(workload: Workload) -> str:
    """Return what tells `ringtune probe` the length of a workload, of documents that of all together."""
    return f"--seq-len {workload.packed_tokens or workload.seq_len}"


def batch_options(workload: Workload) -> tuple[str, ...]:
    """Return what tells `ringtune probe` how many sequences or documents; decoding has several where none is named."""
    if workload.packed:
        return (f"--documents {workload.batch}",)
    return (f"--batch-size {workload.batch}",) if workload.batch > 1 or workload.decode else ()


def grid_options(workload: Workload) -> tuple[str, ...]:
    """Return what ``call_options`` does but the length, of which the grid's are measured."""
    return (*_kind_options(workload), *(batch_options(workload) if workload.batch > 1 else ()))


def _kind_options(workload: Workload) -> tuple[str, str]:
    return f"--mode {workload.mode}", f"--precision {workload.dtype}"


def unmeasurable(workload: Workload) -> str:
    """Return why no probe measures such a workload; "" where one does."""
    if workload.not_probed:
        return workload.not_probed
    if workload.dtype == "fp64":
        return "no better dtype to check it against"
    if workload.packed and workload.world > 1:
        return "documents are probed on one rank"
    return ""


def remedy(workload: Workload, *options: str, what: str = "it") -> str:
    """Return which `ringtune probe` measures such a workload, or why none does: the end of every warning about one.

    ``options`` are those beside the shape's; ``what`` is what the command measures.
    """
    if why := unmeasurable(workload):
        return f"no probe measures {what} ({why})"
    return f"`{' '.join(('ringtune probe', probe_options(workload), *options))}` measures {what}"


def record_path(profile: object, wishes: Wishes) -> str:
    """Return the absolute path of the file to record to.

    "" where the environment names none, and where no measurement could change a plan: the heuristic alone was asked
    for, or a kernel.
    """
    name = os.environ.get(VARIABLE, "") if profile is not None and wishes.forward is None else ""
    return os.path.abspath(os.path.expanduser(name)) if name else ""  # noqa: PTH100, PTH111 - Path's needs a home


def meet(path: str, plan: Plan) -> None:
    """Note the workload of a plan in the record ``path``, if any, unless a profile has it measured.

    Documents are left out: of those every batch is another workload.
    """
    if path and not _measured(plan) and not plan.workload.packed:
        record_at(path).meet(plan.workload)


def count_calls(path: str, run: Callable[Arguments, Result], plan: Plan) -> Callable[Arguments, Result]:
    """Return ``run`` with its calls counted in the record ``path``, or as it is where ``meet`` notes nothing."""
    return run if _measured(plan) or plan.workload.packed else record_at(path).counted(run, plan.workload)


def _measured(plan: Plan) -> bool:
    return plan.origin is not None and plan.origin.source == "profile" and plan.origin.measured


@cache
def record_at(path: str) -> Record:
    """Return this process's record for a file: one object for all modules, also copied and unpickled ones."""
    return Record(path)


class _Tally:
    """Calls of one workload that are not written yet; ``new`` until its first line is."""

    __slots__ = ("calls", "new")

    def __init__(self) -> None:
        self.calls = 0
        self.new = True


class Record:
    """Workloads met and calls counted by this process and not written yet. Its methods may be called by any thread."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._failed = False
        self._tallies: dict[Workload, _Tally] = {}
        self._new_workloads = 0
        self._all_calls = 0
        self._next_line_at = 1
        self._write_at_end()
        os.register_at_fork(after_in_child=self._start_in_child)
        multiprocessing_util.register_after_fork(self, Record._write_at_end)  # which forgets the finalizers so far

    def _write_at_end(self) -> None:
        """Write when this process ends: atexit's functions are not called in what multiprocessing forks."""
        multiprocessing_util.Finalize(None, self.write, exitpriority=0)

    def _start_in_child(self) -> None:
        """Leave to the parent what it counted."""
        self._lock = threading.Lock()  # the parent's may be held by a thread that the child does not have
        for tally in self._tallies.values():  # kept: runners hold them
            tally.calls, tally.new = 0, False
        self._new_workloads = 0
        self._all_calls = 0
        self._next_line_at = 1
        self._write_at_end()

    def meet(self, workload: Workload) -> None:
        """Note a workload that no measured plan serves."""
        with self._lock:
            self._tally(workload)
            if self._new_workloads >= _NEW_WORKLOADS_PER_LINE:
                self._write()

    def _tally(self, workload: Workload) -> _Tally:
        tally = self._tallies.get(workload)
        if tally is None:
            tally = self._tallies[workload] = _Tally()
            self._new_workloads += 1
        return tally

    def counted(self, run: Callable[Arguments, Result], workload: Workload) -> Callable[Arguments, Result]:
        """Return ``run`` with its calls counted, those that raise left out."""
        with self._lock:
            tally = self._tally(workload)

        def counting(*arguments: Arguments.args, **keywords: Arguments.kwargs) -> Result:
            result = run(*arguments, **keywords)
            with self._lock:
                tally.calls += 1
                self._all_calls += 1
                if self._all_calls >= self._next_line_at:
                    self._next_line_at *= 2
                    self._write()
            return result

        return counting

    def write(self) -> None:
        """Append what is not written yet as one line. A file that cannot be written is told of once."""
        with self._lock:
            self._write()

    def _write(self) -> None:
        unwritten = {workload: tally.calls for workload, tally in self._tallies.items() if tally.new or tally.calls}
        if self._failed or not unwritten:
            return
        for tally in self._tallies.values():
            tally.calls, tally.new = 0, False
        self._new_workloads = 0
        line = line_of(unwritten).encode()
        try:
            # O_NONBLOCK: a pipe without a reader is an error, and not waited for.
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK
            file = os.open(self._path, flags, 0o644)
            try:
                check_regular(file, Path(self._path))
                written = os.write(file, line)
            finally:
                os.close(file)
            problem = "" if written == len(line) else f"only {written} of {len(line)} bytes of a line were written"
        except OSError as error:
            problem = error.strerror or str(error)
        if problem:
            self._failed = True
            _logger.warning(
                "%s: workloads that no measured plan serves are not recorded (%s); %s names a file to append to",
                self._path,
                problem,
                VARIABLE,
            )


def line_of(calls: Mapping[Workload, int]) -> str:
    """Return one line of a record. The line break is before it: after a line that was cut short it is whole itself."""
    missed = tuple(UnmeasuredWorkload(workload, count) for workload, count in calls.items())
    return "\n" + json.dumps(to_plain(_Line(_SCHEMA, missed)), separators=(",", ":"))


def read_record(path: Path) -> tuple[dict[Workload, int], tuple[str, ...]]:
    """Return the calls of every workload of a record, in the order met, and a note on each line that is skipped.

    A line that cannot be read, as a full disk or a killed process leaves one, is skipped. OSError where the file cannot
    be read, is no regular one or has more than ``MOST_BYTES``; ValueError for a name with a NUL.
    """
    calls: dict[Workload, int] = {}
    notes = []
    for number, text in enumerate(read_regular(path, MOST_BYTES).split(b"\n"), 1):
        if not text.strip():
            continue
        place = f"{path}, line {number}"
        try:
            line: _Line = from_plain(_Line, json.loads(text), place)
        except ProfileError as error:
            notes.append(f"{error}; line skipped")
            continue
        except (ValueError, RecursionError):
            notes.append(f"{place}: is cut short or no JSON; line skipped")
            continue
        for each in line.missed:
            calls[each.workload] = calls.get(each.workload, 0) + each.calls
    return calls, tuple(notes)
