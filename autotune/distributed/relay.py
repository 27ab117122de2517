"""Relay on every rank: passes the coordinator's requests to a worker of its own, and the answers back.

``python -m autotune.distributed.relay HOST PORT RANK LOCAL_RANK PARENT`` with the key on stdin is how the coordinator
starts one on its host; on a rank that torchrun started the command itself becomes one. A relay ends with its
coordinator, and its worker with it.
"""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from autotune.exit_codes import ExitCode, ProbeFailure
from autotune.folders import readable_copy
from autotune.measure.evaluator import Ended, Fault
from autotune.measure.worker import die_with_parent
from autotune.measure.worker_evaluator import WorkerBug
from ringattn.errors import DeviceError, RingAttentionError

from .protocol import Abort, Hello, Quit, RankAnswer, RankRequest, Welcome, connect
from .rank_worker import RankWorker, WorkerGone

CONNECT_TIMEOUT_S = 60.0


class Relay:
    """Serves one rank in the main thread; another listens, so that a request can be aborted."""

    def __init__(self, connection: Connection, rank: int, local_rank: int) -> None:
        self._connection = connection
        self.rank = rank
        self._local_rank = local_rank
        self._calls: queue.SimpleQueue[RankRequest | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._worker: RankWorker | None = None
        self._generation = 0
        self._aborted = 0  # the last call that was ended from outside
        self._current = 0
        self.told_to_quit = False

    def run(self) -> None:
        """Serve until the coordinator says so, or is gone."""
        welcome = self._connection.recv()
        assert isinstance(welcome, Welcome)
        self._device = f"cuda:{self._local_rank}" if welcome.device_kind == "cuda" else "cpu"
        self._connection.send(self._hello())
        threading.Thread(target=self._listen, name="ringtune-relay", daemon=True).start()
        while (call := self._calls.get()) is not None:
            answer = self._serve(call)
            try:
                self._connection.send(answer)
            except OSError:
                break  # nobody is there to hear it; the listener knows, too
        self._end_worker()

    def _hello(self) -> Hello:
        from ringattn.hardware.facts import detect
        from ringattn.hardware.identity import host_identity

        host = host_identity()
        try:
            return Hello(self.rank, detect(self._device), host)
        except DeviceError as error:
            return Hello(self.rank, None, host, str(error))

    def _listen(self) -> None:
        try:
            while True:
                message = self._connection.recv()
                if isinstance(message, RankRequest):
                    self._calls.put(message)
                elif isinstance(message, Abort):
                    self._abort(message.number)
                elif isinstance(message, Quit):
                    self.told_to_quit = True
                    break
        except (EOFError, OSError):
            pass  # the coordinator is gone, and so is everything it wanted
        self._calls.put(None)
        self._abort(None)

    def _abort(self, number: int | None) -> None:
        """End the worker, also in the middle of a request; with a number, only of that request."""
        with self._lock:
            if number is not None and number < self._current:
                return
            self._aborted = self._current if number is None else number
            worker = self._worker
        if worker is not None:
            worker.stop()

    def _serve(self, call: RankRequest) -> RankAnswer:
        with self._lock:
            self._current = call.number
            if self._aborted >= call.number:
                return RankAnswer(call.number, aborted=True)
        if self._worker is None or self._generation != call.generation:
            self._renew(call)
        assert self._worker is not None
        try:
            answer = RankAnswer(call.number, self._ask(call, self._worker))
        except WorkerGone:
            answer = RankAnswer(call.number, Fault("crash", "its worker was ended", Ended()))
        except DeviceError as error:
            answer = RankAnswer(call.number, no_device=str(error))
        except WorkerBug as bug:
            answer = RankAnswer(call.number, bug=str(bug))
        with self._lock:
            aborted = self._aborted >= call.number
        worker = self._worker
        return replace(answer, aborted=aborted, unmonitored=worker.unmonitored, started_s=worker.started_s)

    def _ask(self, call: RankRequest, worker: RankWorker) -> Any:
        if call.request.action != "run-profile":
            return worker.serve(call.request, call.timeout_s)
        with readable_copy(call.profile_text.encode()) as path:
            return worker.serve(replace(call.request, profile_path=str(path)), call.timeout_s)

    def _renew(self, call: RankRequest) -> None:
        self._end_worker()
        rendezvous = call.settings.rendezvous
        assert rendezvous is not None
        settings = replace(call.settings, device=self._device, rendezvous=replace(rendezvous, rank=self.rank))
        worker = RankWorker(settings, bench=call.bench, reference_timeout_s=call.reference_timeout_s)
        with self._lock:
            self._worker, self._generation = worker, call.generation
            stop = self._aborted >= call.number
        if stop:
            worker.stop()

    def _end_worker(self) -> None:
        if self._worker is not None:
            self._worker.stop()
            self._worker.close()
            self._worker = None


def serve(host: str, port: int, key: bytes, rank: int, local_rank: int) -> None:
    """Run the relay of one rank until the probe is over; raises ProbeFailure where the coordinator is lost."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the coordinator's to handle
    try:
        connection = connect(host, port, key, CONNECT_TIMEOUT_S)
    except OSError as error:
        raise ProbeFailure(f"rank {rank} cannot reach rank 0 at {host}:{port}: {error.strerror or error}") from None
    relay = Relay(connection, rank, local_rank)
    with contextlib.suppress(EOFError):  # said below
        relay.run()
    if not relay.told_to_quit:
        raise ProbeFailure(f"rank {rank}: rank 0 ended before the probe was over")


def main(arguments: Sequence[str]) -> int:
    """Run a relay on the coordinator's own host, which it does not outlive."""
    host, port, rank, local_rank, parent = arguments
    die_with_parent(int(parent))
    key = bytes.fromhex(sys.stdin.readline().strip())
    try:
        serve(host, int(port), key, int(rank), int(local_rank))
    except RingAttentionError as error:
        print(f"Error: {error}", file=sys.stderr)
        return int(ExitCode.ERROR)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
