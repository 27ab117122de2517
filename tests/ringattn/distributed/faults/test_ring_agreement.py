"""At init ranks compare what they resolved: one common plan, or one clear error on every rank."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faults import Told, told_of
from oracle import Case, assert_equal_to, cpu, exact, found
from pool import Pool
from ring_cases import RingCase, run_ring

import ringattn.attention
from ringattn import Profile, RingAttention
from ringattn.distributed.agreement import _try_table
from ringattn.errors import PlanError
from ringattn.planning import module_setup
from ringattn.planning.module_setup import ModuleSetup
from ringattn.planning.table import PlanTable
from ringattn.workload import BranchTunables, Tunables, describe

CASE = Case(24, 2, 2, 4, causal=True)


def _profile(schedule: str, kernel: str, world: int = 2, layout: str = "zigzag") -> Profile:
    workload = replace(CASE.workload("fp32", "train"), seq_len=CASE.length // world, world=world)
    tunables = Tunables("fp32", (BranchTunables(kernel, kernel),), schedule=schedule, layout=layout)
    return Profile.single(cpu(), workload, tunables)


def _module(profile: Any, **arguments: Any) -> RingAttention:
    given = {"causal": True, "profile": profile, "device": "cpu", "process_group": dist.group.WORLD}
    return RingAttention(2, 4, **(given | arguments))


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def _with_profiles(profiles: list[Any], layout: str = "zigzag") -> tuple[str, list[str]]:
    """The plan that serves, and what was said; results are right whatever it is, in the layout expected."""
    kept = _Kept()
    logging.getLogger("ringattn").addHandler(kept)
    try:
        module = _module(profiles[dist.get_rank()])
    finally:
        logging.getLogger("ringattn").removeHandler(kept)
    q, k, v = (x.detach().float() for x in CASE.inputs())
    dout = CASE.dout(torch.float32)
    assert module.layout == layout
    results = run_ring(RingCase(CASE, "", layout), module, q, k, v, dout)
    assert_equal_to(results, exact(CASE, q, k, v, dout), tolerance=1e-5)
    plan = module.plan_for(CASE.length // 2, torch.float32, True)
    return describe(plan.tunables), [line for line in kept.said if "different plans" in line]


@pytest.mark.parametrize("order", [1, -1])
def test_different_profiles_give_one_common_plan_said_once(order: int, ranks: Callable[[int], Pool]) -> None:
    profiles = [_profile("ring", "math"), _profile("ulysses", "flash-cpu")][::order]
    first, second = ranks(2).run(_with_profiles, profiles)
    assert first[0] == second[0]
    assert ("ring/zigzag" if order == 1 else "ulysses/zigzag") in first[0]  # rank 0's: it is as frequent as the other
    assert len(first[1]) == 1
    assert second[1] == []


def test_the_profile_of_some_ranks_serves_all(ranks: Callable[[int], Pool]) -> None:
    (first, _), (second, _) = ranks(2).run(_with_profiles, [None, _profile("all-gather", "math")])
    assert first == second
    assert "all-gather/zigzag" in first


def test_the_layout_is_the_profiles(ranks: Callable[[int], Pool]) -> None:
    for plan, said in ranks(2).run(_with_profiles, [_profile("ring", "math", layout="contiguous")] * 2, "contiguous"):
        assert "ring/contiguous" in plan
        assert said == []


def test_ranks_whose_profiles_are_for_different_layouts_take_one(ranks: Callable[[int], Pool]) -> None:
    profiles = [_profile("ring", "math", layout="contiguous"), _profile("ring", "math")]
    (first, said), (second, _) = ranks(2).run(_with_profiles, profiles, "contiguous")
    assert first == second
    assert "ring/contiguous" in first
    assert len(said) == 1
    (first, _), (second, _) = ranks(2).run(_with_profiles, [None, profiles[0]], "contiguous")
    assert first == second


def test_equal_profiles_say_nothing(ranks: Callable[[int], Pool]) -> None:
    for plan, said in ranks(2).run(_with_profiles, [_profile("ulysses", "math")] * 2):
        assert "ulysses/zigzag" in plan
        assert said == []


def _warned(profile: Any) -> list[str]:
    """What a rank warns of where no plan was measured: at init, or at a length of a measured module."""
    module_setup._said.clear()  # of earlier tests in the same process
    kept = _Kept()
    logging.getLogger("ringattn").addHandler(kept)
    try:
        module = _module(profile)
        module(*(x.detach().float() for x in CASE.inputs()))
    finally:
        logging.getLogger("ringattn").removeHandler(kept)
    return kept.said


def test_only_rank_0_says_that_a_heuristic_serves(ranks: Callable[[int], Pool]) -> None:
    longer = _profile("ring", "math")
    (entry,) = longer.plans
    longer = replace(longer, plans=(replace(entry, workload=entry.workload.at(4096)),))
    for profile, text in ((_profile("ring", "math", world=4), "using the heuristic"), (longer, "a heuristic plan")):
        first, second = ranks(2).run(_warned, profile)
        assert len(first) == 1
        assert text in first[0]
        assert second == []


# --- other machines ----------------------------------------------------------------------------------------------


def _elsewhere(changes: list[dict[str, dict[str, Any]]], profiles: list[Any]) -> RingAttention:
    """A module on ranks whose facts or policies were changed: as if they ran on machines of their own."""
    own, set_up = changes[dist.get_rank()], ringattn.attention.set_up

    def changed(*arguments: Any) -> ModuleSetup:
        setup = set_up(*arguments)
        facts = replace(setup.facts, **own.get("facts", {}))
        return replace(setup, facts=facts, policy=replace(setup.policy, **own.get("policy", {})))

    ringattn.attention.set_up = changed
    try:
        return _module(profiles[dist.get_rank()])
    finally:
        ringattn.attention.set_up = set_up


def _told_elsewhere(facts: dict[str, Any]) -> Told:
    return told_of(lambda: _elsewhere([{}, {"facts": facts}], [None, None]))


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"arch": "riscv64", "device_name": "Other"}, "rank 1 on Other (riscv64); one sequence needs one architecture"),
        ({"software": (("torch", "2.0.1"),)}, "on rank 0 of the group and 2.0.1 on rank 1"),
    ],
    ids=["architecture", "torch"],
)
def test_ranks_on_machines_that_do_not_go_together(
    facts: dict[str, Any], told: str, ranks: Callable[[int], Pool]
) -> None:
    for error, message in ranks(2).run(_told_elsewhere, facts):
        assert error == "InputError"
        assert told in message


def _found_elsewhere(changes: list[dict[str, dict[str, Any]]], profiles: list[Any]) -> tuple[Any, ...]:
    module = _elsewhere(changes, profiles)
    facts, plan = module._setup.facts, module.plan_for(CASE.length // 2, torch.float32, True)
    return facts.packages, facts.link, facts.device_count, describe(plan.tunables), "all use" in module.explain()


def test_ranks_that_differ_plan_for_what_all_of_them_have(ranks: Callable[[int], Pool]) -> None:
    profiles = [_profile("ring", "math"), _profile("ring", "flash-cpu")]
    first, second = ({"packages": packages, "link": "nv18", "device_count": 2} for packages in (("a", "b"), ("b", "c")))
    told = ranks(2).run(_found_elsewhere, [{"facts": first}, {"facts": second}], profiles)
    assert told == [(("b",), "nv18", 2, told[0][3], True)] * 2
    told = ranks(2).run(_found_elsewhere, [{"facts": first}, {"facts": second | {"link": "pcie"}}], profiles)
    assert told == [(("b",), "", 1, told[0][3], True)] * 2


def test_ranks_whose_heuristics_differ_take_that_of_rank_0(ranks: Callable[[int], Pool]) -> None:
    policy = {"forward": ("math",), "backward": ("math",)}
    for changes, kernel in (([{}, {"policy": policy}], "flash-cpu"), ([{"policy": policy}, {}], "math")):
        (*_, first, explained), (*_, second, _) = ranks(2).run(_found_elsewhere, changes, [None, None])
        assert first == second
        assert first.startswith(f"{kernel}/{kernel} fp32")
        assert explained


def test_a_common_table_is_what_the_module_asked_for() -> None:
    """And none where the profile would give way to the heuristic."""
    module = CASE.module(dtype="auto", prefer="memory", checkpoint="full")
    facts, policy = module._setup.facts, module._setup.policy
    table = _try_table((), policy, facts, module.plan, "zigzag")
    assert isinstance(table, PlanTable)
    assert (table.prefer, table.auto_dtype, table.wishes) == ("memory", True, module.plan.wishes)
    assert table.conditions.layout == "zigzag"
    unfit = Profile.single(facts, CASE.workload("fp32"), Tunables("fp32", (BranchTunables("cudnn", "cudnn"),)))
    assert isinstance(_try_table(unfit.plans, policy, facts, CASE.module().plan, ""), PlanError)


# --- errors ------------------------------------------------------------------------------------------------------


def _told_to_build(arguments: list[dict[str, Any]]) -> Told:
    own = dict(arguments[dist.get_rank()])
    return told_of(lambda: _module(own.pop("profile", None), **own))


def test_arguments_that_must_be_equal(ranks: Callable[[int], Pool]) -> None:
    for name, values in {
        "causal": (True, False),
        "scale": (0.5, 0.25),
        "layout": ("zigzag", "contiguous"),
        "segment_lengths": ([8], [4]),
        "prefer": (None, "memory"),
        "launch": ("eager", "captured"),
        "backend": ("math", ("math", "flash-cpu")),
        "dtype": (torch.float32, None),
        "checkpoint": (None, "full"),
    }.items():
        more = {"dilation_rates": [1]} if name == "segment_lengths" else {}
        told = ranks(2).run(_told_to_build, [{name: value, **more} for value in values])
        for error, message in told:
            assert error == "InputError"
            assert message.startswith("pattern is" if more else f"{name} is")
            assert "on rank 0 of the group and" in message


def test_an_error_of_one_rank_is_one_of_all(tmp_path: Path, ranks: Callable[[int], Pool]) -> None:
    told = ranks(2).run(_told_to_build, [{}, {"profile": str(tmp_path / "missing.yaml")}])
    assert told[1][0] == "ProfileError"
    assert told[0][0] == "PeerError"
    assert "rank 1 of the group could not build its module: ProfileError" in told[0][1]
    assert "missing.yaml" in told[0][1]


def test_a_profile_that_cannot_run_here(ranks: Callable[[int], Pool]) -> None:
    """Ulysses over two ranks needs an even number of key/value heads."""
    for error, message in ranks(2).run(
        _told_to_build, [{"num_kv_heads": 1, "profile": _profile("ulysses", "math")}] * 2
    ):
        assert error == "PlanError"
        assert "needs a multiple of 2 key/value heads, not 1" in message


def _copies() -> None:
    module = _module(None)
    q, k, v = CASE.inputs()
    leaves = [module.shard(x.detach()) for x in (q, k, v)]
    expected = module(*leaves)
    assert torch.equal(copy.deepcopy(module)(*leaves), expected)
    assert told_of(lambda: pickle.dumps(module))[0] == "RingAttentionError"
    assert module.state_dict() == {}
    compiled = torch.compile(lambda *inputs: module(*inputs).sin() + 1, backend="eager")
    assert torch.equal(compiled(*leaves), expected.sin() + 1)


def test_copies_share_the_group_and_graphs_break_around_a_call(ranks: Callable[[int], Pool]) -> None:
    ranks(2).run(_copies)


def _a_group_of_one() -> None:
    group = dist.new_group([0])
    if dist.get_rank() == 0:
        module = _module(None, process_group=group)
        q, k, v = CASE.inputs()
        assert_equal_to(found(module, q, k, v, CASE.dout()), exact(CASE, q, k, v, CASE.dout()))
        assert module.layout == "zigzag"
        assert torch.equal(module.positions(24), torch.arange(24))
        assert torch.equal(module.unshard(module.shard(q)), q)
        assert told_of(lambda: module(q, k, v, total_length=25))[0] == "InputError"
    dist.barrier()


def test_a_group_of_one_rank_is_one_rank(ranks: Callable[[int], Pool]) -> None:
    ranks(2).run(_a_group_of_one)
