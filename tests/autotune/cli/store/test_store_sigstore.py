"""push, verify-signature, list, pull and which with profiles beside which a Sigstore bundle lies."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from cli_runs import measured_entry, one_line_error, profile_of_this_machine, ringtune

pytest.importorskip("sigstore", reason="the extra `sigstore`")
from sigstore_instance import ISSUER, SUBJECT, Instance

from ringattn.profile.yaml_io import load_profile, save_profile
from ringattn.store.lookup import stored_profiles


@pytest.fixture
def signed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile of this machine with a bundle beside it, by an identity that this node believes."""
    (tmp_path / "shared").mkdir()
    (tmp_path / "identities").write_text(f"{SUBJECT} {ISSUER}\n")
    path, instance = tmp_path / "mine.yaml", Instance()
    save_profile(profile_of_this_machine(measured_entry()), path)
    instance.write_root(tmp_path / "root.json")
    (tmp_path / "mine.yaml.sigstore.json").write_bytes(instance.sign(path.read_bytes()))
    for name, value in (
        ("XDG_CACHE_HOME", tmp_path / "cache"),
        ("XDG_CONFIG_HOME", tmp_path / "config"),
        ("RINGTUNE_STORE", tmp_path / "shared"),
        ("RINGTUNE_TRUST", "signed"),
        ("RINGTUNE_ALLOWED_IDENTITIES", tmp_path / "identities"),
        ("RINGTUNE_TRUSTED_ROOT", tmp_path / "root.json"),
    ):
        monkeypatch.setenv(name, str(value))
    stored_profiles.cache_clear()
    return path


def test_a_bundle_goes_into_the_store_with_its_profile(signed: Path, tmp_path: Path) -> None:
    (pushed,) = json.loads(ringtune("push", signed, "--json").stdout)["pushed"]
    verified = ringtune("verify-signature", pushed["name"])
    assert verified.stdout.endswith(f": {SUBJECT} ({ISSUER})\n")
    listed = ringtune("list")
    assert (listed.exit_code, listed.stderr) == (0, "")
    assert ringtune("which", "--device", "cpu").exit_code == 0
    assert ringtune("pull", "--output", tmp_path / "pulled").exit_code == 0
    (pulled,) = (tmp_path / "pulled").iterdir()  # what is merged is signed by nobody
    assert load_profile(pulled) == load_profile(signed)
    assert ringtune("forget", pushed["name"]).exit_code == 0
    assert not [path for path in (tmp_path / "shared").rglob("*") if path.is_file()]


def test_who_signed_is_told_or_why_nobody_did(signed: Path, tmp_path: Path) -> None:
    (pushed,) = json.loads(ringtune("push", signed, "--json").stdout)["pushed"]
    (tmp_path / "identities").write_text(f"other@example.com {ISSUER}\n")
    refused = ringtune("verify-signature", pushed["name"])
    assert refused.exit_code == 1
    assert f"is signed by {SUBJECT}, whom {tmp_path / 'identities'} does not name" in refused.stderr
    assert "whom" in one_line_error(ringtune("pull", pushed["name"]), 1)
    (tmp_path / "identities").write_text(f"{SUBJECT} {ISSUER}\n")
    (beside,) = (tmp_path / "shared").rglob("*.sigstore.json")
    beside.rename(tmp_path / "elsewhere")
    beside.symlink_to(tmp_path / "elsewhere")
    assert "is a link or lies behind one" in one_line_error(ringtune("verify-signature", pushed["name"]), 1)


def test_a_bundle_that_signs_something_else_keeps_everything_out_of_the_store(signed: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    save_profile(profile_of_this_machine(measured_entry(1024)), other)
    signed.write_text(f"# a comment\n{signed.read_text()}")
    refused = one_line_error(ringtune("push", other, signed), 1)
    assert f"{signed}.sigstore.json: signs the file as it is" in refused
    bundle = tmp_path / "mine.yaml.sigstore.json"
    with bundle.open("wb") as file:
        os.truncate(file.fileno(), 100_000_000)
    assert "it has 100000000 bytes, more than 1048576; move it away" in one_line_error(ringtune("push", signed), 1)
    bundle.unlink()
    bundle.symlink_to("nowhere")
    assert "sigstore.json: cannot be read: No such file" in one_line_error(ringtune("push", signed), 1)
    assert list((tmp_path / "shared").iterdir()) == []
    bundle.unlink()
    assert ringtune("push", signed).exit_code == 0
