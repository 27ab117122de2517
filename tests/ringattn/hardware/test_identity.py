"""One device has one identity, whatever it is called and wherever a program runs."""

from __future__ import annotations

import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from autotune.probe.machine.environment import devices_of
from autotune.probe.request import ProbeRequest
from ringattn.hardware import identity
from ringattn.hardware.identity import device_identity, host_identity


def card(uuid: object, bus: int = 0x1B) -> types.SimpleNamespace:
    return types.SimpleNamespace(uuid=uuid, pci_domain_id=0, pci_bus_id=bus, pci_device_id=0)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Puts cards into torch, as a CUDA_VISIBLE_DEVICES leaves and orders them."""

    def put(*properties: Any) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties[device.index or 0])

    return put


@pytest.mark.parametrize("device", [None, "cuda", "cuda:0"])
def test_one_card_under_all_of_its_names(cards: Callable[..., None], device: str | None) -> None:
    cards(card("aaaa-1"), card("bbbb-2"))
    assert devices_of(ProbeRequest(device=device)) == ("cuda-aaaa-1",)
    assert devices_of(ProbeRequest(device="cuda:1")) == ("cuda-bbbb-2",)


def test_a_card_keeps_its_identity_where_cards_are_renumbered(cards: Callable[..., None]) -> None:
    cards(card("aaaa-1"), card("bbbb-2"))
    second = devices_of(ProbeRequest(device="cuda:1"))
    cards(card("bbbb-2"))  # CUDA_VISIBLE_DEVICES=1
    assert devices_of(ProbeRequest()) == second


def test_ranks_hold_their_cards(cards: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    cards(card("aaaa-1"), card("bbbb-2"), card("cccc-3"))
    assert devices_of(ProbeRequest(ranks=2)) == ("cuda-aaaa-1", "cuda-bbbb-2")
    told = {"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "x", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": "3"}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert len(devices_of(ProbeRequest(ranks=6))) == 3


@pytest.mark.parametrize("unknown", [None, "", "00000000-0000-0000-0000-000000000000"])
def test_a_card_without_a_uuid_is_known_by_its_place_on_this_host(cards: Callable[..., None], unknown: object) -> None:
    cards(card(unknown, 0x1B), card(unknown, 0x2C))
    first, second = (device_identity(torch.device("cuda", index)) for index in (0, 1))
    assert first != second
    assert first.startswith("cuda-00000000:1B:00.0-")


def test_a_cpu_is_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = devices_of(ProbeRequest(device="cpu"))
    monkeypatch.setattr(identity.platform, "node", lambda: "a container")  # of this host
    assert devices_of(ProbeRequest(device="cpu")) == here
    monkeypatch.setattr(identity, "_BOOT_ID", tmp_path / "boot_id")
    (tmp_path / "boot_id").write_text("of another host\n")
    assert devices_of(ProbeRequest(device="cpu")) != here
    assert host_identity() == "a container of another host"


def test_a_host_that_hides_its_boot_id_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(identity, "_BOOT_ID", tmp_path / "hidden")
    monkeypatch.setattr(identity.platform, "node", lambda: "node7")
    assert device_identity(torch.device("cpu")) == "cpu-node7"
    assert host_identity().split() == ["node7"]
