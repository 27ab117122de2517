"""Runs the ``ringtune`` command in this process, with another engine if wanted, and profiles for it to find here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from report_samples import evidence, plan

import autotune.probe.tuning
from autotune.cli.main import cli
from autotune.probe.request import ProbeObserver, ProbeResult
from ringattn.hardware.facts import detect
from ringattn.profile.schema import Choice, Failure, Fingerprint, PlanEntry, Profile, Provenance
from ringattn.workload import Workload


def ringtune(*arguments: str | Path, **env: str) -> Result:
    return CliRunner(env=env).invoke(cli, [str(a) for a in arguments], prog_name="ringtune")


def one_line_error(result: Result, code: int) -> str:
    """The single stderr line of a command that failed for a reason the user can mend."""
    assert result.exit_code == code, (result.exit_code, result.output, result.exception)
    assert isinstance(result.exception, SystemExit)
    lines = result.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("Error: ")
    return lines[0]


def engine(monkeypatch: pytest.MonkeyPatch, act: Callable[[ProbeObserver], ProbeResult]) -> None:
    monkeypatch.setattr(autotune.probe.tuning, "run_probe", lambda request, observer: act(observer))


def explained(*arguments: str | Path) -> dict[str, Any]:
    result = ringtune("explain", *arguments, "--json")
    assert result.exit_code == 0, result.stderr
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def profile_of_this_machine(*entries: PlanEntry) -> Profile:
    facts = detect("cpu")
    return Profile("measured", Fingerprint.of(facts), facts.software, plans=entries, provenance=Provenance("0.1.0"))


def measured_entry(seq_len: int = 512) -> PlanEntry:
    chosen = Choice(plan("math", "flash-cpu", dtype="fp32"), evidence(2.0, 0.8, 4))
    default = Choice(plan("flash-cpu", "flash-cpu", dtype="fp32"), evidence(2.5, 1.0, 2))
    return PlanEntry(
        Workload("train", True, seq_len, 4, 32, "fp32"),
        chosen,
        default=default,
        failures=(Failure("math/math fp32", "oom", "needs 3 GiB"),),
    )
