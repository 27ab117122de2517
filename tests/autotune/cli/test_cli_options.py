"""Every option of ``ringtune`` is live, and misuse is told and exit code 2."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from cli_runs import ringtune

from autotune.probe.request import ProbeRequest
from autotune.search.budget import EFFORTS

LIVE = [
    (("--effort", "full"), {"effort": "full"}),
    (("--budget", "12.5"), {"budget_s": 12.5}),
    (("--mode", "train"), {"modes": ("train",)}),
    (("--mode", "infer"), {"modes": ("infer",)}),
    (("--causal",), {"causal": True}),
    (("--no-causal",), {"causal": False}),
    (("--seq-len", "512", "--seq-len", "777"), {"seq_lens": (512, 777), "dense": True}),
    (("--batch-size", "3"), {"batch_size": 3, "dense": True}),
    (("--documents", "5"), {"documents": 5, "dense": True}),
    (("--heads", "6"), {"heads": 6, "dense": True}),
    (("--heads", "6", "--kv-heads", "2"), {"heads": 6, "kv_heads": 2, "dense": True}),
    (("--head-dim", "80"), {"head_dim": 80, "dense": True}),
    (
        ("--heads", "6", "--segment-lengths", "64", "--dilation-rates", "2"),
        {"heads": 6, "segment_lengths": (64,), "dilation_rates": (2,)},
    ),
    (
        ("--segment-lengths", "64,128", "--dilation-rates", "1,2"),
        {"segment_lengths": (64, 128), "dilation_rates": (1, 2)},
    ),
    (
        ("--segment-lengths", "64", "--dilation-rates", "2", "--head-offset", "blocked"),
        {"segment_lengths": (64,), "dilation_rates": (2,), "head_offset": "blocked"},
    ),
    (("--dense",), {"dense": True}),
    (("--precision", "tf32"), {"precision": "tf32"}),
    (("--precision", "torch.bfloat16"), {"precision": "bf16"}),
    (("--precision", "float32"), {"precision": "fp32"}),
    (("--max-error", "1e-3"), {"max_error": 1e-3}),
    (("--varied-lengths",), {"varied_lengths": True}),
    (("--memory-limit", "512"), {"memory_limit_mib": 512}),
    (("--memory-limit", "24GiB"), {"memory_limit_mib": 24576}),
    (("--prefer", "memory"), {"prefer": "memory"}),
    (("--launch", "captured"), {"launch": "captured"}),
    (("--seed", "7"), {"seed": 7}),
    (("--sampler", "tpe"), {"sampler": "tpe"}),
    (("--storage", "sqlite:///studies.db"), {"storage": "sqlite:///studies.db"}),
    (("--add-kernel", "math", "--add-kernel", "xformers"), {"add_kernels": ("math", "xformers")}),
    (("--device", "cpu"), {"device": "cpu"}),
    (("--device", "1"), {"device": "cuda:1"}),
    (("--nproc", "1"), {}),
    (("--nproc", "3", "--device", "cpu"), {"ranks": 3, "device": "cpu"}),
    (("--nproc", "2", "--device", "cpu", "--layout", "zigzag"), {"ranks": 2, "device": "cpu", "layout": "zigzag"}),
    (("--fresh",), {"resume": False}),
    (("--resume",), {"resume": True}),
    (("--dry-run",), {"dry_run": True}),
]


@pytest.mark.parametrize(("arguments", "expected"), LIVE, ids=[" ".join(a) for a, _ in LIVE])
def test_an_option_reaches_the_engine(
    asked: list[ProbeRequest], arguments: tuple[str, ...], expected: dict[str, Any]
) -> None:
    assert ringtune("probe", *arguments).exit_code == 0
    assert asked == [replace(ProbeRequest(modes=("train", "infer")), **expected)]


def test_output_reaches_the_engine(asked: list[ProbeRequest], tmp_path: Path) -> None:
    assert ringtune("probe", "--output", tmp_path / "mine.yaml").exit_code == 0
    assert asked[0].output == tmp_path / "mine.yaml"
    assert list(tmp_path.iterdir()) == []


def test_every_field_of_the_request_can_be_asked_for() -> None:
    covered = {name for _, expected in LIVE for name in expected} | {"output"}
    covered |= {"longest", "input_dtype", "recorded"}  # by --model and --like, see test_recorded.py
    assert covered == {f.name for f in fields(ProbeRequest)}


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("probe", "--seq-len", "0"), "--seq-len"),
        (("probe", "--seq-len", "x"), "--seq-len"),
        (
            ("probe", "--seq-len", "64,128"),
            "not a valid integer; give the option once for each: --seq-len 64 --seq-len 128",
        ),
        (("probe", "--heads", "0"), "--heads"),
        (("probe", "--heads", "6", "--kv-heads", "4"), "--heads is 6, not a multiple of --kv-heads, 4"),
        (("probe", "--kv-heads", "4"), "--kv-heads needs --heads"),
        (("probe", "--segment-lengths", "1,2", "--dilation-rates", "1"), "2 entries and --dilation-rates 1"),
        (("probe", "--segment-lengths", "1,2"), "go together"),
        (("probe", "--dense", "--segment-lengths", "8", "--dilation-rates", "1"), "ask for different attention"),
        (("probe", "--segment-lengths", "0", "--dilation-rates", "1"), "every entry must be an integer >= 1"),
        (("probe", "--segment-lengths", "a", "--dilation-rates", "1"), "not a list of integers"),
        (("probe", "--budget", "0"), "not a number above 0"),
        (("probe", "--budget", "nan"), "not a number above 0"),
        (("probe", "--budget", "inf"), "not a number above 0"),
        (("probe", "--max-error", "-1"), "not a number above 0"),
        (("probe", "--memory-limit", "0"), "not a memory size"),
        (("probe", "--memory-limit", "3TB"), "not a memory size"),
        (("probe", "--seed", "-1"), "--seed"),
        (("probe", "--device", "banana"), "'banana' is not a device"),
        (("probe", "--effort", "heroic"), "--effort"),
        (("explain", "--seq-len", "0"), "--seq-len"),
        (("explain", "--heads", "6", "--kv-heads", "4"), "not a multiple"),
        (("explain", "--dtype", "int8"), "--dtype"),
        (("validate",), "PROFILES"),
        (("validate", "--device", "cpu", "x.yaml"), "--device needs --here"),
        (("which", "--json", "--path-only"), "exclude each other"),
        (("report", "--json", "--output", "-", "x.yaml"), "both want stdout"),
        (("frobnicate",), "frobnicate"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_usage_errors(asked: list[ProbeRequest], arguments: tuple[str, ...], told: str) -> None:
    result = ringtune(*arguments)
    assert result.exit_code == 2
    assert told in result.stderr
    assert asked == []
    if "--json" not in arguments:
        assert result.stdout == ""


def test_the_help_says_how_long_every_effort_takes() -> None:
    text = " ".join(ringtune("probe", "--help").stdout.split())
    assert "search: " + ", ".join(f"{name} {effort.budget_s:.0f} s" for name, effort in EFFORTS.items()) in text


@pytest.mark.parametrize("command", [("explain",), ("probe", "--dry-run")])
@pytest.mark.parametrize(
    ("option", "most"),
    [("--heads", 2**16), ("--kv-heads", 2**16), ("--head-dim", 2**16), ("--batch-size", 2**40), ("--seq-len", 2**40)],
)
def test_a_number_that_no_workload_has_is_refused_with_the_limit(
    command: tuple[str, ...], option: str, most: int
) -> None:
    """Heads are told apart one by one: 2**40 of them took hours."""
    result = ringtune(*command, option, str(most + 1))
    assert result.exit_code == 2
    assert f"'{option}': {most + 1} is not in the range 1<=x<={most}" in result.stderr


@pytest.mark.parametrize("command", [("explain",), ("probe", "--dry-run"), ("which",), ("verify",)])
def test_a_number_of_ranks_that_takes_hours_to_plan_is_refused_with_the_limit(command: tuple[str, ...]) -> None:
    result = ringtune(*command, "--nproc", "1025")
    assert result.exit_code == 2
    assert "'1025' is no number of processes; use an integer from 1 to 1024" in result.stderr


@pytest.mark.parametrize("option", ["--seq-len", "--heads", "--seed"])
def test_what_is_no_integer_is_called_so(option: str) -> None:
    assert (
        f"Error: Invalid value for '{option}': 'abc' is not a valid integer." in ringtune("probe", option, "abc").stderr
    )
