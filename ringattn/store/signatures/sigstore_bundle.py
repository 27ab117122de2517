"""Sigstore bundles, and the identities that a file allows to sign. Verified offline, against a trusted root in a file.

``sigstore`` does the verifying and is imported when a bundle is there. What is accepted is what ``cosign sign-blob``
and ``sigstore sign`` write for a file, and what ``gh attestation verify`` accepts of one: in-toto statements of its
provenance.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ringattn.errors import StoreError, one_line
from ringattn.wording import needs_package

from .ssh_signature import SignatureFault

SUFFIX = ".sigstore.json"
MAX_BYTES = 2**20  # some 10 KB for a file, 20 to 100 KB with a statement of its provenance
NEEDS_SIGSTORE = needs_package("Sigstore bundles", "sigstore 4", "sigstore")

_STATEMENT = "application/vnd.in-toto+json"
_PROVENANCE = "https://slsa.dev/provenance/v1"  # other statements may say that a file failed


@dataclass(frozen=True, slots=True)
class Identity:
    """Subject of a signing certificate, an address or a URL of a workflow, and the OIDC issuer that vouches for it."""

    subject: str
    issuer: str

    def __str__(self) -> str:
        return f"{self.subject} ({self.issuer})"


@dataclass(frozen=True, slots=True)
class Identities:
    """Identities that may sign, those of the file ``source``; the trusted root is Sigstore's own without a file."""

    allowed: tuple[Identity, ...] = ()
    source: str = ""
    trusted_root: Path | None = None


NOBODY = Identities()


def parse_identities(text: str, source: str) -> tuple[Identity, ...]:
    """Return the identities that may sign, one a line; StoreError, with the line, for what is none.

    They are compared as they are, as cosign does with --certificate-identity and --certificate-oidc-issuer.
    """
    identities = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.split()
        if not fields or fields[0].startswith("#"):
            continue
        if len(fields) != 2 or not fields[1].startswith(("https://", "http://")):
            fault = "is no line of subject and OIDC issuer, such as release@example.com https://accounts.google.com"
            raise StoreError(source, f"line {number}: {fault}")
        if "*" in line:
            raise StoreError(source, f"line {number}: holds a pattern; write each subject and issuer out")
        identities.append(Identity(*fields))
    return tuple(identities)


def preload() -> None:
    """Import the package, 0.4 s of this computer's time, where it is installed."""
    try:
        import sigstore.verify  # noqa: F401
    except ImportError:  # said where there is a bundle
        return


def signer_of_bundle(content: bytes, bundle: bytes, identities: Identities) -> Identity:
    """Return the allowed identity that signed ``content``, or the statement of its provenance, in a bundle.

    SignatureFault, which says why, for anything else.
    """
    if not identities.source:
        raise SignatureFault(
            "has a Sigstore bundle, and no file allows an identity to sign; write lines of SUBJECT ISSUER to "
            "allowed_identities, beside allowed_signers"
        )
    try:
        from sigstore.errors import Error
        from sigstore.models import Bundle
    except ImportError:
        raise SignatureFault(f"has a Sigstore bundle: {NEEDS_SIGSTORE}") from None
    verifier, policy = _verifier_of(identities.trusted_root), _Allowed(identities)
    try:
        plain = json.loads(bundle)
        parsed = Bundle.from_json(bundle)
        if "dsseEnvelope" in plain:
            kind, payload = verifier.verify_dsse(parsed, policy)
            _check_statement(kind, payload, content)
        else:
            verifier.verify_artifact(content, parsed, policy)
    except SignatureFault:
        raise
    except Exception as error:  # what is hostile in a bundle surfaces in any of the packages that take it apart
        told = str(error) if isinstance(error, Error) else "it is damaged"
        why = "it is not JSON" if isinstance(error, json.JSONDecodeError) else (told.splitlines() or [""])[0][:300]
        raise SignatureFault(one_line(f"has a Sigstore bundle that does not verify: {why}")) from error
    return policy.signer


class _Allowed:
    """Policy for the package: the certificate is of an allowed identity, which is remembered."""

    signer: Identity

    def __init__(self, identities: Identities) -> None:
        self._identities = identities

    def verify(self, certificate: Any) -> None:
        """Raise SignatureFault where it is of no allowed identity. The package has checked the certificate before."""
        from cryptography.x509 import SubjectAlternativeName
        from sigstore.errors import VerificationError
        from sigstore.verify import policy

        for identity in self._identities.allowed:
            issuer = policy.AnyOf([policy.OIDCIssuer(identity.issuer), policy.OIDCIssuerV2(identity.issuer)])
            try:
                policy.AllOf([policy.Identity(identity=identity.subject), issuer]).verify(certificate)
            except VerificationError:
                continue
            self.signer = identity
            return
        names = certificate.extensions.get_extension_for_class(SubjectAlternativeName).value
        subject = one_line(", ".join(str(name.value) for name in names))
        raise SignatureFault(
            f"is signed by {subject}, whom {self._identities.source} does not name with the issuer of its certificate"
        )


def _check_statement(kind: str, payload: bytes, content: bytes) -> None:
    """Raise SignatureFault unless an in-toto statement is of the provenance of a file with this content."""
    statement = json.loads(payload) if kind == _STATEMENT else {}
    if statement.get("predicateType") != _PROVENANCE:
        raise SignatureFault(f"has a Sigstore bundle with no statement of its provenance ({_PROVENANCE})")
    digest = hashlib.sha256(content).hexdigest()
    if all(subject["digest"].get("sha256") != digest for subject in statement["subject"]):
        raise SignatureFault("has a Sigstore bundle with a statement of another file")


def _verifier_of(trusted_root: Path | None) -> Any:
    """Return the package's verifier for a trusted root, read anew when its file changes; SignatureFault for none."""
    try:
        return _cached_verifier(trusted_root, trusted_root.stat() if trusted_root is not None else None)
    except Exception as error:
        where = trusted_root or "Sigstore's own"
        why = getattr(error, "strerror", None) or type(error).__name__  # not its text, which shows what is in the file
        raise SignatureFault(
            f"has a Sigstore bundle, and the trusted root, {where}, cannot be used ({why}); RINGTUNE_TRUSTED_ROOT "
            "names another file"
        ) from error


@lru_cache(maxsize=4)
def _cached_verifier(trusted_root: Path | None, _status: os.stat_result | None) -> Any:
    from sigstore.models import TrustedRoot
    from sigstore.verify import Verifier

    if trusted_root is None:
        return Verifier.production(offline=True)
    return Verifier(trusted_root=TrustedRoot.from_file(str(trusted_root)))
