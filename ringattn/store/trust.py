"""Decides which profiles of a store are believed: any, those that are whole, or those that someone named has signed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ringattn.errors import StoreError
from ringattn.profile.access import TRUST_VARIABLE, TrustPolicy, other_writers, trust_policy
from ringattn.profile.locations import user_folder

from .allowed_signers import Signer, parse_signers
from .ssh_signature import Signature, SignatureFault

SIGNERS_VARIABLE = "RINGTUNE_ALLOWED_SIGNERS"
KEY_VARIABLE = "RINGTUNE_SIGNING_KEY"
SYSTEM_SIGNERS = Path("/etc/ringtune/allowed_signers")
_MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Trust:
    """Policy for what is read out of stores; ``signed`` believes ``signers``, who are those of the file ``source``."""

    policy: TrustPolicy = "checksum"
    signers: tuple[Signer, ...] = ()
    source: str = ""

    @property
    def asks_for_signatures(self) -> bool:
        return self.policy == "signed"

    @property
    def asks_for_checksums(self) -> bool:
        return self.policy != "any"

    def signer(self, content: bytes, armored: bytes | None, now_s: float | None = None) -> str:
        """Return who signed; SignatureFault where nobody did that is named, or whose key is not valid now.

        ``now_s`` is the time since 1970, this host's unless given: a signature does not say when it was made.
        """
        if armored is None:
            raise SignatureFault("is not signed")
        signature = Signature.parse(armored)
        signature.check(content)
        now_s = time.time() if now_s is None else now_s
        theirs = [signer for signer in self.signers if signer.key == signature.public_key]
        for signer in theirs:
            if signer.is_valid(now_s):
                return signer.principals
        if theirs:
            clock = time.strftime("%Y-%m-%d %H:%M", time.gmtime(now_s))
            raise SignatureFault(
                f"is signed with a key of {theirs[0].principals} that {self.source} holds for valid "
                f"{theirs[0].validity}, and this host's clock says {clock} UTC"
            )
        raise SignatureFault(f"is signed by nobody whom {self.source} names")


CHECKSUM = Trust()


class StoreRefused(StoreError):
    """Store that is not asked, since others may change what signatures are to protect."""


def trust_of(environ: Mapping[str, str], home: Path) -> Trust:
    """Return the policy of RINGTUNE_TRUST; StoreError for one that is unknown, and for ``signed`` without signers."""
    policy = trust_policy(environ)
    return signed_trust(environ, home) if policy == "signed" else Trust(policy)


def signed_trust(environ: Mapping[str, str], home: Path) -> Trust:
    """Return the policy that asks for signatures, with the signers of the first file that is there.

    StoreError for a file that others may write: they could name themselves.
    """
    named = environ.get(SIGNERS_VARIABLE)
    places = (Path(named),) if named else (user_folder(environ, home) / "allowed_signers", SYSTEM_SIGNERS)
    path = next((place for place in places if place.is_file()), None)
    if path is None:
        raise StoreError(
            TRUST_VARIABLE, f"asks for signatures, and there is no {' or '.join(map(str, places))} that names signers"
        )
    if why := other_writers(path):
        raise StoreError(str(path), f"others may change who signs: {why}; chown or chmod go-w that")
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if len(text) > _MAX_BYTES:
        raise StoreError(str(path), f"has more than {_MAX_BYTES} bytes")
    return Trust("signed", parse_signers(text, str(path)), str(path))
