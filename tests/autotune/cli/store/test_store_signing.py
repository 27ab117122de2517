"""sign, verify-signature, and pushing and probing where only signed profiles are believed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import measured_entry, one_line_error, profile_of_this_machine, ringtune

import autotune.probe.tuning
from autotune.probe.request import ProbeObserver, ProbeRequest, ProbeResult
from ringattn.errors import StoreError
from ringattn.profile.resolve import built_in_heuristic
from ringattn.profile.yaml_io import save_profile
from ringattn.store.backends.folder import Folder
from ringattn.store.lookup import stored_profiles
from ringattn.store.store import Store


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A key that this node believes; a store is named, and a profile of this machine lies in mine.yaml."""
    pytest.importorskip("cryptography", reason="the extra `sign`")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    made = Ed25519PrivateKey.generate()
    path = tmp_path / "key"
    path.write_bytes(
        made.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        )
    )
    form = (serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (tmp_path / "signers").write_bytes(b"admin " + made.public_key().public_bytes(*form))
    (tmp_path / "shared").mkdir()
    save_profile(profile_of_this_machine(measured_entry()), tmp_path / "mine.yaml")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("RINGTUNE_STORE", str(tmp_path / "shared"))
    monkeypatch.setenv("RINGTUNE_TRUST", "signed")
    monkeypatch.setenv("RINGTUNE_ALLOWED_SIGNERS", str(tmp_path / "signers"))
    stored_profiles.cache_clear()
    return path


def test_a_profile_serves_once_it_is_signed(key: Path, tmp_path: Path) -> None:
    (pushed,) = json.loads(ringtune("push", tmp_path / "mine.yaml", "--json").stdout)["pushed"]
    refused = ringtune("verify-signature", pushed["name"])
    assert refused.exit_code == 1
    assert "is not signed" in refused.stderr
    assert "is not signed" in one_line_error(ringtune("pull", pushed["name"]), 1)
    assert ringtune("sign", pushed["name"]).exit_code == 2
    assert ringtune("sign", pushed["name"], "--key", key).exit_code == 0
    assert ringtune("verify-signature", pushed["name"]).stdout.endswith(": admin\n")
    assert ringtune("which", "--device", "cpu").exit_code == 0


def test_a_push_signs_where_a_key_is_named(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RINGTUNE_SIGNING_KEY", str(key))
    assert ringtune("push", tmp_path / "mine.yaml").exit_code == 0
    assert ringtune("which", "--device", "cpu").exit_code == 0


def test_what_a_node_measures_must_be_believed(key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ProbeRequest] = []

    def probe(request: ProbeRequest, observer: ProbeObserver) -> ProbeResult:
        asked.append(request)
        assert request.output is not None
        save_profile(profile_of_this_machine(measured_entry()), request.output)
        return ProbeResult(request.output, None, (), 1.0)

    monkeypatch.setattr(autotune.probe.tuning, "run_probe", probe)
    refused = ringtune("probe", "--if-missing", "--device", "cpu")
    assert refused.exit_code == 2
    assert "set RINGTUNE_SIGNING_KEY" in refused.stderr
    assert asked == []
    monkeypatch.setenv("RINGTUNE_SIGNING_KEY", str(key))
    assert "measured here" in ringtune("probe", "--if-missing", "--device", "cpu").stdout
    assert "taken from the store" in ringtune("probe", "--if-missing", "--device", "cpu").stdout
    assert len(asked) == 1


def test_what_cannot_be_signed_is_not_stored_nor_measured(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_key").write_text("no key")
    monkeypatch.setenv("RINGTUNE_SIGNING_KEY", str(tmp_path / "no_key"))
    monkeypatch.setattr(autotune.probe.tuning, "run_probe", lambda *_: pytest.fail("measured"))
    for command in (
        ("push", tmp_path / "mine.yaml"),
        ("probe", "--store", tmp_path / "shared", "--device", "cpu"),
        ("probe", "--if-missing", "--device", "cpu"),
    ):
        assert "cannot be signed" in one_line_error(ringtune(*command), 1)
        assert not (tmp_path / "shared" / "profiles").exists()


def test_a_key_that_this_node_does_not_believe_is_told_before_anything_is_measured(
    key: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RINGTUNE_SIGNING_KEY", str(key))
    monkeypatch.setattr(autotune.probe.tuning, "run_probe", lambda *_: pytest.fail("measured"))
    (tmp_path / "signers").write_text("")
    told = one_line_error(ringtune("probe", "--if-missing", "--device", "cpu"), 1)
    assert f"{key}: this node would not believe what it measures, which is signed by nobody whom" in told
    assert not (tmp_path / "shared" / "profiles").exists()


def test_a_profile_is_never_seen_without_its_signature(key: Path, tmp_path: Path) -> None:
    class Cut(Folder):
        def put(self, name: str, content: bytes) -> None:
            if name.endswith(".yaml"):
                raise StoreError(self.url, "No space left on device")
            super().put(name, content)

    store = Store(Cut(tmp_path / "shared"))
    with pytest.raises(StoreError, match="No space"):
        store.push(profile_of_this_machine(measured_entry()), key_file=key)
    assert store.listed() == ((), ())


def test_of_several_files_none_is_pushed_where_one_cannot_be(key: Path, tmp_path: Path) -> None:
    heuristic = replace(profile_of_this_machine(), source="heuristic", policy=built_in_heuristic("cpu").policy)
    save_profile(heuristic, tmp_path / "rule.yaml")
    assert "no measured plans" in one_line_error(ringtune("push", tmp_path / "mine.yaml", tmp_path / "rule.yaml"), 1)
    assert list((tmp_path / "shared").iterdir()) == []
