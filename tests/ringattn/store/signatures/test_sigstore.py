"""Sigstore bundles beside profiles: verified offline, for allowed identities alone, and never passed over."""

from __future__ import annotations

import base64
import datetime
import json
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from machine_samples import H100, dense_entry, measured

pytest.importorskip("sigstore", reason="the extra `sigstore`")
from sigstore_instance import ISSUER, SIGNED_ON, SUBJECT, Instance

from ringattn.errors import ProfileError, StoreError
from ringattn.profile.schema import Profile
from ringattn.profile.yaml_io import dump_profile
from ringattn.store.backends.folder import Folder
from ringattn.store.lookup import find_profiles, stored_profiles
from ringattn.store.names import ProfileName
from ringattn.store.signatures.sigstore_bundle import Identities, Identity, parse_identities, signer_of_bundle
from ringattn.store.signatures.ssh_signature import SignatureFault
from ringattn.store.signatures.trust import trust_of
from ringattn.store.store import SignedFile, Store

PROFILE = measured(H100, dense_entry())
CONTENT = dump_profile(PROFILE).encode()
WORKFLOW = "https://github.com/example/fleet/.github/workflows/sign.yml@refs/heads/main"
RELEASE = Identity(SUBJECT, ISSUER)


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(self: socket.socket, address: object) -> None:
        pytest.fail(f"connected to {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", lambda *asked, **_: pytest.fail(f"looked up {asked}"))


@pytest.fixture(scope="module")
def instance() -> Instance:
    return Instance()


@pytest.fixture
def identities(instance: Instance, tmp_path: Path) -> Identities:
    instance.write_root(tmp_path / "trusted_root.json")
    return Identities((RELEASE, Identity(WORKFLOW, ISSUER)), "file", tmp_path / "trusted_root.json")


# --- the file of identities -------------------------------------------------------------------------------------


def test_identities_are_read_line_by_line() -> None:
    text = f"# who may sign\n\n{SUBJECT} {ISSUER}\n  {WORKFLOW}\t{ISSUER}  \n"
    assert parse_identities(text, "file") == (RELEASE, Identity(WORKFLOW, ISSUER))


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (SUBJECT, "is no line of subject and OIDC issuer, such as"),
        (f"{SUBJECT} {ISSUER} x", "is no line of subject and OIDC issuer"),
        (f"{ISSUER} {SUBJECT}", "is no line of subject and OIDC issuer"),
        (f"*@example.com {ISSUER}", "holds a pattern"),
        (f"{SUBJECT} https://*", "holds a pattern"),
    ],
)
def test_what_would_allow_nobody_is_told_with_its_line(line: str, told: str) -> None:
    with pytest.raises(StoreError, match=f"file: line 2: {told}"):
        parse_identities(f"# first\n{line}", "file")


# --- bundles ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("subject", [SUBJECT, WORKFLOW])
def test_a_signed_file_and_a_statement_of_its_provenance_verify(
    instance: Instance, identities: Identities, subject: str
) -> None:
    for bundle in (instance.sign(CONTENT, subject), instance.attest(CONTENT, subject)):
        assert signer_of_bundle(CONTENT, bundle, identities) == Identity(subject, ISSUER)


def changed(bundle: bytes, path: str, change: Callable[[Any], Any]) -> bytes:
    """Return the bundle with one of its values changed."""
    plain = json.loads(bundle)
    *folders, last = path.split(".")
    inner = plain
    for name in folders:
        inner = inner[int(name) if name.isdigit() else name]
    inner[last] = change(inner[last])
    return json.dumps(plain).encode()


