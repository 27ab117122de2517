"""Signed profiles: only what a named key has signed is believed, and OpenSSH's own tool agrees."""

from __future__ import annotations

import base64
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machine_samples import H100, dense_entry, measured

from ringattn.errors import StoreError
from ringattn.profile.schema import Profile
from ringattn.store.backends.folder import Folder
from ringattn.store.lookup import find_profiles, stored_profiles
from ringattn.store.signatures.allowed_signers import parse_signers
from ringattn.store.signatures.ssh_signature import NAMESPACE, Signature, SignatureFault, sign
from ringattn.store.signatures.trust import Signatures, Trust, trust_of
from ringattn.store.store import Store

ONE_KEY = "ssh-ed25519 " + base64.b64encode(b"\0\0\0\x0bssh-ed25519\0\0\0 " + b"k" * 32).decode()
BEGIN, END = b"-----BEGIN SSH SIGNATURE-----\n", b"\n-----END SSH SIGNATURE-----"
RSA = "ssh-rsa AAAAB3NzaC1yc2E="


@pytest.mark.parametrize(
    ("line", "principals"),
    [
        (f"admin@cluster {ONE_KEY}", ["admin@cluster"]),
        (f"a@b,c@d {ONE_KEY} a comment", ["a@b,c@d"]),
        (f'admin namespaces="git,ringtune" {ONE_KEY}', ["admin"]),
        (f'admin namespaces="git" {ONE_KEY}', []),
        (f"# admin {ONE_KEY}\n\n", []),
        (f"admin {RSA}", []),
        (f"*@cluster cert-authority {ONE_KEY}", []),
        (f'admin Namespaces="*" {ONE_KEY}', ["admin"]),
        (f'admin namespaces="ring????" {ONE_KEY}', ["admin"]),
        (f'admin namespaces="*,!ringtune" {ONE_KEY}', []),
        (f'admin valid-after="20200101",valid-before="20300101Z" {ONE_KEY}', ["admin"]),
    ],
)
def test_allowed_signers_are_read_as_openssh_does(line: str, principals: list[str]) -> None:
    assert [signer.principals for signer in parse_signers(line, "file")] == principals


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("admin", "is no line of principals"),
        (f'admin namespaces="git {ONE_KEY}', "is no line of principals"),
        (ONE_KEY, "is no line of principals"),
        ("admin ssh-ed25519", "is no line of principals"),
        (f"admin no-touch-required {ONE_KEY}", "option no-touch-required is not known here"),
        (f'admin namespaces="git",namespaces="ringtune" {ONE_KEY}', "option namespaces is given twice"),
        (f'admin namespaces="git"namespaces="ringtune" {ONE_KEY}', "options .* cannot be taken apart"),
        (f'admin namespaces="git",,namespaces="ringtune" {ONE_KEY}', "options .* cannot be taken apart"),
        (f"admin namespaces=ringtune {ONE_KEY}", "options .* cannot be taken apart"),
        (f"admin namespaces {ONE_KEY}", "option namespaces has no value"),
        (f'admin cert-authority="x" {ONE_KEY}', "option cert-authority has a value"),
        (f'admin valid-before="2020" {ONE_KEY}', "'2020' is no time"),
        (f'admin valid-after="20201399" {ONE_KEY}', "'20201399' is no time"),
        (f'admin cert-authority,valid-after="never" {ONE_KEY}', "'never' is no time"),
        ("admin ssh-ed25519 !!", "its key is not base64"),
    ],
)
def test_a_line_that_would_restrict_what_is_believed_is_not_passed_over(line: str, told: str) -> None:
    with pytest.raises(StoreError, match=f"file: line 2: {told}"):
        parse_signers(f"# first\n{line}", "file")


def test_the_policy_is_named_or_refused(tmp_path: Path) -> None:
    assert trust_of({}, tmp_path) == trust_of({"RINGTUNE_TRUST": "checksum"}, tmp_path) == Trust()
    assert trust_of({"RINGTUNE_TRUST": "any"}, tmp_path) == Trust("any")
    for other in ("Signed", "no", "any,signed", " any"):
        with pytest.raises(StoreError, match=r"RINGTUNE_TRUST: is .*; use any, checksum or signed"):
            trust_of({"RINGTUNE_TRUST": other}, tmp_path)
    signed = {"RINGTUNE_TRUST": "signed", "XDG_CONFIG_HOME": str(tmp_path)}
    named = signed | {"RINGTUNE_ALLOWED_SIGNERS": str(tmp_path / "mine")}
    with pytest.raises(StoreError, match=r"asks for signatures, and there is no .*mine"):
        trust_of(named, tmp_path)
    (tmp_path / "mine").write_bytes(b"\xff")
    with pytest.raises(StoreError, match="mine: cannot be read"):
        trust_of(named, tmp_path)
    (tmp_path / "ringtune").mkdir()
    (tmp_path / "ringtune" / "allowed_signers").write_text(f"admin {ONE_KEY}")
    assert trust_of(signed, tmp_path).asks_for_signatures


