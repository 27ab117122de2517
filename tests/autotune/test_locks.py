"""Locks that name their holder, and probes that go on where a file system has none."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest
from probed_machine import Machine, Watching

from autotune.exit_codes import DeviceBusy
from autotune.journal.store import Store
from autotune.locks import FileLock, LockHeld
from autotune.probe.machine.device_lock import device_lock
from autotune.probe.request import ProbeRequest
from autotune.probe.tuning import run_probe

REQUEST = ProbeRequest(effort="quick", seq_lens=(512,), modes=("train",))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(params=["ENOSYS", "EOPNOTSUPP", "ENOLCK", "EIO"])
def no_flock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    def refuse(file: object, operation: int) -> None:
        number = getattr(errno, request.param)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    return os.strerror(getattr(errno, request.param))


def test_a_probe_goes_on_without_locks_and_says_so(machine: Machine, tmp_path: Path, no_flock: str) -> None:
    heard = Watching()
    result = run_probe(replace(REQUEST, output=tmp_path / "m.yaml"), heard, machine.environment)
    assert result.profile is not None
    told = [note for note in heard.notes if no_flock in note]
    assert len(told) == 2
    assert all("let no other probe" in note for note in told)


def test_a_probe_goes_on_where_no_state_folder_can_be(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "state").write_text("in its place")
    heard = Watching()
    run_probe(replace(REQUEST, output=tmp_path / "m.yaml"), heard, machine.environment)
    assert [note for note in heard.notes if "cannot hold a lock (" in note and str(tmp_path / "state") in note]


def test_a_full_disk_leaves_a_lock_that_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    lock = FileLock(tmp_path / "x.lock")
    with pytest.raises(LockHeld, match="process unknown"):
        FileLock(tmp_path / "x.lock")
    lock.release()
    FileLock(tmp_path / "x.lock").release()


def test_a_lock_that_is_refused_leaves_no_open_file(tmp_path: Path, no_flock: str) -> None:
    descriptors = Path("/proc/self/fd")
    before = len(list(descriptors.iterdir()))
    for _ in range(3):
        with pytest.raises(OSError, match=no_flock):
            FileLock(tmp_path / "x.lock")
    assert len(list(descriptors.iterdir())) == before


def test_the_holder_on_another_host_is_named_with_the_remedy(tmp_path: Path) -> None:
    """A shared home keeps the lock of a host that is gone, as long as its server does not notice."""
    lock = FileLock(tmp_path / "p.journal.writer")
    (tmp_path / "p.journal.writer").write_text("4711 on node7")
    with pytest.raises(DeviceBusy, match=r"process 4711 on node7.*gone for good, delete .*p.journal.writer$"):
        Store(tmp_path / "p.journal")
    (tmp_path / "p.journal.writer").unlink()
    Store(tmp_path / "p.journal").close()  # the remedy works
    lock.release()


def test_other_devices_and_other_hosts_do_not_wait(machine: Machine) -> None:
    here = machine.environment
    with device_lock(REQUEST, here, pytest.fail):
        for devices in (("cuda-another",), ("cpu-of-another-host",)):
            with device_lock(REQUEST, replace(here, devices=devices), pytest.fail):
                pass
        for devices in (here.devices, ("cuda-another", *here.devices)):
            with pytest.raises(DeviceBusy), device_lock(REQUEST, replace(here, devices=devices), pytest.fail):
                pass
    with device_lock(REQUEST, here, pytest.fail):
        assert f"on {platform.node()}" in next(Path(here.environ["XDG_STATE_HOME"]).rglob("cuda-inv*.lock")).read_text()