def flipped(value: str) -> str:
    """Another value of as many bytes."""
    content = bytearray(base64.b64decode(value))
    content[len(content) // 2] ^= 1
    return base64.b64encode(content).decode()


ENTRY = "verificationMaterial.tlogEntries.0"
CHANGES: list[tuple[str, Callable[[Any], Any]]] = [
    ("verificationMaterial.certificate.rawBytes", flipped),
    (f"{ENTRY}.integratedTime", lambda time_s: str(int(time_s) + 1)),
    (f"{ENTRY}.integratedTime", lambda time_s: str(int(time_s) + 3600)),
    (f"{ENTRY}.integratedTime", lambda time_s: "9" * 30),
    (f"{ENTRY}.logIndex", lambda index: "1"),
    (f"{ENTRY}.canonicalizedBody", flipped),
    (f"{ENTRY}.inclusionPromise.signedEntryTimestamp", flipped),
    (f"{ENTRY}.inclusionProof.rootHash", flipped),
    (f"{ENTRY}.inclusionProof.checkpoint.envelope", lambda note: note.replace("1\n1\n", "1\n2\n")),
    (f"{ENTRY}.inclusionProof.checkpoint.envelope", lambda note: note[:-9] + "\n"),
    (f"{ENTRY}.inclusionProof.checkpoint.envelope", lambda note: ""),
    (f"{ENTRY}.kindVersion.kind", lambda kind: "intoto"),
    ("verificationMaterial.tlogEntries", lambda entries: []),
    ("verificationMaterial.tlogEntries", lambda entries: entries * 2),
    ("mediaType", lambda kind: "application/json"),
]


@pytest.mark.parametrize(
    ("kind", "path", "change"),
    [
        *((kind, path, change) for kind in ("sign", "attest") for path, change in CHANGES),
        ("sign", "messageSignature.signature", flipped),
        ("sign", "messageSignature.messageDigest.digest", flipped),
        ("attest", "dsseEnvelope.payload", flipped),
        ("attest", "dsseEnvelope.payloadType", lambda kind: "application/json"),
        ("attest", "dsseEnvelope.signatures.0.sig", flipped),
        ("attest", "dsseEnvelope.signatures", lambda signatures: []),
    ],
)
def test_a_bundle_that_was_changed_does_not_verify(
    instance: Instance, identities: Identities, kind: str, path: str, change: Callable[[Any], Any]
) -> None:
    bundle = changed(getattr(instance, kind)(CONTENT), path, change)
    with pytest.raises(SignatureFault, match="has a Sigstore bundle that does not verify: ") as raised:
        signer_of_bundle(CONTENT, bundle, identities)
    assert str(raised.value).isprintable()


@pytest.mark.parametrize("bundle", [b"", b"no bundle", b"\xff\xfe", b"[]", b"null", b"{}", b"[" * 200_000, b'"x"'])
def test_what_is_no_bundle_is_one_line(identities: Identities, bundle: bytes) -> None:
    with pytest.raises(SignatureFault, match="has a Sigstore bundle that does not verify: ") as raised:
        signer_of_bundle(CONTENT, bundle, identities)
    assert str(raised.value).isprintable()


def test_another_file_is_not_signed(instance: Instance, identities: Identities) -> None:
    with pytest.raises(SignatureFault, match="does not verify"):
        signer_of_bundle(CONTENT + b"\n", instance.sign(CONTENT), identities)
    with pytest.raises(SignatureFault, match="a statement of another file"):
        signer_of_bundle(CONTENT + b"\n", instance.attest(CONTENT), identities)


def test_a_statement_that_is_none_of_provenance_vouches_for_nothing(instance: Instance, identities: Identities) -> None:
    bundle = instance.attest(CONTENT, predicate="https://in-toto.io/attestation/test-result/v0.1")
    with pytest.raises(SignatureFault, match="no statement of its provenance"):
        signer_of_bundle(CONTENT, bundle, identities)


@pytest.mark.parametrize(
    "signed", [("mallory@example.com", ISSUER), (SUBJECT, "https://evil.example.com"), (f"x{SUBJECT}", ISSUER)]
)
def test_another_identity_is_not_allowed(instance: Instance, identities: Identities, signed: tuple[str, str]) -> None:
    with pytest.raises(SignatureFault, match=f"is signed by {signed[0]}, whom file does not name with the issuer"):
        signer_of_bundle(CONTENT, instance.sign(CONTENT, *signed), identities)
    with pytest.raises(SignatureFault, match="whom file does not name"):
        signer_of_bundle(CONTENT, instance.sign(CONTENT), replace(identities, allowed=()))


def test_another_root_and_one_that_had_expired_are_not_believed(
    instance: Instance, identities: Identities, tmp_path: Path
) -> None:
    bundle, expired = Instance().sign(CONTENT), Instance(root_ends=SIGNED_ON - datetime.timedelta(days=1))
    with pytest.raises(SignatureFault, match="does not verify: failed to build timestamp certificate chain"):
        signer_of_bundle(CONTENT, bundle, identities)
    expired.write_root(tmp_path / "expired.json")
    with pytest.raises(SignatureFault, match="does not verify: failed to build timestamp certificate chain"):
        signer_of_bundle(CONTENT, expired.sign(CONTENT), replace(identities, trusted_root=tmp_path / "expired.json"))


def test_without_a_root_of_ones_own_sigstores_is_used_offline(
    instance: Instance, identities: Identities, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("XDG_DATA_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(variable, str(tmp_path / variable))
    with pytest.raises(SignatureFault, match="does not verify: failed to build timestamp certificate chain"):
        signer_of_bundle(CONTENT, instance.sign(CONTENT), replace(identities, trusted_root=None))


@pytest.mark.parametrize("content", [b"", b"root:secret:0", b"{}", None])
def test_a_root_that_cannot_be_used_is_named_and_not_shown(
    instance: Instance, identities: Identities, tmp_path: Path, content: bytes | None
) -> None:
    root = tmp_path / "trusted_root.json"
    root.unlink()
    if content is not None:
        root.write_bytes(content)
    with pytest.raises(SignatureFault, match=r"the trusted root, .*json, cannot be used \(") as raised:
        signer_of_bundle(CONTENT, instance.sign(CONTENT), identities)
    assert "secret" not in str(raised.value)


def test_without_the_package_the_extra_is_named(identities: Identities, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "sigstore"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "sigstore", None)
    with pytest.raises(SignatureFault, match=r"install the extra: pip install '\.\[sigstore\]'"):
        signer_of_bundle(CONTENT, b"{}", identities)


# --- in a store -------------------------------------------------------------------------------------------------


@pytest.fixture
def store(instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store, and a node that believes what one identity has signed, and no key."""
    for variable in ("RINGTUNE_ALLOWED_SIGNERS", "RINGTUNE_ALLOWED_IDENTITIES", "RINGTUNE_TRUSTED_ROOT"):
        monkeypatch.delenv(variable, raising=False)
    for variable in ("CACHE", "CONFIG"):
        monkeypatch.setenv(f"XDG_{variable}_HOME", str(tmp_path / variable))
    (tmp_path / "shared").mkdir()
    (tmp_path / "CONFIG" / "ringtune").mkdir(parents=True)
    (tmp_path / "CONFIG" / "ringtune" / "allowed_identities").write_text(f"{SUBJECT} {ISSUER}\n")
    instance.write_root(tmp_path / "CONFIG" / "ringtune" / "trusted_root.json")
    monkeypatch.setenv("RINGTUNE_STORE", str(tmp_path / "shared"))
    monkeypatch.setenv("RINGTUNE_TRUST", "signed")
    yield Store(Folder(tmp_path / "shared"))
    stored_profiles.cache_clear()


def ask() -> tuple[list[Profile], str]:
    """As another process would."""
    stored_profiles.cache_clear()
    located, notes = find_profiles(None, H100)
    return [entry.profile for entry in located if entry.origin == "store"], " ".join(notes)


def pushed(store: Store, bundle: bytes | None) -> ProfileName:
    bundles = {} if bundle is None else {"profile": SignedFile(CONTENT, bundle)}
    ((name,),) = store.push_all([("profile", PROFILE)], bundles=bundles)
    return name


def test_a_profile_with_a_bundle_serves_also_offline_until_its_identity_is_taken_out(
    store: Store, instance: Instance, tmp_path: Path
) -> None:
    name = pushed(store, None)
    found, notes = ask()
    assert (found, "is not signed (skipped)" in notes) == ([], True)
    pushed(store, instance.sign(CONTENT))
    assert ask() == ([PROFILE], "")
    assert store.listed() == ((name,), ())
    (tmp_path / "shared").rename(tmp_path / "gone")
    assert ask()[0] == [PROFILE]  # the copy has the bundle, too
    (tmp_path / "CONFIG" / "ringtune" / "allowed_identities").write_text(f"other@example.com {ISSUER}\n")
    assert ask()[0] == []


def test_a_bundle_goes_with_its_profile(store: Store, instance: Instance) -> None:
    name = pushed(store, instance.sign(CONTENT))
    assert store.signatures(name).bundle is not None
    store.forget([name])
    assert store.backend.names("profiles") == ()


def test_a_copy_keeps_no_signature_that_the_store_has_lost(store: Store, instance: Instance, tmp_path: Path) -> None:
    pushed(store, instance.sign(CONTENT))
    assert ask()[0] == [PROFILE]
    (copy,) = (tmp_path / "CACHE").rglob("*.sigstore.json")
    copy.write_bytes(b"{}")
    left = copy.with_name(copy.name.removesuffix(".sigstore.json") + ".sig")
    left.write_bytes(b"by an earlier signer")
    assert ask() == ([PROFILE], "")
    assert not left.exists()
    (tmp_path / "shared").rename(tmp_path / "gone")
    assert ask()[0] == [PROFILE]


def no_bundle(path: Path) -> str:
    path.write_bytes(b"no bundle")
    return "it is not JSON"


def of_100_mb(path: Path) -> str:
    with path.open("wb") as file:
        os.truncate(file.fileno(), 100_000_000)
    return "has more than 1048576 bytes"


def link(path: Path) -> str:
    path.rename(path.parents[3] / "elsewhere")
    path.symlink_to(path.parents[3] / "elsewhere")
    return "is a link or lies behind one"


def pipe(path: Path) -> str:
    path.unlink()
    os.mkfifo(path)
    return "is not a regular file"


@pytest.mark.parametrize("spoil", [no_bundle, of_100_mb, link, pipe])
def test_a_spoilt_bundle_is_one_line_and_its_profile_serves_nobody(
    store: Store, instance: Instance, tmp_path: Path, spoil: Callable[[Path], str]
) -> None:
    name = pushed(store, instance.sign(CONTENT))
    told = spoil(tmp_path / "shared" / name.bundle)
    found, notes = ask()
    assert found == []
    assert told in notes
    assert notes.endswith("(skipped)")


@pytest.mark.parametrize("lacks", ["identities", "package"])
def test_a_bundle_that_cannot_be_checked_is_not_passed_over_for_a_key(
    store: Store, instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacks: str
) -> None:
    from test_trust import make_key

    folder = tmp_path / "CONFIG" / "ringtune"
    (folder / "allowed_signers").write_text(make_key(tmp_path / "admin"))
    name = pushed(store, None)
    store.sign(name, tmp_path / "admin")
    assert ask()[0] == [PROFILE]
    store.backend.put(name.bundle, instance.sign(CONTENT))
    if lacks == "package":
        for module in [module for module in sys.modules if module.split(".")[0] == "sigstore"]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, "sigstore", None)
    else:
        (folder / "allowed_identities").unlink()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "new"))
    found, notes = ask()
    assert found == []
    remedy = r"pip install '.[sigstore]'" if lacks == "package" else "write lines of SUBJECT ISSUER to allowed_identi"
    assert remedy in notes


def test_a_key_is_not_enough_where_no_file_names_signers(store: Store, tmp_path: Path) -> None:
    from test_trust import make_key

    make_key(tmp_path / "admin")
    store.sign(pushed(store, None), tmp_path / "admin")
    found, notes = ask()
    assert (found, "there is no allowed_signers that names signers" in notes) == ([], True)


def test_a_bundle_of_other_bytes_is_not_stored(store: Store, instance: Instance) -> None:
    two = replace(
        PROFILE, plans=(*PROFILE.plans, replace(PROFILE.plans[0], workload=replace(PROFILE.plans[0].workload, world=2)))
    )
    for profile, content in ((PROFILE, CONTENT + b"\n"), (two, dump_profile(two).encode())):
        with pytest.raises(ProfileError, match=r"profile\.sigstore\.json: signs the file as it is"):
            store.push_all([("profile", profile)], bundles={"profile": SignedFile(content, instance.sign(content))})
    assert store.backend.names("profiles") == ()


def test_files_that_say_whom_to_believe_are_ones_own(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "CONFIG" / "ringtune"
    for name in ("allowed_identities", "trusted_root.json"):
        (folder / name).chmod(0o666)
        with pytest.raises(StoreError, match=f"{name}: others may change who signs"):
            trust_of(os.environ, tmp_path)
        (folder / name).chmod(0o644)
    for variable in ("RINGTUNE_ALLOWED_IDENTITIES", "RINGTUNE_TRUSTED_ROOT"):
        monkeypatch.setenv(variable, str(tmp_path / "mine"))
        with pytest.raises(StoreError, match=rf"there is no .*mine, which {variable} names"):
            trust_of(os.environ, tmp_path)
        monkeypatch.delenv(variable)
    (folder / "allowed_identities").unlink()
    with pytest.raises(StoreError, match=r"there is no .*allowed_signers or .*allowed_identities or .* names signers"):
        trust_of(os.environ, tmp_path)