@pytest.mark.parametrize(
    "armored",
    [
        b"",
        b"\xff\xfe",
        BEGIN + END,
        BEGIN + b"!!!!" + END,
        BEGIN + base64.b64encode(b"SSHSIG\0\0\0\1\xff\xff\xff\xff") + END,
        BEGIN + b"A" * 5000 + END,
    ],
)
def test_what_is_no_signature_is_a_fault(armored: bytes) -> None:
    with pytest.raises(SignatureFault, match="SSH signature"):
        Signature.parse(armored)


def test_without_cryptography_the_extra_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setitem(sys.modules, "cryptography.exceptions", None)
    for act in (lambda: sign(b"", tmp_path / "key"), lambda: Signature(b"", b"sha512", b"").check(b"")):
        with pytest.raises(SignatureFault, match=r"install the extra: pip install '\.\[sign\]'"):
            act()


# --- with keys --------------------------------------------------------------------------------------------------


def make_key(path: Path) -> str:
    """A new Ed25519 key in OpenSSH's format at ``path``; its line for allowed_signers is returned."""
    pytest.importorskip("cryptography", reason="the extra `sign`")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.generate()
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH)
    path.write_bytes(key.private_bytes(*form, serialization.NoEncryption()))
    path.chmod(0o600)
    public = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return f"{path.name}@cluster {key.public_key().public_bytes(*public).decode()}\n"


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store, and a node that believes only what the key ``admin`` has signed."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "signers").write_text(make_key(tmp_path / "admin"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RINGTUNE_STORE", str(tmp_path / "shared"))
    monkeypatch.setenv("RINGTUNE_TRUST", "signed")
    monkeypatch.setenv("RINGTUNE_ALLOWED_SIGNERS", str(tmp_path / "signers"))
    yield Store(Folder(tmp_path / "shared"))
    stored_profiles.cache_clear()


def ask() -> tuple[list[Profile], str]:
    stored_profiles.cache_clear()
    located, notes = find_profiles(None, H100)
    return [entry.profile for entry in located if entry.origin == "store"], " ".join(notes)


def test_only_what_is_signed_by_a_named_key_serves(store: Store, tmp_path: Path) -> None:
    profile = measured(H100, dense_entry())
    (name,) = store.push(profile)
    found, notes = ask()
    assert (found, "is not signed (skipped)" in notes) == ([], True)
    make_key(tmp_path / "stranger")
    store.sign(name, tmp_path / "stranger")
    found, notes = ask()
    assert (found, "is signed by nobody whom" in notes) == ([], True)
    store.sign(name, tmp_path / "admin")
    assert ask() == ([profile], "")
    store.backend.put(name.signature, b"garbage")
    assert ask() == ([profile], "")  # the copy has both, and is checked again


def test_a_copy_is_believed_offline_as_long_as_its_signer_is(store: Store, tmp_path: Path) -> None:
    profile = measured(H100, dense_entry())
    (name,) = store.push(profile)
    store.sign(name, tmp_path / "admin")
    assert ask()[0] == [profile]
    (tmp_path / "shared").rename(tmp_path / "gone")
    assert ask()[0] == [profile]
    (tmp_path / "signers").write_text(make_key(tmp_path / "successor"))
    assert ask()[0] == []


def test_a_signature_of_another_file_is_none(store: Store, tmp_path: Path) -> None:
    one, other = (store.push(measured(H100, dense_entry(length)))[0] for length in (1024, 2048))
    store.sign(one, tmp_path / "admin")
    signature = store.signatures(one).ssh
    assert signature is not None
    store.backend.put(other.signature, signature)
    found, notes = ask()
    assert [profile.plans[0].workload.seq_len for profile in found] == [1024]
    assert "is not the signature of this file" in notes
    store.forget([one])
    assert store.signatures(one) == Signatures()


