"""Starts Python processes that have loaded torch and this program already: for 0.3 s of a core each, not for 2.1.

``WarmPopen`` is ``subprocess.Popen`` to whoever uses it. A server (``warm_server.py``), itself a fresh interpreter,
forks what is asked for and leaves it to the one that asked, whose child it is from then on: that one may wait for it,
stop it and kill it, and its end may end it. A process has variables, folder, descriptors, group and arguments of its
own; what it shares with its siblings is what the server has imported, and the seed of ``hash``. What it starts starts
so, too.
"""

from __future__ import annotations

import ctypes
import inspect
import itertools
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    import pytest  # which no process of the program has loaded

HERE = Path(__file__).resolve().parent
REPO = HERE.parents[2]
PYTHON = sys.executable
# Python, and torch, read these once, when they start: a process with others than its server's is a fresh interpreter.
_NAMES = ("PYTHONIOENCODING", "PYTHONUTF8", "PYTHONHASHSEED", "PYTHONWARNINGS", "LC_ALL", "LC_CTYPE", "LANG")
READ_AT_START = {name: os.environ.get(name) for name in _NAMES}
_PR_SET_CHILD_SUBREAPER = 36


class Start(NamedTuple):
    """A process that is wanted. The descriptors that come with it take the numbers of ``numbers``."""

    option: str  # -m or -c
    words: tuple[str, ...]  # the module or the code, and its arguments
    safe_path: bool  # the working folder is not searched
    unbuffered: bool  # what it says is not kept back
    numbers: tuple[int, ...]
    environ: Mapping[str, str]
    folder: str
    group: int  # of processes; 0 begins a session


def channel() -> tuple[socket.socket, socket.socket]:
    """Return the two ends of a channel, which carries whole messages."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


class Server:
    """A server that is a child of this process, at the other end of a channel, and ends with this process."""

    def __init__(self, channel: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        self._channel = channel
        self._process = process
        self._lock = threading.Lock()

    @classmethod
    def new(cls, *before: str, loaded: Sequence[str] = ()) -> Server:
        """Start one, with the words of a command that runs commands elsewhere ``before`` it, and more ``loaded``."""
        ours, theirs = channel()
        path = os.pathsep.join(map(str, (REPO, HERE, HERE.parent / "ringattn")))
        # Threads do not survive a fork; a worker's variables are set before its torch is loaded.
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "99", "PYTHONPATH": path}
        command = [*before, PYTHON, "-P", str(HERE / "warm_server.py"), str(theirs.fileno()), *loaded]
        with theirs:
            process = _fresh_popen(command, env=environ, pass_fds=(theirs.fileno(),), stdin=subprocess.DEVNULL)
        return cls(ours, process)

    def start(self, start: Start, descriptors: Sequence[int]) -> int:
        """Return the id of the new process, a child of this one."""
        prctl = ctypes.CDLL(None).prctl
        with self._lock:
            prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # its parent ends at once, and leaves it to this process
            try:
                socket.send_fds(self._channel, [pickle.dumps(start)], list(descriptors))
                pid = int(self._channel.recv(32))
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
        return pid

    def close(self) -> None:
        self._channel.close()
        if self._process is not None:
            self._process.wait()


_fresh_popen = subprocess.Popen
_server: Server | None = None
_first = threading.Lock()


def own_server() -> Server:
    """Return this process's server, which the first call starts."""
    global _server
    with _first:
        _server = _server or Server.new()
        return _server


def use(server: Server) -> None:
    """Let this process, which a server has made, start all of this program's processes by a server of its own."""
    global _server
    _server = server
    subprocess.Popen = WarmCommand  # type: ignore[misc]


class WarmPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Starts ``python -m`` and ``python -c`` warm, and everything else as ever."""

    server = staticmethod(own_server)

    def _execute_child(self, *given: Any) -> None:
        real = super()._execute_child  # type: ignore[misc]
        asked = inspect.signature(real).bind(*given).arguments
        start = self._start_of(asked)
        if start is None:
            real(*given)
            return
        streams = [asked["p2cread"], asked["c2pwrite"], asked["errwrite"]]
        own = [number if stream == -1 else stream for number, stream in enumerate(streams)]
        self.pid = self.server().start(start, [*own, *start.numbers[3:]])
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))  # type: ignore[attr-defined]

    def _start_of(self, asked: Mapping[str, Any]) -> Start | None:
        """Return how a command starts warm; None where it cannot."""
        words = asked["args"]
        if asked["shell"] or asked["preexec_fn"] or asked["executable"] or isinstance(words, str | bytes | os.PathLike):
            return None
        python, *words = map(os.fspath, words)
        environ = dict(os.environ if asked["env"] is None else asked["env"])
        flags = list(itertools.takewhile(("-P", "-u").__contains__, words))
        words = words[len(flags) :]
        safe_path = bool(environ.get("PYTHONSAFEPATH")) or "-P" in flags
        alike = all(environ.get(name) == value for name, value in READ_AT_START.items())
        if python != PYTHON or not self.is_warm(words) or not alike:
            return None
        option, *words = words
        numbers = (0, 1, 2, *sorted(asked["pass_fds"]))
        folder = Path(asked["cwd"] or "").absolute()
        group = 0 if asked["start_new_session"] else os.getpgrp()
        unbuffered = bool(environ.get("PYTHONUNBUFFERED")) or "-u" in flags
        return Start(option, tuple(words), safe_path, unbuffered, numbers, environ, str(folder), group)

    def is_warm(self, words: Sequence[str]) -> bool:
        """Return whether what Python is to run starts warm."""
        return len(words) > 1 and words[0] in ("-m", "-c")


def popen_of(server: Server) -> type[WarmPopen]:
    """Return a class whose processes are forked by this server."""

    class Started(WarmPopen):
        server = staticmethod(lambda: server)

    return Started


class WarmCommand(WarmPopen):
    """Starts this program's own processes warm alone (its command, workers, relays), and torchrun, which starts it."""

    def is_warm(self, words: Sequence[str]) -> bool:
        if words[:1] != ["-m"] or len(words) < 2:
            return False
        return words[1] == "torch.distributed.run" or words[1].partition(".")[0] == "autotune"


def start_warm(patch: pytest.MonkeyPatch, popen: type[WarmPopen] = WarmCommand) -> None:
    """Let this program's own processes start warm, except on CUDA, which does not survive a fork."""
    if not torch.cuda.is_available():
        patch.setattr(subprocess, "Popen", popen)
