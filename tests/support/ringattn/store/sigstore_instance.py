"""A Sigstore of one's own, without a network: a certificate authority, a log of certificates and one of signatures."""

from __future__ import annotations

import base64
import datetime
import hashlib
import json
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID, ObjectIdentifier

SUBJECT, ISSUER = "release@example.com", "https://accounts.example.com"
SIGNED_ON = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)

_ISSUER = ObjectIdentifier("1.3.6.1.4.1.57264.1.1")
_ISSUER_V2 = ObjectIdentifier("1.3.6.1.4.1.57264.1.8")
_CERTIFICATE_TIMESTAMPS = ObjectIdentifier("1.3.6.1.4.1.11129.2.4.2")
_DER, _INFO = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
_SHA256 = ec.ECDSA(hashes.SHA256())


def new_key() -> ec.EllipticCurvePrivateKey:
    return ec.generate_private_key(ec.SECP256R1())


def text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def public(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.public_key().public_bytes(_DER, _INFO)


def key_id(key: ec.EllipticCurvePrivateKey) -> bytes:
    return hashlib.sha256(public(key)).digest()


@dataclass
class Instance:
    """Keys of one Sigstore; its root is valid until ``root_ends``."""

    root_ends: datetime.datetime = SIGNED_ON + datetime.timedelta(days=3650)
    ca_key: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    certificates_key: ec.EllipticCurvePrivateKey = field(default_factory=new_key)
    signatures_key: ec.EllipticCurvePrivateKey = field(default_factory=new_key)

    def __post_init__(self) -> None:
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "a root")])
        own = self.ca_key.public_key()
        usage = x509.KeyUsage(False, False, False, False, False, True, True, False, False)
        self.root = (
            self._certificate(name, own, SIGNED_ON - datetime.timedelta(days=365), self.root_ends)
            .issuer_name(name)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(usage, critical=True)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(own), critical=False)
            .sign(self.ca_key, hashes.SHA256())
        )

    def _certificate(
        self, name: x509.Name, key: Any, begins: datetime.datetime, ends: datetime.datetime
    ) -> x509.CertificateBuilder:
        made = x509.CertificateBuilder().subject_name(name).public_key(key)
        return made.serial_number(x509.random_serial_number()).not_valid_before(begins).not_valid_after(ends)

    def write_root(self, path: Path) -> None:
        """Write the trusted root as ``cosign trusted-root create`` does."""
        valid = {"start": "2025-01-01T00:00:00Z"}

        def log(key: ec.EllipticCurvePrivateKey) -> dict[str, Any]:
            shown = {"rawBytes": text(public(key)), "keyDetails": "PKIX_ECDSA_P256_SHA_256", "validFor": valid}
            ids = {"logId": {"keyId": text(key_id(key))}}
            return {"baseUrl": "https://log.example.com", "hashAlgorithm": "SHA2_256", "publicKey": shown, **ids}

        authority = {
            "subject": {"organization": "example.com", "commonName": "a root"},
            "uri": "https://ca.example.com",
            "certChain": {"certificates": [{"rawBytes": text(self.root.public_bytes(_DER))}]},
            "validFor": valid,
        }
        root = {
            "mediaType": "application/vnd.dev.sigstore.trustedroot+json;version=0.1",
            "tlogs": [log(self.signatures_key)],
            "certificateAuthorities": [authority],
            "ctlogs": [log(self.certificates_key)],
            "timestampAuthorities": [],
        }
        path.write_text(json.dumps(root))

    def issue(self, key: ec.EllipticCurvePrivateKey, subject: str, issuer: str) -> x509.Certificate:
        """Return a certificate for ten minutes, with the promise that it is in the log of certificates."""
        san = x509.RFC822Name(subject) if "@" in subject and "://" not in subject else None
        ends = SIGNED_ON + datetime.timedelta(minutes=5)
        own = x509.AuthorityKeyIdentifier.from_issuer_public_key(self.ca_key.public_key())
        usage = x509.KeyUsage(True, False, False, False, False, False, False, False, False)
        names = x509.SubjectAlternativeName([san or x509.UniformResourceIdentifier(subject)])
        encoded = bytes((0x0C, len(issuer))) + issuer.encode()
        made = (
            self._certificate(x509.Name([]), key.public_key(), ends - datetime.timedelta(minutes=10), ends)
            .issuer_name(self.root.subject)
            .add_extension(usage, critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.CODE_SIGNING]), critical=False)
            .add_extension(own, critical=False)
            .add_extension(names, critical=True)
            .add_extension(x509.UnrecognizedExtension(_ISSUER, issuer.encode()), critical=False)
            .add_extension(x509.UnrecognizedExtension(_ISSUER_V2, encoded), critical=False)
        )
        before = made.sign(self.ca_key, hashes.SHA256()).tbs_certificate_bytes
        time_ms = int(SIGNED_ON.timestamp() * 1000)
        entry = key_id(self.ca_key) + len(before).to_bytes(3, "big") + before
        signature = self.certificates_key.sign(struct.pack("!BBQH", 0, 0, time_ms, 1) + entry + b"\0\0", _SHA256)
        promise = b"\0" + key_id(self.certificates_key) + struct.pack("!QHBBH", time_ms, 0, 4, 3, len(signature))
        promise += signature
        listed = struct.pack("!HH", len(promise) + 2, len(promise)) + promise
        octets = bytes((0x04, len(listed))) if len(listed) < 128 else bytes((0x04, 0x81, len(listed)))
        sct = x509.UnrecognizedExtension(_CERTIFICATE_TIMESTAMPS, octets + listed)
        return made.add_extension(sct, critical=False).sign(self.ca_key, hashes.SHA256())

    def sign(self, content: bytes, subject: str = SUBJECT, issuer: str = ISSUER) -> bytes:
        """Return the bundle that ``cosign sign-blob --bundle`` writes for a file."""
        key = new_key()
        certificate = self.issue(key, subject, issuer)
        signature, digest = key.sign(content, _SHA256), hashlib.sha256(content)
        body = {
            "apiVersion": "0.0.1",
            "kind": "hashedrekord",
            "spec": {
                "data": {"hash": {"algorithm": "sha256", "value": digest.hexdigest()}},
                "signature": {"content": text(signature), "publicKey": {"content": _pem(certificate)}},
            },
        }
        message = {
            "messageDigest": {"algorithm": "SHA2_256", "digest": text(digest.digest())},
            "signature": text(signature),
        }
        return self._bundle(certificate, body, "hashedrekord", {"messageSignature": message})

    def attest(
        self, content: bytes, subject: str = SUBJECT, predicate: str = "https://slsa.dev/provenance/v1"
    ) -> bytes:
        """Return the bundle that ``actions/attest-build-provenance`` writes for a file."""
        key = new_key()
        certificate = self.issue(key, subject, ISSUER)
        statement = {
            "_type": "https://in-toto.io/Statement/v1",
            "subject": [{"name": "profile.yaml", "digest": {"sha256": hashlib.sha256(content).hexdigest()}}],
            "predicateType": predicate,
            "predicate": {},
        }
        payload, kind = json.dumps(statement).encode(), b"application/vnd.in-toto+json"
        signed = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
        signature = key.sign(signed, _SHA256)
        body = {
            "apiVersion": "0.0.1",
            "kind": "dsse",
            "spec": {
                "envelopeHash": {"algorithm": "sha256", "value": hashlib.sha256(b"").hexdigest()},
                "payloadHash": {"algorithm": "sha256", "value": hashlib.sha256(payload).hexdigest()},
                "signatures": [{"signature": text(signature), "verifier": _pem(certificate)}],
            },
        }
        envelope = {
            "payload": text(payload),
            "payloadType": kind.decode(),
            "signatures": [{"sig": text(signature), "keyid": ""}],
        }
        return self._bundle(certificate, body, "dsse", {"dsseEnvelope": envelope})

    def _bundle(self, certificate: x509.Certificate, body: dict[str, Any], kind: str, signed: dict[str, Any]) -> bytes:
        """Return a bundle of something signed, the only entry in the log of signatures."""
        entry, log = json.dumps(body, sort_keys=True, separators=(",", ":")).encode(), key_id(self.signatures_key)
        root, time_s = hashlib.sha256(b"\0" + entry).digest(), int(SIGNED_ON.timestamp())
        note = f"log.example.com - 1\n1\n{text(root)}\n"
        note_signature = text(log[:4] + self.signatures_key.sign(note.encode(), _SHA256))
        promised = {"body": text(entry), "integratedTime": time_s, "logID": log.hex(), "logIndex": 0}
        promise = json.dumps(promised, sort_keys=True, separators=(",", ":")).encode()
        logged = {
            "logIndex": "0",
            "logId": {"keyId": text(log)},
            "kindVersion": {"kind": kind, "version": "0.0.1"},
            "integratedTime": str(time_s),
            "inclusionPromise": {"signedEntryTimestamp": text(self.signatures_key.sign(promise, _SHA256))},
            "inclusionProof": {
                "logIndex": "0",
                "rootHash": text(root),
                "treeSize": "1",
                "hashes": [],
                "checkpoint": {"envelope": f"{note}\n\u2014 log.example.com {note_signature}\n"},
            },
            "canonicalizedBody": text(entry),
        }
        bundle = {
            "mediaType": "application/vnd.dev.sigstore.bundle.v0.3+json",
            "verificationMaterial": {
                "certificate": {"rawBytes": text(certificate.public_bytes(_DER))},
                "tlogEntries": [logged],
            },
            **signed,
        }
        return json.dumps(bundle).encode()


def _pem(certificate: x509.Certificate) -> str:
    return text(certificate.public_bytes(serialization.Encoding.PEM))
