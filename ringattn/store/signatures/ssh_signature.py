"""Signatures as OpenSSH writes them (``ssh-keygen -Y sign -n ringtune``), with Ed25519 keys: PROTOCOL.sshsig.

``cryptography`` does the arithmetic and is imported when a signature is made or checked.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
from dataclasses import dataclass
from pathlib import Path

from ringattn.profile.whole_file import read_regular
from ringattn.wording import needs_package

NAMESPACE = "ringtune"  # a signature made for mail or commits is none for a profile
KEY_TYPE = b"ssh-ed25519"
MAX_BYTES = 4096

_MAX_KEY_BYTES = 2**16
_MAGIC = b"SSHSIG"
_BEGIN, _END = "-----BEGIN SSH SIGNATURE-----", "-----END SSH SIGNATURE-----"
_HASHES = {b"sha256": hashlib.sha256, b"sha512": hashlib.sha512}
NEEDS_CRYPTOGRAPHY = needs_package("signatures", "cryptography", "sign")


class SignatureFault(Exception):
    """Reason why a signature or a key cannot be used, for a message that names the file."""


@dataclass(frozen=True, slots=True)
class Signature:
    """Parts of a signature: the public key in OpenSSH's encoding, the name of the hash, and 64 bytes."""

    public_key: bytes
    hash_name: bytes
    signature: bytes

    @classmethod
    def parse(cls, armored: bytes) -> Signature:
        """Return the parts of an armored signature for our namespace; SignatureFault for anything else."""
        lines = armored.decode("ascii", "replace").split()
        text = "".join(lines)
        begin, end = "".join(_BEGIN.split()), "".join(_END.split())
        if not (text.startswith(begin) and text.endswith(end)) or len(armored) > MAX_BYTES:
            raise SignatureFault("is no SSH signature")
        try:
            blob = base64.b64decode(text[len(begin) : -len(end)], validate=True)
            if blob[:6] != _MAGIC or struct.unpack(">I", blob[6:10]) != (1,):
                raise SignatureFault("is no SSH signature of version 1")
            public_key, namespace, _reserved, hash_name, signature = _strings(blob[10:], 5)
            kind, raw = _strings(signature, 2)
        except (binascii.Error, struct.error) as error:
            raise SignatureFault("is a damaged SSH signature") from error
        if namespace != NAMESPACE.encode():
            raise SignatureFault(f"is for {namespace.decode('ascii', 'replace')!r}, not for {NAMESPACE!r}")
        if kind != KEY_TYPE or hash_name not in _HASHES:
            raise SignatureFault("is not of an Ed25519 key")
        return cls(public_key, hash_name, raw)

    def check(self, content: bytes) -> None:
        """Raise SignatureFault unless this is the signature of ``content`` by its public key."""
        try:
            from cryptography.exceptions import InvalidSignature
            from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
        except ImportError:
            raise SignatureFault(NEEDS_CRYPTOGRAPHY) from None
        try:
            _, raw = _strings(self.public_key, 2)
            Ed25519PublicKey.from_public_bytes(raw).verify(self.signature, signed_bytes(content, self.hash_name))
        except (InvalidSignature, ValueError, struct.error):
            raise SignatureFault("is not the signature of this file") from None


def signed_bytes(content: bytes, hash_name: bytes) -> bytes:
    """Return what is signed for a file: our namespace and the file's hash."""
    parts = (NAMESPACE.encode(), b"", hash_name, _HASHES[hash_name](content).digest())
    return _MAGIC + b"".join(map(_string, parts))


def sign(content: bytes, key_file: Path) -> bytes:
    """Return the armored signature of ``content`` with a private Ed25519 key in OpenSSH's format.

    SignatureFault where the key cannot be read, is of another type or has a passphrase.
    """
    try:
        from cryptography.exceptions import UnsupportedAlgorithm
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    except ImportError:
        raise SignatureFault(NEEDS_CRYPTOGRAPHY) from None
    try:
        key = serialization.load_ssh_private_key(read_regular(key_file, _MAX_KEY_BYTES), password=None)
    except OSError as error:
        raise SignatureFault(f"{key_file}: cannot be read ({error.strerror})") from None
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it has a passphrase
        raise SignatureFault(f"{key_file}: is no OpenSSH private key without a passphrase") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise SignatureFault(f"{key_file}: is not an Ed25519 key; ssh-keygen -t ed25519 makes one")
    raw = key.public_key().public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    hash_name = b"sha512"
    made = key.sign(signed_bytes(content, hash_name))
    public = _string(KEY_TYPE) + _string(raw)
    signature = _string(KEY_TYPE) + _string(made)
    parts = (public, NAMESPACE.encode(), b"", hash_name, signature)
    text = base64.b64encode(_MAGIC + struct.pack(">I", 1) + b"".join(map(_string, parts))).decode()
    lines = [text[start : start + 70] for start in range(0, len(text), 70)]
    return "\n".join((_BEGIN, *lines, _END, "")).encode()


def _string(value: bytes) -> bytes:
    return struct.pack(">I", len(value)) + value


def _strings(blob: bytes, count: int) -> list[bytes]:
    """Return so many strings, each after its length, that make up ``blob``; struct.error where they do not."""
    found = []
    for _ in range(count):
        (length,) = struct.unpack(">I", blob[:4])
        if length > len(blob) - 4:
            raise struct.error("cut short")
        found.append(blob[4 : 4 + length])
        blob = blob[4 + length :]
    if blob:
        raise struct.error("surplus bytes")
    return found
