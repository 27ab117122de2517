"""The parts of a profile refuse what makes no sense, and say nothing about people or places."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine_samples import EPYC, EVIDENCE, dense_entry, measured
from profile_samples import POLICY, RICH

from ringattn.errors import InputError
from ringattn.profile.locations import home_folder
from ringattn.profile.schema import MESSAGE_LIMIT, Failure, Fingerprint, Policy, Provenance, shareable_text
from ringattn.profile.yaml_io import dump_profile
from ringattn.workload import INPUT_DTYPES


@pytest.mark.parametrize(
    ("name", "value"),
    [("median_ms", float("nan")), ("error", float("inf")), ("host_us", -1.0), ("peak_bytes", -1), ("blocks", -1)],
)
def test_evidence_is_finite_and_not_negative(name: str, value: Any) -> None:
    with pytest.raises(InputError, match=f"{name} is"):
        replace(EVIDENCE, **{name: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward": ("flash",)}, "end in math"),
        ({"forward": ()}, "end in math"),
        ({"backward": ("math", "flash")}, "end in math"),
        ({"backward": ("flash", "flash", "math")}, "once"),
        ({"copy_from_rate": 1}, "copy_from_rate"),
        ({"compute_dtype": (("bf16", "bf16"),)}, "must map each of"),
        ({"compute_dtype": tuple((n, "bf16" if n == "fp32" else n) for n in INPUT_DTYPES)}, "maps fp32 to 'bf16'"),
        ({"compute_dtype": tuple((n, "fp16" if n == "bf16" else n) for n in INPUT_DTYPES)}, "maps bf16 to 'fp16'"),
    ],
)
def test_policies_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(POLICY, **changes)


def test_policy_answers() -> None:
    policy = Policy(tuple((n, "fp32" if n == "bf16" else n) for n in INPUT_DTYPES), ("flash", "math"), ("math",), 8)
    assert [policy.dtype_for(name) for name in INPUT_DTYPES] == ["fp32", "fp16", "fp32", "fp64"]
    assert policy.kernels_for("forward", "fp16") == ("flash", "math")
    assert policy.kernels_for("backward", "fp16") == ("math",)
    assert policy.kernels_for("forward", "fp64") == ("math",)
    assert [policy.gather_for(rate) for rate in (1, 7, 8, 16)] == ["view", "view", "copy", "copy"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"policy": None, "source": "heuristic", "plans": ()}, "policy is missing"),
        ({"policy": POLICY, "source": "heuristic"}, "plans holds entries"),
        ({"schema": 3}, "schema is 3"),
        ({"source": "dreamt"}, "source is 'dreamt'"),
        ({"plans": (dense_entry(), dense_entry(kernel="math"))}, "more than once"),
        ({"fingerprint": Fingerprint("cpu")}, "has no device_name"),
    ],
)
def test_profiles_that_make_no_sense_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        replace(RICH, **changes)


# --- nothing about people or places -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("raw", "shared"),
    [
        ('File "/home/alice/src/x.py", line 3', 'File "~/src/x.py", line 3'),
        ("cannot open /opt/venv/lib/python3.11/site-packages/torch/nn.py: gone", "cannot open nn.py: gone"),
        ("no such folder: /home/alice", "no such folder: ~"),
        (r"at C:\Users\alice\x.py:7", r"at ~\x.py:7"),
        ("two\nlines\t and   spaces ", "two lines and spaces"),
        ("12 ms/call, B/S/H, 3 / 4, a/b", "12 ms/call, B/S/H, 3 / 4, a/b"),
        ("see https://example.org/a/b", "see https://example.org/a/b"),
        ("half a pair \ud800", "half a pair ?"),
        ("x" * 1000, "x" * MESSAGE_LIMIT),
    ],
)
def test_shareable_text(raw: str, shared: str) -> None:
    assert shareable_text(raw) == shared
    assert Failure("c", "error", raw).message == shared
    assert Provenance(notes=(raw,)).notes == (shared,)


@given(st.text(st.sampled_from("/\\~ab:C. \n'\"-"), max_size=40) | st.text(max_size=40))
def test_shareable_text_is_idempotent(raw: str) -> None:
    assert shareable_text(shareable_text(raw)) == shareable_text(raw)


def test_a_profile_of_this_machine_names_no_host_user_or_path(tmp_path: Path) -> None:
    dumped = dump_profile(measured(EPYC, dense_entry()))
    assert "/" not in dumped
    for private in (os.uname().nodename, str(home_folder()), str(tmp_path)):
        assert private not in dumped
