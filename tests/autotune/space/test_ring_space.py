"""The knobs of a plan over ranks: no value that the constraint function refuses in every plan."""

from __future__ import annotations

import itertools

import pytest

from autotune.space.space import build_space, decode, machine_of
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.heuristic import heuristic_tunables
from ringattn.profile.resolve import built_in_heuristic
from ringattn.workload import Branch, Pattern, Workload

CPU = HardwareFacts("cpu", "Invented", "invented", "x86_64", 4, 16384, 32, threads=4)
POLICY = built_in_heuristic("cpu").policy
RING = ("schedule", "ulysses", "head_groups", "grad_wire", "exchange")
STAYING, CROSSING = Pattern((Branch(64, 1),)), Pattern((Branch(64, 1), Branch(512, 2)))


def knobs(workload: Workload, dtypes: tuple[str, ...]) -> dict[str, tuple[object, ...]]:
    assert POLICY is not None
    machine = machine_of(CPU)
    space = build_space(workload, machine, heuristic_tunables(workload, POLICY, CPU), dtypes)
    values = {name: space.knobs[name] for name in RING}
    # Brute force, on the one kernel that can do everything, without the knobs that have nothing to do with ranks.
    plain = {name: listed[0] for name, listed in space.knobs.items()}
    plain |= {name: "math" for name in plain if name.startswith(("forward.", "backward."))}
    every = {"schedule": ("local", "ring", "all-gather", "ulysses", "ulysses-ring"), "ulysses": (0, 2, 3, 4)}
    every |= {"head_groups": (0, 2, 4, 8), "grad_wire": ("", "compute"), "exchange": ("", "symmetric")}
    runs = [
        plan
        for dtype, *turned in itertools.product(dtypes, *every.values())
        for plan in [decode(workload, plain | {"dtype": dtype} | dict(zip(every, turned, strict=True)))]
        if not machine.reasons(workload, plan)
    ]
    for name in RING:
        assert set(values[name]) == {getattr(plan, name) for plan in runs}, name
    return values


@pytest.mark.parametrize("pattern", [Pattern(), STAYING, CROSSING], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (4, 2), (8, 8), (3, 1)])
@pytest.mark.parametrize("world", [2, 4])
def test_the_values_are_those_that_some_plan_can_have(world: int, heads: int, kv_heads: int, pattern: Pattern) -> None:
    for mode, dtypes in (("train", ("bf16", "fp32")), ("infer", ("fp32",))):
        workload = Workload(mode, True, 128, heads, 16, dtypes[0], kv_heads, pattern=pattern, world=world)  # type: ignore[arg-type]
        knobs(workload, dtypes)


def test_head_groups_do_not_exceed_the_heads() -> None:
    train = Workload("train", True, 128, 2, 16, "fp32", world=2)
    assert knobs(train, ("fp32",)) == {
        "schedule": ("ring", "all-gather", "ulysses"),
        "ulysses": (0,),
        "head_groups": (0, 2),
        "grad_wire": ("",),
        "exchange": ("",),
    }


def test_ways_to_exchange_heads_are_those_of_the_machine() -> None:
    workload = Workload("train", True, 8192, 32, 128, "bf16", world=4)
    for link, ways in (("nv18", ("", "symmetric")), ("pcie", ("",))):
        facts = HardwareFacts("nvidia", "H100", "h100-sxm", "sm_90", 132, 81559, 50, device_count=4, link=link)
        policy = built_in_heuristic("nvidia").policy
        assert policy is not None
        machine = machine_of(facts)
        space = build_space(workload, machine, heuristic_tunables(workload, policy, facts), ("bf16",))
        assert space.knobs["exchange"] == ways
        assert {plan.exchange for plan in space.kernel_plans if plan.schedule == "ulysses"} == set(ways)
        assert {plan.exchange for plan in space.kernel_plans if plan.schedule == "ring"} == {""}
