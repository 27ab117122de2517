"""Messages between the coordinator and its relays, and the connections that carry them.

A connection is authenticated with a key that only the ranks of this probe know, and notices a host that is gone.
"""

from __future__ import annotations

import errno
import socket
import struct
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import TYPE_CHECKING, Any

from autotune.measure.evaluator import Block, Fault
from autotune.measure.messages import Request
from ringattn.hardware.facts import HardwareFacts

if TYPE_CHECKING:
    from autotune.measure.bench import BenchSettings

HANDSHAKE_S = 10
_IDLE_S, _PROBE_EVERY_S, _PROBES = 15, 5, 3  # a host that is gone is noticed after half a minute


@dataclass(frozen=True, slots=True)
class Welcome:
    """First message of the coordinator: the kind of device to use, "cuda" or "cpu"."""

    device_kind: str


@dataclass(frozen=True, slots=True)
class Hello:
    """First message of a rank: its facts and its host, which is compared and never written down."""

    rank: int
    facts: HardwareFacts | None
    host: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class RankRequest:
    """Request to the worker of every rank. Workers of one ``generation`` share a process group."""

    number: int
    generation: int
    settings: BenchSettings
    bench: str
    reference_timeout_s: float
    request: Request
    timeout_s: float
    profile_text: str = ""


@dataclass(frozen=True, slots=True)
class Abort:
    """End the worker in request ``number``, where another rank failed, or with None whatever it does."""

    number: int | None = None


@dataclass(frozen=True, slots=True)
class Quit:
    """End the relay."""


@dataclass(frozen=True, slots=True)
class RankAnswer:
    """Answer of one rank to a request.

    ``value`` is what the worker answered. ``aborted``: it was told to stop, so a failure in ``value`` is not its own.
    ``no_device`` and ``bug`` are errors to raise, as text. ``started_s``: seconds that starting a worker took of it.
    """

    number: int
    value: Any = None
    aborted: bool = False
    no_device: str = ""
    bug: str = ""
    unmonitored: tuple[str, ...] = ()
    started_s: float = 0.0

    @property
    def fault(self) -> Fault | None:
        """Return how the worker failed; a block ends with that."""
        value = self.value
        if isinstance(value, Block):
            value = value.results[-1] if value.results else None
        return value if isinstance(value, Fault) else None

    @property
    def ended_from_outside(self) -> bool:
        """Return whether another process ended the worker, which says nothing of the candidate."""
        return self.fault is not None and self.fault.ended_from_outside

    @property
    def good(self) -> bool:
        return not (self.fault or self.aborted or self.no_device or self.bug)


def listen(host: str) -> socket.socket:
    """Return a listening socket on a free port of ``host``, an address of this machine, or empty for all."""
    return socket.create_server((host, 0), backlog=128)


def accept(server: socket.socket, key: bytes, timeout_s: float) -> Connection | None:
    """Return the next relay that knows the key; None when none came in time, or one without the key."""
    server.settimeout(timeout_s)
    try:
        link, _ = server.accept()
    except TimeoutError:
        return None
    return _authenticated(link, key, first=True)


def connect(host: str, port: int, key: bytes, timeout_s: float) -> Connection:
    """Connect to the coordinator; raises OSError where that fails."""
    link = socket.create_connection((host, port), timeout=timeout_s)
    connection = _authenticated(link, key, first=False)
    if connection is None:
        raise ConnectionRefusedError(errno.ECONNREFUSED, "the coordinator does not know this rank")
    return connection


def _authenticated(link: socket.socket, key: bytes, *, first: bool) -> Connection | None:
    link.setblocking(True)
    link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", _IDLE_S), ("TCP_KEEPINTVL", _PROBE_EVERY_S), ("TCP_KEEPCNT", _PROBES)):
        link.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", HANDSHAKE_S, 0))
    waiting = link.dup()  # Connection hides the socket, whose timeout ends with the handshake
    connection = Connection(link.detach())
    try:
        for step in (deliver_challenge, answer_challenge) if first else (answer_challenge, deliver_challenge):
            step(connection, key)
    except (AuthenticationError, EOFError, OSError):
        connection.close()
        return None
    else:
        waiting.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
        return connection
    finally:
        waiting.close()
