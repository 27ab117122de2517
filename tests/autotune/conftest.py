"""What the tests of the commands share: an engine that only listens, and profiles to read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from cli_runs import measured_entry, profile_of_this_machine
from probed_machine import Machine
from report_samples import gpu_profile, gpu_text
from warm_start import start_warm

import autotune.probe.tuning
from autotune import folders
from autotune.distributed.coordinator import Coordinator
from autotune.probe.request import ProbeObserver, ProbeRequest, ProbeResult
from ringattn.profile.yaml_io import save_profile


@pytest.fixture(scope="session")
def coordinator() -> Iterator[Coordinator]:
    """Two ranks for all tests; each test starts their workers anew."""
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1] / "support" / "autotune")}
    environ.pop("OMP_NUM_THREADS", None)
    with pytest.MonkeyPatch.context() as patch:
        start_warm(patch)
        gathered = Coordinator(2, "cpu", None, environ)
    with gathered:
        yield gathered


@pytest.fixture
def fresh_interpreters() -> None:
    """For tests whose processes have to begin as those of a user do: what they import, from where, in what state."""


@pytest.fixture(autouse=True)
def _own_processes_start_warm(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "fresh_interpreters" not in request.fixturenames:
        start_warm(monkeypatch)


@pytest.fixture(autouse=True)
def _nothing_waits_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A probe waits for it at each trial, for power that goes: no test takes that away, and a kill loses no write.

    Nor does one fill it up to the last 4 MiB, which a probe tries to write at its beginning.
    """
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    monkeypatch.setattr(folders, "ROOM_BYTES", 4096)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ProbeRequest]:
    """Replaces the engine with one that only remembers what it was asked."""
    requests: list[ProbeRequest] = []

    def remember(request: ProbeRequest, observer: ProbeObserver) -> ProbeResult:
        requests.append(request)
        return ProbeResult(Path("p.yaml"), gpu_profile(), (), 12.0)

    monkeypatch.setattr(autotune.probe.tuning, "run_probe", remember)
    return requests


@pytest.fixture
def gpu_file(tmp_path: Path) -> Path:
    path = tmp_path / "gpu.yaml"
    path.write_text(gpu_text(), encoding="utf-8")
    return path


@pytest.fixture
def at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A profile of this machine's CPU in the user's folder."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "config" / "ringtune" / "this-machine.yaml"
    save_profile(profile_of_this_machine(measured_entry()), path)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)
