"""Beacons: a small file a node, with what profile it runs on and why, so that a fleet can be looked at."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

from ringattn.errors import RingAttentionError, one_line
from ringattn.hardware.names import slug
from ringattn.store.backends.backend import Backend

from .names import BEACONS

_LIMIT = 8192  # bytes
_TEXT = 400  # characters of a field
MAX_BEACONS = 20_000
NODE_VARIABLE = "RINGTUNE_NODE"


@dataclass(frozen=True, slots=True)
class Beacon:
    """State of one node: its kind and ranks, the tier, the profile's file name, and why where it is the heuristic.

    A node that is gone leaves its last one.
    """

    node: str
    kind: str
    device_name: str
    world: int
    tier: str
    profile: str
    why: str
    seen: datetime  # in UTC, when this was written

    @property
    def name(self) -> str:
        """The file's name: readable, and of its own for every node and number of ranks."""
        own = hashlib.sha256(self.node.encode("utf-8", "replace")).hexdigest()[:8]
        return f"{BEACONS}/{self.kind}/{slug(self.node)}-{own}-x{self.world}.json"

    def leave(self, backend: Backend) -> None:
        """Write the beacon, over this node's earlier one."""
        plain = asdict(self) | {"seen": self.seen.isoformat(timespec="seconds")}
        short = {key: value[:_TEXT] if isinstance(value, str) else value for key, value in plain.items()}
        backend.put(self.name, json.dumps(short).encode("utf-8"))


def this_node() -> str:
    """Return the name of RINGTUNE_NODE, which a pod whose host's name is its own has, or this host's."""
    return os.environ.get(NODE_VARIABLE) or platform.node() or "unnamed"


def read_beacons(backend: Backend, notes: list[str]) -> Iterable[Beacon]:
    """Yield the beacons in a store; a note for each that cannot be read."""
    names = backend.names(BEACONS)
    if len(names) > MAX_BEACONS:
        notes.append(f"{backend.url}: {len(names)} beacons, of which {MAX_BEACONS} are read")
    for name in names[:MAX_BEACONS]:
        try:
            yield _parsed(backend.read(name, _LIMIT))
        except FileNotFoundError:
            continue
        except (RingAttentionError, ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
            notes.append(one_line(f"{backend.url}: {name}: is no beacon: {error}"))


def _parsed(content: bytes) -> Beacon:
    plain = json.loads(content)
    names = Beacon.__dataclass_fields__.keys() - {"world", "seen"}
    texts = {key: one_line(str(plain[key]))[:_TEXT] for key in names}
    seen = datetime.fromisoformat(plain["seen"] if "seen" in plain else plain["day"])  # earlier versions: the day alone
    return Beacon(world=int(plain["world"]), seen=seen if seen.tzinfo else seen.replace(tzinfo=UTC), **texts)
