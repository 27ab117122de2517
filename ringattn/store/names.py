"""Names of the files in a store: what a machine's kind is called, and which names are read at all. Pure.

::

    profiles/KIND/xRANKS-SHA256.yaml     a profile of one kind of machine for one number of ranks
    profiles/KIND/xRANKS-SHA256.yaml.sig and .yaml.sigstore.json, its signatures, if it has any
    leases/KIND-xRANKS/NUMBER            who measures that kind; the highest number counts
    beacons/KIND/NODE.json               what a node runs

No part of a name starts with a dot, so that neither ``..`` nor a file that is still being written is one.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, fields

from ringattn.errors import StoreError
from ringattn.hardware.facts import HardwareFacts, fingerprint_name
from ringattn.profile.schema import Fingerprint
from ringattn.store.signatures.sigstore_bundle import SUFFIX

PROFILES, LEASES, BEACONS = "profiles", "leases", "beacons"

_PART = r"[A-Za-z0-9][A-Za-z0-9.+_-]{0,149}"
_NAME = re.compile(rf"{_PART}(?:/{_PART}){{0,3}}", re.ASCII)
_PROFILE = re.compile(rf"{PROFILES}/({_PART})/x([1-9][0-9]{{0,5}})-([0-9a-f]{{64}})\.yaml", re.ASCII)


def kind_of(fingerprint: Fingerprint) -> str:
    """Return the name of a kind of machine, one word for the tuner's files, a store and the runtime.

    Machines of one fingerprint are of one kind; of one kind may be machines that differ in memory, power limit or
    software, between which ``resolve`` decides.
    """
    made = {field.name: getattr(fingerprint, field.name) for field in fields(fingerprint)}
    del made["link_speeds"]
    return fingerprint_name(HardwareFacts(**made))


def file_stem(kind: str, ranks: int) -> str:
    """Return the name, without suffix, of the file in a folder that holds a kind's rows for one number of ranks."""
    return f"{kind}-x{ranks}" if ranks > 1 else kind


@dataclass(frozen=True, slots=True, order=True)
class ProfileName:
    """Name of a profile in a store: the machine's kind, the number of ranks, and the SHA-256 of the file."""

    kind: str
    world: int
    digest: str

    @classmethod
    def of(cls, fingerprint: Fingerprint, world: int, content: bytes) -> ProfileName:
        return cls(kind_of(fingerprint), world, hashlib.sha256(content).hexdigest())

    @classmethod
    def parse(cls, name: str) -> ProfileName | None:
        """Return the parts of a file's name in a store; None for one that is no profile's."""
        match = _PROFILE.fullmatch(name)
        return cls(match[1], int(match[2]), match[3]) if match else None

    def __str__(self) -> str:
        return f"{PROFILES}/{self.kind}/x{self.world}-{self.digest}.yaml"

    @property
    def signature(self) -> str:
        """The file beside it that holds its signature with a key."""
        return f"{self}.sig"

    @property
    def bundle(self) -> str:
        """The file beside it that holds its Sigstore bundle."""
        return f"{self}{SUFFIX}"

    @property
    def short(self) -> str:
        """The name as lists print it, of which commands take any start."""
        return f"{self.kind}/x{self.world}-{self.digest[:12]}"


def is_signature(name: str) -> bool:
    """Tell whether a file's name in a store is that of a signature of a profile, which need not be there."""
    return any(name.endswith(suffix) and ProfileName.parse(name.removesuffix(suffix)) for suffix in (".sig", SUFFIX))


def is_name(name: str) -> bool:
    """Tell whether a name can be one of a store's."""
    return _NAME.fullmatch(name) is not None


def checked(name: str, url: str) -> str:
    """Return ``name``; StoreError where it would lead out of the store at ``url``, or could not be in it."""
    if not is_name(name):
        raise StoreError(url, f"{name!r} is no name in a store; `ringtune list` prints those there are")
    return name


def shown_url(url: str) -> str:
    """Return a URL as messages show it: without a password."""
    return re.sub(r"(//[^:/@]*):[^@/]*@", r"\1:***@", url)
