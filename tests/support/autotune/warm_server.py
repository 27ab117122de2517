"""The process that ``warm_start`` has others forked from: ``python warm_server.py FD [MODULE ...]``.

FD is its end of the channel; the modules are loaded beside those that every process of the program needs.
"""

from __future__ import annotations

import fcntl
import gc
import importlib
import os
import pickle
import runpy
import socket
import sys
import time
import types
import warnings
from collections.abc import Sequence

import torch
from warm_start import Server, Start, channel, use

LOADED = (
    "autotune.accuracy.check", "autotune.cli.main", "autotune.cli.probing.probe", "autotune.distributed.evaluator",
    "autotune.measure.benchmark", "autotune.probe.dry_run", "autotune.probe.run", "autotune.probe.tuning",
    "autotune.report.contenders", "autotune.report.doctor", "ringattn.attention", "ringattn.store.store", "sqlalchemy",
    "torch.distributed", "torch.distributed.run",
)  # fmt: skip
WORKER = "autotune.measure.worker"  # starts no other
MOST_BYTES = 1 << 20  # of a message
MOST_DESCRIPTORS = 64  # that come with it
FREE = 256  # descriptors from here on are nobody's


def serve(asked: socket.socket) -> Start | None:
    """Fork what is asked for. Return in a new process what it is to do, and in this one None when nobody asks more."""
    while True:
        message, descriptors, _, _ = socket.recv_fds(asked, MOST_BYTES, MOST_DESCRIPTORS)
        if not message:
            return None
        told, tells = os.pipe()
        between = os.fork()
        if between == 0:
            parent = os.getpid()
            pid = os.fork()
            if pid:
                os.write(tells, b"%d" % pid)
                os._exit(0)
            while os.getppid() == parent:  # until it is a child of the one that asked
                time.sleep(0.0005)
            asked.detach()
            start: Start = pickle.loads(message)  # noqa: S301  from the process that started this one
            become(start, descriptors)
            return start
        os.waitpid(between, 0)
        asked.send(os.read(told, 32))
        for descriptor in (*descriptors, told, tells):
            os.close(descriptor)


def become(start: Start, descriptors: Sequence[int]) -> None:
    """Give this process the group, the descriptors, the folder, the variables and the search path that are wanted."""
    if start.group:
        os.setpgid(0, start.group)
    else:
        os.setsid()
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, FREE) for descriptor in descriptors]
    for number, descriptor in zip(start.numbers, high, strict=True):
        os.dup2(descriptor, number)
    close_others(start.numbers)
    sys.stdin = sys.__stdin__ = open(0, closefd=False)  # noqa: SIM115  for each may be of another kind now
    by_line = start.unbuffered or os.isatty(1)
    sys.stdout = sys.__stdout__ = open(1, "w", buffering=1 if by_line else -1, closefd=False)  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    os.chdir(start.folder)
    servers = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    os.environ.clear()
    os.environ.update(start.environ)
    named = [entry for entry in start.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    first = [] if start.safe_path else [start.folder]
    sys.path[:] = [*first, *named, *(entry for entry in sys.path if entry not in servers)]
    torch.set_num_threads(int(start.environ.get("OMP_NUM_THREADS") or len(os.sched_getaffinity(0))))


def close_others(kept: Sequence[int]) -> None:
    """Close all descriptors but these."""
    numbers = sorted(kept)
    for number, following in zip(numbers, (*numbers[1:], os.sysconf("SC_OPEN_MAX")), strict=True):
        os.closerange(number + 1, following)


def process_wanted(asked: socket.socket) -> Start | None:
    """Serve; return in every process that is forked, of this server or of those that follow, what it is to do."""
    start = serve(asked)
    while start is not None and start.words[0] != WORKER:
        ours, theirs = channel()
        if os.fork():
            theirs.close()
            use(Server(ours))
            return start
        ours.close()  # and this is the server of that process
        os.setpgid(0, 0)  # what is sent to the group is for those that were asked for
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(nothing, number)
        close_others((0, 1, 2, theirs.fileno()))
        start = serve(theirs)
    return start


def run(start: Start) -> None:
    """Run a module or code as ``python -m`` and ``python -c`` do."""
    if start.option == "-m":
        sys.argv = list(start.words)
        warnings.filterwarnings("ignore", category=RuntimeWarning, module="runpy")  # it has been imported already
        runpy.run_module(start.words[0], run_name="__main__", alter_sys=True)
        return
    sys.argv = ["-c", *start.words[1:]]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(start.words[0], "<string>", "exec"), vars(main))  # noqa: S102  what the caller would have Python run


if __name__ == "__main__":
    for name in (*LOADED, *sys.argv[2:]):
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that children do not copy its pages
    os.setpgid(0, 0)
    wanted = process_wanted(socket.socket(fileno=int(sys.argv[1])))
    if wanted is None:
        os._exit(0)
    run(wanted)
