"""Coordinator of all ranks: gathers their relays, asks them together, and ends them together."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

from autotune.children import child_command, child_environ
from autotune.exit_codes import NoDevice, ProbeFailure, UsageFailure
from autotune.measure.worker_evaluator import WorkerBug
from ringattn.errors import DeviceError
from ringattn.hardware.facts import HardwareFacts

from .launcher import THREADS, TorchrunRank
from .merging import disagreement, ranks_text
from .protocol import Abort, Hello, Quit, RankAnswer, RankRequest, Welcome, accept, listen
from .relay import serve

GATHER_TIMEOUT_S = 120.0  # for every rank to come, and to say what it runs on
GRACE_S = 2.0
ABORT_TIMEOUT_S = 30.0
QUIT_TIMEOUT_S = 5.0


class Coordinator:
    """Coordinates the ranks of a probe; a context manager that ends every process it started."""

    def __init__(
        self,
        world: int,
        device_kind: str,
        launched: TorchrunRank | None,
        environ: Mapping[str, str],
        *,
        grace_s: float = GRACE_S,
    ) -> None:
        """Gather ``world`` ranks: those that torchrun started (``launched``), or new ones on this host.

        ``grace_s``: for the other ranks to answer by themselves once one has failed.

        Raises ProbeFailure where one does not come, NoDevice where one has no device, UsageFailure where they differ.
        """
        self.world = world
        self.host = "127.0.0.1" if launched is None else launched.master_host
        self.facts: HardwareFacts
        self.hosts = 1
        self._grace_s = grace_s
        self._number = 0
        self._generation = 0
        self._children: list[subprocess.Popen[bytes]] = []
        self._links: dict[int, Connection] = {}
        try:
            self._gather(device_kind, launched, environ)
            self._store = _store(self.host)
        except BaseException:
            self.close()
            raise

    @property
    def store_port(self) -> int:
        """Return the port of the store at which workers meet."""
        return int(self._store.port)

    def _gather(self, device_kind: str, launched: TorchrunRank | None, environ: Mapping[str, str]) -> None:
        key = secrets.token_bytes(32)
        with listen("" if launched is not None else self.host) as server:
            port = server.getsockname()[1]
            if launched is not None:
                publish(launched, port, key)
            own = range(self.world) if launched is None else (0,)
            for rank in own:
                local_rank = rank if launched is None else launched.local_rank
                self._children.append(self._start(port, key, rank, local_rank, environ, torchrun=launched is not None))
            hellos = self._accept_ranks(server, key, device_kind)
        facts = [hellos[rank].facts for rank in range(self.world)]
        found = [each for each in facts if each is not None]
        if len(found) < self.world:
            rank = facts.index(None)
            raise NoDevice(f"rank {rank}: {hellos[rank].error}")
        differs = disagreement(found)
        if differs:
            raise UsageFailure(differs)
        self.facts = found[0]
        self.hosts = len({hello.host for hello in hellos.values()})

    def _start(
        self, port: int, key: bytes, rank: int, local_rank: int, environ: Mapping[str, str], *, torchrun: bool
    ) -> subprocess.Popen[bytes]:
        environ = child_environ(environ)
        if not torchrun and self.world > 1:
            environ.setdefault(THREADS, "1")  # as torchrun does, whose jobs are to find this profile
        words = (self.host, str(port), str(rank), str(local_rank), str(os.getpid()))
        child = subprocess.Popen(
            child_command("autotune.distributed.relay", *words),
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            env=environ,
            start_new_session=True,  # Ctrl-C reaches the coordinator only, which ends the relays
        )
        assert child.stdin is not None
        child.stdin.write(key.hex().encode() + b"\n")
        child.stdin.close()
        return child

    def _accept_ranks(self, server: socket.socket, key: bytes, device_kind: str) -> dict[int, Hello]:
        """Return the first message of every rank."""
        deadline = time.monotonic() + GATHER_TIMEOUT_S
        hellos: dict[int, Hello] = {}
        unnamed: list[Connection] = []
        while len(hellos) < self.world:
            if time.monotonic() > deadline:
                missing = [rank for rank in range(self.world) if rank not in hellos]
                raise ProbeFailure(
                    f"{ranks_text(missing)} of {self.world} did not come within {GATHER_TIMEOUT_S:.0f} s; "
                    "start the same command on every rank"
                )
            if any(child.poll() is not None for child in self._children):
                raise ProbeFailure("a process of this host's ranks ended before it began; what it printed says why")
            connection = accept(server, key, 0.2) if len(hellos) + len(unnamed) < self.world else None
            if connection is not None:
                connection.send(Welcome(device_kind))
                unnamed.append(connection)
            for ready in wait(unnamed, 0.05):
                assert isinstance(ready, Connection)
                unnamed.remove(ready)
                hello = _received(ready, "a rank")
                assert isinstance(hello, Hello)
                if hello.rank in self._links:
                    raise UsageFailure(f"two processes say that they are rank {hello.rank}; use torchrun or --nproc")
                self._links[hello.rank], hellos[hello.rank] = ready, hello
        return hellos

    def new_generation(self) -> int:
        """Return a number that no process group of this coordinator has had."""
        self._generation += 1
        return self._generation

    def ask(self, request: RankRequest) -> list[tuple[int, RankAnswer]]:
        """Return the answers of all ranks, in the order in which they came.

        As soon as one is bad the others have ``grace_s`` to end by themselves; then their workers are ended for them.
        Raises ProbeFailure when a rank itself is lost, and what relays raised.
        """
        self._number += 1
        request = replace(request, number=self._number)
        self._tell(request)
        waiting = {link: rank for rank, link in self._links.items()}
        answers: list[tuple[int, RankAnswer]] = []
        limit: float | None = None
        aborted = False
        while waiting:
            timeout_s = None if limit is None else max(0.0, limit - time.monotonic())
            ready = wait(list(waiting), timeout_s)
            for link in ready:
                assert isinstance(link, Connection)
                answer = _received(link, f"rank {waiting[link]}")
                assert isinstance(answer, RankAnswer)
                if answer.number != self._number:
                    continue  # of a call that was given up
                answers.append((waiting.pop(link), answer))
                if not answer.good and limit is None:
                    limit = time.monotonic() + self._grace_s
            if limit is not None and waiting and time.monotonic() >= limit:
                if aborted:
                    ranks = sorted(waiting.values())
                    raise ProbeFailure(f"{ranks_text(ranks)} could not be stopped within {ABORT_TIMEOUT_S:.0f} s")
                self._tell(Abort(self._number), list(waiting))
                aborted, limit = True, time.monotonic() + ABORT_TIMEOUT_S
        self._raise_errors(answers)
        return answers

    def _raise_errors(self, answers: Sequence[tuple[int, RankAnswer]]) -> None:
        own = [(rank, answer) for rank, answer in answers if not answer.aborted]
        for rank, answer in own:
            if answer.bug:
                raise WorkerBug(f"rank {rank}:\n{answer.bug}")
        for rank, answer in own:
            if answer.no_device:
                raise DeviceError(f"rank {rank}: {answer.no_device}")

    def rest(self) -> None:
        """End the workers; the relays stay. A lost relay is reported with the next request."""
        self._tell_those_left(Abort())

    def _tell(self, message: Any, links: Sequence[Connection] | None = None) -> None:
        for rank, link in self._links.items():
            if links is None or link in links:
                try:
                    link.send(message)
                except OSError:
                    raise _lost(f"rank {rank}") from None

    def _tell_those_left(self, message: Any) -> None:
        for link in self._links.values():
            with contextlib.suppress(OSError):  # it ended before
                link.send(message)

    def close(self) -> None:
        """Tell every rank to end; the processes of this host have ended on return."""
        self._tell_those_left(Quit())
        deadline = time.monotonic() + QUIT_TIMEOUT_S
        for child in self._children:
            try:
                child.wait(max(0.0, deadline - time.monotonic()) if self._links else 0.0)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for link in self._links.values():
            link.close()
        self._links.clear()

    def __enter__(self) -> Coordinator:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _received(link: Connection, who: str) -> Any:
    try:
        return link.recv()
    except (EOFError, OSError):
        raise _lost(who) from None


def _lost(who: str) -> ProbeFailure:
    return ProbeFailure(f"{who} is lost: its process was ended, or its host is gone; run the same command to go on")


def _store(host: str) -> Any:
    """Return a store on a free port of this host, for the workers of all ranks."""
    import torch.distributed as dist

    return dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def _torchrun_store(launched: TorchrunRank) -> Any:
    """Return our part of torchrun's own store."""
    import torch.distributed as dist
    from torch.distributed.rendezvous import rendezvous

    try:
        store, _, _ = next(iter(rendezvous("env://", launched.rank, launched.world)))
    except (RuntimeError, ValueError) as error:
        raise ProbeFailure(
            f"rank {launched.rank} cannot reach torchrun's store at "
            f"{launched.master_host}:{launched.master_port}: {error}"
        ) from None
    return dist.PrefixStore(f"ringtune/{launched.attempt}", store)  # type: ignore[attr-defined]


_stores: list[Any] = []  # rank 0 may hold torchrun's store itself, which must live as long as the process


def publish(launched: TorchrunRank, port: int, key: bytes) -> None:
    """Tell the ranks that torchrun started where the coordinator is."""
    store = _torchrun_store(launched)
    _stores.append(store)
    store.set("coordinator", f"{port} {key.hex()}")


def follow(launched: TorchrunRank) -> None:
    """Serve as one of the ranks that torchrun started beside rank 0, until the probe is over."""
    from datetime import timedelta

    store = _torchrun_store(launched)
    try:
        store.wait(["coordinator"], timedelta(seconds=GATHER_TIMEOUT_S))
        port, key = store.get("coordinator").decode().split()
    except RuntimeError:
        raise ProbeFailure(f"rank {launched.rank}: rank 0 did not begin within {GATHER_TIMEOUT_S:.0f} s") from None
    serve(launched.master_host, int(port), bytes.fromhex(key), launched.rank, launched.local_rank)
