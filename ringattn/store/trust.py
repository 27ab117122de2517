"""Decides which profiles of a store are believed: those that are whole, or only those that someone named has signed."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringattn.errors import StoreError
from ringattn.profile.locations import user_folder

from .ssh_signature import KEY_TYPE, NAMESPACE, Signature, SignatureFault

TRUST_VARIABLE = "RINGTUNE_TRUST"
SIGNERS_VARIABLE = "RINGTUNE_ALLOWED_SIGNERS"
KEY_VARIABLE = "RINGTUNE_SIGNING_KEY"
SYSTEM_SIGNERS = Path("/etc/ringtune/allowed_signers")
_MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Trust:
    """Policy for what is read out of stores. ``signers`` None: a file that is what its name says is believed.

    Otherwise ``signers`` are (public key, principals), out of ``source``, one of whom must have signed it.
    """

    signers: tuple[tuple[bytes, str], ...] | None = None
    source: str = ""

    @property
    def asks_for_signatures(self) -> bool:
        return self.signers is not None

    def signer(self, content: bytes, armored: bytes | None) -> str:
        """Return who signed; SignatureFault where nobody did that is named."""
        if armored is None:
            raise SignatureFault("is not signed")
        signature = Signature.parse(armored)
        signature.check(content)
        for key, principals in self.signers or ():
            if key == signature.public_key:
                return principals
        raise SignatureFault(f"is signed by nobody whom {self.source} names")


CHECKSUM = Trust()


def trust_of(environ: Mapping[str, str], home: Path) -> Trust:
    """Return the policy of RINGTUNE_TRUST, ``checksum`` or ``signed``; StoreError for another, or without signers."""
    policy = environ.get(TRUST_VARIABLE) or "checksum"
    if policy not in ("checksum", "signed"):
        raise StoreError(TRUST_VARIABLE, f"is {policy!r}; use checksum, or signed")
    return Trust() if policy == "checksum" else signed_trust(environ, home)


def signed_trust(environ: Mapping[str, str], home: Path) -> Trust:
    """Return the policy that asks for signatures, with the signers of the first file that is there."""
    named = environ.get(SIGNERS_VARIABLE)
    places = (Path(named),) if named else (user_folder(environ, home) / "allowed_signers", SYSTEM_SIGNERS)
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise StoreError(
            TRUST_VARIABLE, f"asks for signatures, and there is no {' or '.join(map(str, places))} that names signers"
        )
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return Trust(parse_signers(text, str(path)), str(path))


def parse_signers(text: str, source: str) -> tuple[tuple[bytes, str], ...]:
    """Return (public key, principals) of each Ed25519 key in OpenSSH's ``allowed_signers`` format.

    Of options ``namespaces`` is heeded; StoreError for others, which would restrict what is believed here.
    """
    signers = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = re.findall(r'(?:[^\s"]|"[^"]*")+', line)
        if not fields or fields[0].startswith("#"):
            continue
        where = next((i for i, field in enumerate(fields) if re.fullmatch(r"(?:sk-)?(?:ssh|ecdsa)-\S+", field)), 0)
        if where not in (1, 2) or len(fields) <= where + 1:
            raise StoreError(source, f"line {number}: is no line of principals, options, key type and key")
        if fields[where] != KEY_TYPE.decode():
            continue  # of a type that signs no profile
        options = re.findall(r'([\w-]+)(?:="([^"]*)")?(?:,|$)', fields[1]) if where == 2 else []
        if surplus := [name for name, _ in options if name != "namespaces"]:
            raise StoreError(source, f"line {number}: option {surplus[0]} is not known here; remove it, or the line")
        if options and NAMESPACE not in options[0][1].split(","):
            continue
        try:
            signers.append((base64.b64decode(fields[where + 1], validate=True), fields[0].strip('"')))
        except binascii.Error:
            raise StoreError(source, f"line {number}: its key is not base64") from None
    return tuple(signers)
