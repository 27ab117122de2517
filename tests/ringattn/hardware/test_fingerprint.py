"""One function makes the fingerprint: spellings of one card are one machine, and what is slower is told apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from cli_runs import measured_entry
from machine_samples import H100

from autotune.cli.probing.renew import can_renew
from autotune.exit_codes import ProbeFailure
from autotune.probe.output.writer import same_machine
from autotune.probe.verify import check_same_silicon
from ringattn.hardware.facts import CudaReading, HardwareFacts, cuda_facts, fingerprint_name
from ringattn.hardware.names import vgpu_profile
from ringattn.profile.resolve import tier_of
from ringattn.profile.schema import Fingerprint, Profile, Provenance
from ringattn.profile.yaml_io import dump_profile, parse_profile
from ringattn.store.names import kind_of

READING = CudaReading("NVIDIA H100 80GB HBM3", (9, 0), 132, 85_017_493_504, 52_428_800, 8, 700_000, 18)
SOFTWARE = (("driver", "580.1"), ("torch", "2.13.0"))


def facts_of(**changes: object) -> HardwareFacts:
    return cuda_facts(replace(READING, **changes), SOFTWARE)


def profile_of(facts: HardwareFacts) -> Profile:
    made = Profile(
        "measured", Fingerprint.of(facts), facts.software, plans=(measured_entry(),), provenance=Provenance("0.1.0")
    )
    return parse_profile(dump_profile(made), "p.yaml")  # as it is found: nothing is lost in the file


HERE = facts_of()


@pytest.mark.parametrize(
    ("changes", "tier", "why"),
    [
        ({}, "exact", "the same"),
        ({"name": "H100 SXM5 80GB"}, "exact", "the same"),
        ({"name": "NVIDIA H100-SXM5-80GB"}, "exact", "the same"),
        ({"name": "NVIDIA  H100"}, "exact", "the same"),
        ({"memory_bytes": 84_900_000_000}, "exact", "the same"),  # what drivers keep differs
        ({"power_limit_mw": None}, "exact", "the same"),  # refused by a container: unknown, and no difference
        ({"power_limit_mw": None, "nvlinks": None}, "exact", "the same"),
        ({"device_count": 1}, "exact", "the same"),  # which matters to several ranks alone
        ({"power_limit_mw": 500_000}, "same-sku", "power_limit_w 700 there, 500 here"),
        ({"name": "NVIDIA H100XM-80C"}, "same-sku", "vgpu none there, 80c here"),
        ({"name": "NVIDIA H100XM-40C", "memory_bytes": 42_000_000_000}, "same-sku", "vgpu none there, 40c here"),
        ({"sm_count": 66}, "nearest", "sm_count 132 there, 66 here"),  # a share of a card, as MPS gives it
        ({"name": "NVIDIA H100 PCIe", "sm_count": 114}, "nearest", "sku h100-sxm there, h100-pcie here"),
        ({"name": "NVIDIA H100 80GB HBM3 MIG 1g.10gb"}, None, "MIG profile none"),
        ({"name": "NVIDIA H100 80GB HBM3 MIG 1c.3g.40gb"}, None, "MIG profile none"),
        ({"capability": (8, 0)}, None, "arch sm_90"),
    ],
)
def test_runtime_tuner_and_store_agree_on_what_is_one_machine(
    changes: dict[str, object], tier: str | None, why: str
) -> None:
    facts, profile = facts_of(**changes), profile_of(HERE)
    found, told = tier_of(profile, facts)
    assert found == tier
    assert why in told
    assert same_machine(profile, facts) is (tier == "exact")
    if tier == "exact":
        check_same_silicon(profile, facts, Path("p.yaml"))
        assert kind_of(Fingerprint.of(facts)) == kind_of(profile.fingerprint)
    else:
        with pytest.raises(ProbeFailure, match="was measured on NVIDIA H100 80GB HBM3, this is ") as caught:
            check_same_silicon(profile, facts, Path("p.yaml"))
        assert why in str(caught.value)
        assert not can_renew(profile, facts)


def test_several_ranks_are_also_their_links() -> None:
    for changes in ({"device_count": 4}, {"nvlinks": 0}):
        assert tier_of(profile_of(HERE), facts_of(**changes), world=2)[0] == "nearest"


def test_every_partition_of_a_card_is_a_kind_of_its_own() -> None:
    names = [
        "NVIDIA H100 80GB HBM3",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb+me",
        "NVIDIA H100 80GB HBM3 MIG 1c.2g.10gb",
        "NVIDIA H100XM-10C",
        "NVIDIA H100XM-10A",
    ]
    kinds = [fingerprint_name(facts_of(name=name)) for name in names]
    assert len(set(kinds)) == len(names)
    assert [kind_of(Fingerprint.of(facts_of(name=name))) for name in names] == kinds
    assert fingerprint_name(H100) == "nvidia-h100-sxm-80g"


@pytest.mark.parametrize(
    ("name", "vgpu"),
    [
        ("GRID A100X-40C", "40c"),
        ("NVIDIA RTXA6000-48Q", "48q"),
        ("GRID T4-1B4", "1b4"),
        ("GRID A100D-3-40C", ""),  # a slice, which has its own cores
        ("NVIDIA A100-SXM4-40GB", ""),
        ("NVIDIA H100 80GB HBM3", ""),
        ("NVIDIA GeForce RTX 4090", ""),
        ("", ""),
    ],
)
def test_virtual_gpus_are_known_by_their_names(name: str, vgpu: str) -> None:
    assert vgpu_profile(name) == vgpu
