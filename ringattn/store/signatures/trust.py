"""Decides which profiles of a store are believed: any, those that are whole, or those that someone named has signed."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from ringattn.errors import StoreError
from ringattn.profile.access import TRUST_VARIABLE, TrustPolicy, other_writers, trust_policy
from ringattn.profile.locations import user_folder
from ringattn.profile.whole_file import read_regular

from .allowed_signers import Signer, parse_signers
from .sigstore_bundle import NOBODY, Identities, parse_identities, preload, signer_of_bundle
from .ssh_signature import Signature, SignatureFault

SIGNERS_VARIABLE = "RINGTUNE_ALLOWED_SIGNERS"
IDENTITIES_VARIABLE = "RINGTUNE_ALLOWED_IDENTITIES"
ROOT_VARIABLE = "RINGTUNE_TRUSTED_ROOT"
KEY_VARIABLE = "RINGTUNE_SIGNING_KEY"
SYSTEM_FOLDER = Path("/etc/ringtune")
_MAX_BYTES = 2**20


@dataclass(frozen=True, slots=True)
class Signatures:
    """Signatures beside a profile: one as OpenSSH writes it, and a Sigstore bundle; None where there is none."""

    ssh: bytes | None = None
    bundle: bytes | None = None


@dataclass(frozen=True, slots=True)
class Trust:
    """Policy for what is read out of stores.

    ``signed`` believes ``signers``, who are those of the file ``source``, and ``identities``.
    """

    policy: TrustPolicy = "checksum"
    signers: tuple[Signer, ...] = ()
    source: str = ""
    identities: Identities = NOBODY

    @property
    def asks_for_signatures(self) -> bool:
        return self.policy == "signed"

    @property
    def asks_for_checksums(self) -> bool:
        return self.policy != "any"

    def prepare(self) -> None:
        """Import what signatures need, so that it is not waited for as if a store did not answer."""
        if self.identities.source:
            preload()

    def signer(self, content: bytes, signatures: Signatures, now_s: float | None = None) -> str:
        """Return who signed. SignatureFault where nobody did that is named, or whose key is not valid now.

        Every signature that is there must hold: one that cannot be checked is never passed over for another.
        ``now_s`` is the time since 1970, this host's unless given: a signature by a key does not say when it was made.
        """
        signers = []
        if signatures.ssh is not None:
            signers.append(self._owner_of_key(content, signatures.ssh, time.time() if now_s is None else now_s))
        if signatures.bundle is not None:
            signers.append(str(signer_of_bundle(content, signatures.bundle, self.identities)))
        if not signers:
            raise SignatureFault("is not signed")
        return " and ".join(signers)

    def _owner_of_key(self, content: bytes, armored: bytes, now_s: float) -> str:
        signature = Signature.parse(armored)
        signature.check(content)
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
        if not self.source:
            raise SignatureFault("is signed with a key, and there is no allowed_signers that names signers")
        raise SignatureFault(f"is signed by nobody whom {self.source} names")


CHECKSUM = Trust()


class StoreRefused(StoreError):
    """Store that is not asked, since others may change what signatures are to protect."""


def trust_of(environ: Mapping[str, str], home: Path) -> Trust:
    """Return the policy of RINGTUNE_TRUST; StoreError for one that is unknown, and for ``signed`` without signers."""
    policy = trust_policy(environ)
    return signed_trust(environ, home) if policy == "signed" else Trust(policy)


def signed_trust(environ: Mapping[str, str], home: Path) -> Trust:
    """Return the policy that asks for signatures, with the signers and identities of the first files that are there.

    StoreError without any, and for a file that others may write: they could name themselves.
    """
    user = user_folder(environ, home)
    signers = _named_file(environ, SIGNERS_VARIABLE, "allowed_signers", user)
    identities = _named_file(environ, IDENTITIES_VARIABLE, "allowed_identities", user)
    if signers is None and identities is None:
        places = " or ".join(
            str(folder / name) for name in ("allowed_signers", "allowed_identities") for folder in (user, SYSTEM_FOLDER)
        )
        raise StoreError(TRUST_VARIABLE, f"asks for signatures, and there is no {places} that names signers")
    trust = Trust("signed")
    if signers is not None:
        trust = replace(trust, signers=parse_signers(_text(signers), str(signers)), source=str(signers))
    if identities is not None:
        root = _named_file(environ, ROOT_VARIABLE, "trusted_root.json", user)
        if root is not None:
            _check_own(root)
        allowed = Identities(parse_identities(_text(identities), str(identities)), str(identities), root)
        trust = replace(trust, identities=allowed)
    return trust


def _named_file(environ: Mapping[str, str], variable: str, name: str, user: Path) -> Path | None:
    """Return the file that a variable names, or the first of the usual places; None where none is there."""
    if named := environ.get(variable):
        if not Path(named).is_file():
            raise StoreError(TRUST_VARIABLE, f"asks for signatures, and there is no {named}, which {variable} names")
        return Path(named)
    return next((folder / name for folder in (user, SYSTEM_FOLDER) if (folder / name).is_file()), None)


def _check_own(path: Path) -> None:
    if why := other_writers(path):
        raise StoreError(str(path), f"others may change who signs: {why}; chown or chmod go-w that")


def _text(path: Path) -> str:
    _check_own(path)
    try:
        return read_regular(path, _MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StoreError(str(path), f"cannot be read: {getattr(error, 'strerror', None) or error}") from None