def test_keys_that_cannot_sign_are_told_in_one_line(store: Store, tmp_path: Path) -> None:
    (name,) = store.push(measured(H100, dense_entry()))
    (tmp_path / "text").write_text("no key")
    os.mkfifo(tmp_path / "pipe")  # is not waited for
    (tmp_path / "large").write_bytes(b"x" * 2**17)
    faults = [("text", "without a passphrase"), ("absent", "No such file")]
    faults += [("pipe", "it is not a regular file"), ("large", "more than 65536"), (".", "it is a directory")]
    if shutil.which("ssh-keygen"):
        cases = (("ed25519", "secret", "without a passphrase"), ("ecdsa", "", "not an Ed25519 key"))
        for kind, passphrase, why in cases:
            make = ["ssh-keygen", "-q", "-t", kind, "-N", passphrase, "-f", str(tmp_path / kind)]
            subprocess.run(make, check=True)
            faults.append((kind, why))
    for key, why in faults:
        with pytest.raises(StoreError, match=f"cannot be signed: .*{why}"):
            store.sign(name, tmp_path / key)


def test_a_key_serves_while_it_is_valid(store: Store, tmp_path: Path) -> None:
    profile = measured(H100, dense_entry())
    (name,) = store.push(profile)
    store.sign(name, tmp_path / "admin")
    principals, _, key = (tmp_path / "signers").read_text().partition(" ")
    assert ask()[0] == [profile]
    for option, said in (
        ('valid-before="20200131Z"', "until 2020-01-31 00:00 UTC"),
        ('valid-after="29990131Z"', "from 2999-01-31 00:00 UTC"),
    ):
        (tmp_path / "signers").write_text(f"{principals} {option} {key}")
        found, notes = ask()  # what was copied while it was valid is checked again
        assert (found, f"a key of admin@cluster that {tmp_path / 'signers'} holds for valid {said}" in notes) == (
            [],
            True,
        )
    (tmp_path / "signers").write_text(f'{principals} valid-before="20200131Z" {key}{principals} {key}')
    assert ask()[0] == [profile]


LINES = (
    "",
    'valid-before="20200131"',
    'valid-after="20200131Z"',
    'valid-after="202001312359",valid-before="20300101000000Z"',
    'namespaces="git"',
    'namespaces="git,ring*"',
    'namespaces="!ringtune,*"',
    'NAMESPACES="*"',
    "cert-authority",
    'namespaces="git",namespaces="ringtune"',
    'valid-before="never"',
    "namespaces=ringtune",
)


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
@pytest.mark.parametrize("options", LINES)
def test_openssh_believes_the_same_lines(tmp_path: Path, options: str) -> None:
    principals, _, key = make_key(tmp_path / "admin").partition(" ")
    line = f"{principals} {options} {key}"
    (tmp_path / "signers").write_text(line)
    content = b"content\n"
    armored = sign(content, tmp_path / "admin")
    (tmp_path / "sig").write_bytes(armored)
    check = ["ssh-keygen", "-Y", "verify", "-n", NAMESPACE, "-f", tmp_path / "signers", "-I", principals]
    theirs = subprocess.run([*check, "-s", tmp_path / "sig"], input=content, capture_output=True).returncode == 0
    try:
        ours = (
            Trust("signed", parse_signers(line, "signers"), "signers").signer(content, Signatures(armored))
            == principals
        )
    except (StoreError, SignatureFault):
        ours = False
    assert ours == theirs


@pytest.mark.skipif(shutil.which("ssh-keygen") is None, reason="ssh-keygen is not installed")
def test_openssh_makes_and_checks_the_same_signatures(tmp_path: Path) -> None:
    line = make_key(tmp_path / "admin")
    (tmp_path / "signers").write_text(line)
    content = b"content\n"
    (tmp_path / "file").write_bytes(content)
    tool = ["ssh-keygen", "-Y"]
    subprocess.run([*tool, "sign", "-n", NAMESPACE, "-f", tmp_path / "admin", tmp_path / "file"], check=True)
    trust = Trust("signed", parse_signers(line, "signers"), "signers")
    theirs = (tmp_path / "file.sig").read_bytes()
    assert trust.signer(content, Signatures(theirs)) == "admin@cluster"
    with pytest.raises(SignatureFault, match="is not the signature of this file"):
        trust.signer(content + b"x", Signatures(theirs))
    (tmp_path / "file.sig").write_bytes(sign(content, tmp_path / "admin"))
    check = ["verify", "-n", NAMESPACE, "-f", tmp_path / "signers", "-I", "admin@cluster", "-s", tmp_path / "file.sig"]
    assert subprocess.run([*tool, *check], input=content).returncode == 0
    (tmp_path / "file.sig").unlink()
    subprocess.run([*tool, "sign", "-n", "git", "-f", tmp_path / "admin", tmp_path / "file"], check=True)
    with pytest.raises(SignatureFault, match="is for 'git', not for 'ringtune'"):
        trust.signer(content, Signatures((tmp_path / "file.sig").read_bytes()))
