"""What a driver does not tell, and what a foreign or broken pynvml does, is unknown and never an error."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from machine_samples import H100

from autotune.measure.interference import InterferenceMonitor
from ringattn.hardware import facts as hardware
from ringattn.hardware.facts import CudaReading, NvmlReading, cuda_facts
from ringattn.hardware.nvml import open_nvml
from ringattn.profile.resolve import resolve
from ringattn.profile.schema import Fingerprint

BUS = "00000000:1B:00.0"
UNKNOWN = NvmlReading()


class NotSupported(Exception):
    """As a virtual GPU, a MIG slice, WSL and a container without permission answer."""


def raising(*_: object) -> Any:
    raise NotSupported("Not Supported")


def module(**functions: Any) -> types.ModuleType:
    made = types.ModuleType("pynvml")
    for name, function in functions.items():
        setattr(made, name, function)
    return made


def working(**overrides: Any) -> types.ModuleType:
    functions: dict[str, Callable[..., Any]] = {
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetHandleByPciBusId": lambda bus: "card",
        "nvmlDeviceGetHandleByUUID": lambda uuid: "card",
        "nvmlDeviceGetEnforcedPowerLimit": lambda card: 700_000,
        "nvmlDeviceGetNvLinkState": lambda card, link: 1 if link < 18 else raising(),
        "nvmlSystemGetDriverVersion": lambda: "580.1.2",
        "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: 0,
        "nvmlDeviceGetComputeRunningProcesses": lambda card: ["this one"],
    }
    return module(**(functions | overrides))


def all_are(answer: Any) -> types.ModuleType:
    """A module whose every query gives ``answer``."""
    names = [name for name in vars(working()) if name.startswith("nvml")]
    return module(**{name: (lambda *_: answer) for name in names} | {"nvmlInit": lambda: None})


BROKEN: dict[str, types.ModuleType | None] = {
    "absent": None,
    "empty": module(),
    "no driver": working(nvmlInit=raising),
    "init is no function": working(nvmlInit=3),
    "shutdown raises": working(nvmlShutdown=raising),
    "init alone": module(nvmlInit=lambda: None),
    "everything refused": module(nvmlInit=lambda: None, **dict.fromkeys(
        [name for name in vars(working()) if name.startswith("nvmlDevice")], raising)),
    **{f"all answers are {answer!r}": all_are(answer) for answer in (None, "N/A", b"\xff", -1, 1.5, True, [], {}, int)},
}  # fmt: skip


@pytest.fixture(autouse=True)
def _asked_anew() -> Iterator[None]:
    hardware._read_nvml.cache_clear()
    yield
    hardware._read_nvml.cache_clear()


def facts_with(found: NvmlReading) -> hardware.HardwareFacts:
    reading = CudaReading(
        "NVIDIA H100 80GB HBM3", (9, 0), 132, 85_017_493_504, 52_428_800, 1, found.power_limit_mw, found.nvlinks
    )
    return cuda_facts(reading, (("driver", found.driver),))


def test_a_working_driver_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", working())
    assert hardware._read_nvml(BUS) == NvmlReading("580.1.2", 700_000, 18)


def test_an_old_pynvml_answers_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", working(nvmlSystemGetDriverVersion=lambda: b"470.1"))
    assert hardware._read_nvml(BUS).driver == "470.1"


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_module_makes_facts_with_unknowns(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", BROKEN[name])
    found = hardware._read_nvml(BUS)
    assert isinstance(found.driver, str)
    for number in (found.power_limit_mw, found.nvlinks):
        assert number is None or (type(number) is int and number >= 0)
    facts = facts_with(found)
    assert hash(facts)
    resolve((), facts)  # as RingAttention does
    assert Fingerprint.of(facts).sku == H100.sku


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_module_lets_the_monitor_work(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", BROKEN[name])
    monitor = InterferenceMonitor("GPU-0d1a2b3c")
    monitor.begin()
    monitor.end()
    if name != "shutdown raises":
        assert monitor.unmonitored
        assert all("cannot be seen" in line for line in monitor.unmonitored)


def test_refusals_that_come_later_are_unknown_too(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = working()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monitor = InterferenceMonitor("0d1a2b3c")
    assert monitor.unmonitored == []
    monitor.begin()
    for name in ("nvmlDeviceGetCurrentClocksThrottleReasons", "nvmlDeviceGetComputeRunningProcesses"):
        setattr(fake, name, raising)
    assert monitor.end() is not None


@pytest.mark.parametrize("text", ["raise RuntimeError('wrong driver')", "import no_such_module", "x = = 1", "1 / 0"])
def test_a_module_that_cannot_be_imported_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "pynvml.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    assert open_nvml() is None
    assert hardware._read_nvml(BUS) == UNKNOWN
