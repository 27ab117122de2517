"""Presets: each a plan that the one constraint function allows, on machines of every kind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from machines import FACTS, H100, LONGNET, workload

from autotune.space.presets import PRESETS, plans_of
from ringattn.errors import PlanError
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.equal_plans import void_reasons
from ringattn.planning.plan import rejection_reasons
from ringattn.workload import Mode, Pattern, Tunables, Workload

T4 = replace(H100, device_name="Tesla T4", sku="t4", arch="sm_75", sm_count=40, memory_mib=15360)
V100 = replace(T4, device_name="Tesla V100", sku="v100", arch="sm_70")


def plan(name: str, asked: Workload, facts: HardwareFacts) -> Tunables:
    return plans_of(PRESETS[name], asked, facts)[0]


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("facts", [FACTS, H100, T4], ids=lambda facts: facts.sku)
@pytest.mark.parametrize("mode", ["train", "infer"])
@pytest.mark.parametrize("pattern", [Pattern(), LONGNET], ids=str)
@pytest.mark.parametrize("world", [1, 4])
def test_every_preset_is_a_plan(name: str, facts: HardwareFacts, mode: Mode, pattern: Pattern, world: int) -> None:
    asked = replace(workload(8192, mode, pattern, "fp32"), world=world)
    plans = plans_of(PRESETS[name], asked, replace(facts, device_count=world))
    for each in plans:
        assert not rejection_reasons(asked, each, facts)
        assert not void_reasons(asked, each)
    assert len(set(plans)) == len(plans)


def test_production_recomputes_in_training_only_and_has_a_leaner_plan() -> None:
    train, leaner = plans_of(PRESETS["production"], workload(8192, "train"), FACTS)
    assert (train.checkpoint, train.pool_threshold_mib, train.window_tokens) == ("full", 1, None)
    assert (leaner.checkpoint, leaner.pool_threshold_mib, leaner.window_tokens) == ("full", None, 2048)
    assert plan("production", workload(8192, "infer"), FACTS).checkpoint == "selective"


def test_flash_first_decides_its_dtype_by_the_card() -> None:
    asked = workload(8192, "train", dtype="fp32")
    found = [plan("flash-first", asked, facts).dtype for facts in (H100, V100, FACTS)]
    assert found == ["bf16", "fp16", "fp32"]
    assert plan("flash-first", workload(8192, dtype="bf16"), H100).dtype == "bf16"


def test_over_ranks_keys_and_values_are_gathered() -> None:
    asked = replace(workload(8192, pattern=Pattern()), world=4)
    assert plan("collective-ring", replace(workload(8192), world=4), FACTS).schedule == "local"  # no segment is in two
    found = plan("collective-ring", asked, FACTS)
    assert (found.schedule, found.layout) == ("all-gather", "contiguous")
    assert plan("flash-first", asked, FACTS).schedule == "ring"
    assert plan("collective-ring", workload(8192), FACTS).schedule == "local"


def test_a_preset_that_cannot_run_says_why_of_every_kernel() -> None:
    asked = replace(workload(8192, dtype="bf16"), head_dim=4096)
    preset = replace(PRESETS["collective-ring"], kernels=("cudnn", "flash"))
    with pytest.raises(PlanError, match="preset collective-ring cannot run") as caught:
        plans_of(preset, asked, H100)
    assert set(caught.value.rejected) == {"cudnn", "flash"}
