"""Which plans there are: knobs, the one constraint function, equal plans once."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from machines import LONGNET, invented, plan, workload

from autotune.space.space import (
    Machine,
    Space,
    build_space,
    candidate_key,
    decode,
    encode,
    from_key,
    knobs_of,
    machine_of,
)
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.plan import rejection_reasons
from ringattn.workload import BranchTunables, Mode, Pattern, Tunables, Workload

CPU = HardwareFacts("cpu", "Invented", "invented", "x86_64", 4, 16384, 32, threads=4)
H100 = HardwareFacts("nvidia", "H100", "h100-sxm", "sm_90", 132, 81559, 50, packages=("triton",))


def space_of(cell: Workload, machine: Machine | None = None) -> Space:
    return build_space(cell, machine or invented(), plan(cell), ("bf16",))


@st.composite
def tunables_of(draw: st.DrawFn, cell: Workload) -> Tunables:
    knobs = knobs_of(cell, invented(), ("bf16", "fp32"))
    return decode(cell, {name: draw(st.sampled_from(values)) for name, values in knobs.items()})


@given(tunables_of(workload()))
def test_a_plan_survives_its_key_and_its_encoding(tunables: Tunables) -> None:
    assert from_key(candidate_key(tunables)) == tunables
    assert decode(workload(), encode(workload(), tunables)) == tunables


def test_keys_keep_parameters_and_their_types() -> None:
    tunables = replace(plan(workload()), params=(("quick.pack", True), ("quick.tile", "128x64"), ("swift.n", 3)))
    assert from_key(candidate_key(tunables)) == tunables


def test_what_has_no_effect_takes_its_plainest_value() -> None:
    infer = workload(mode="infer")
    given_ = {"dtype": "bf16", "checkpoint": "full", "pool_strategy": "bucket", "window_tokens": 10**6}
    given_ |= {f"forward.{n}": "quick" for n in range(3)} | {f"gather.{n}": "copy" for n in range(3)}
    made = decode(infer, given_ | {"param:swift.tile": "64"})
    assert made.checkpoint == "selective"
    assert made.pool_strategy == "shape"
    assert made.window_tokens is None
    assert made.params == ()
    assert [branch.gather for branch in made.branches] == ["view", "copy", "copy"]
    assert [branch.backward for branch in made.branches] == ["", "", ""]


def test_windows_only_where_every_segment_nests() -> None:
    nested = knobs_of(workload(8192), invented(), ("bf16",))["window_tokens"]
    assert nested == (None, 2048, 4096)
    odd = knobs_of(workload(8192, pattern=Pattern.of([500, 1024], [1, 2])), invented(), ("bf16",))
    assert odd["window_tokens"] == (None,)
    assert knobs_of(workload(pattern=Pattern()), invented(), ("bf16",))["window_tokens"] == (None,)


def test_only_the_constraint_function_removes_plans() -> None:
    free = Machine(("quick", "swift"), lambda cell, tunables: (), lambda cell, tunables: tunables)
    cell = workload(mode="infer", pattern=Pattern.of([1024], [2]))
    every = space_of(cell, free).all_plans()
    assert every is not None
    knobs = knobs_of(cell, free, ("bf16",))
    every_value = itertools.product(*knobs.values())
    combinations = {decode(cell, dict(zip(knobs, values, strict=True))) for values in every_value}
    assert set(every) == combinations

    refused = Machine(
        ("quick", "swift"),
        lambda cell, tunables: ("swift is out",) if tunables.branches[0].forward == "swift" else (),
        lambda cell, tunables: tunables,
    )
    space = space_of(cell, refused)
    assert set(space.all_plans() or ()) == {t for t in combinations if t.branches[0].forward == "quick"}
    assert space.rejected == (("swift bf16", ("swift is out",)),)


def test_plans_with_equal_steps_are_one_candidate() -> None:
    blind = Machine(
        ("quick",), lambda cell, tunables: (), lambda cell, tunables: replace(tunables, pool_threshold_mib=None)
    )
    space = space_of(workload(), blind)
    plans = space.all_plans()
    assert plans is not None
    assert len({replace(tunables, pool_threshold_mib=None) for tunables in plans}) == len(plans)
    assert all(move.knob != "pool_threshold_mib" for move in space.neighbours(space.default))


def test_neighbours_differ_in_one_knob_and_can_run() -> None:
    cell = workload()
    space = space_of(cell)
    here = encode(cell, space.default)
    moves = space.neighbours(space.default)
    assert moves
    for move in moves:
        there = encode(cell, move.tunables)
        changed = {name for name in here if here[name] != there[name]}
        # A pool switched off takes its strategy back with it; nothing else moves along.
        assert move.knob in changed
        assert changed <= {move.knob, "pool_strategy"}
        assert space.valid(move.tunables)
    assert len({move.tunables for move in moves}) == len(moves)


def test_combining_moves_checks_the_result() -> None:
    space = space_of(workload())
    combined = space.combine(space.default, {"gather.1": "copy", "checkpoint": "none"})
    assert combined is not None
    assert combined.checkpoint == "none"
    assert space.combine(space.default, {"checkpoint": "none"}) is None  # nothing is gathered


def test_kernel_plans_begin_with_the_default_and_pair_every_kernel() -> None:
    space = space_of(workload())
    assert space.kernel_plans[0] == space.default
    pairs = {(t.branches[0].forward, t.branches[0].backward) for t in space.kernel_plans}
    assert pairs == set(itertools.product(("quick", "swift", "math"), repeat=2))


def test_a_kernel_that_cannot_read_in_place_is_raced_on_copied_rows() -> None:
    def reasons(cell: Workload, tunables: Tunables) -> tuple[str, ...]:
        views = any(b.forward == "swift" and b.gather == "view" for b in tunables.branches[1:])
        return ("swift reads contiguous rows only",) if views else ()

    cell = workload(mode="infer")
    space = space_of(cell, Machine(("quick", "swift"), reasons, lambda cell, tunables: tunables))
    swift = [t for t in space.kernel_plans if t.branches[0].forward == "swift"]
    assert [b.gather for b in swift[0].branches] == ["view", "copy", "copy"]
    assert space.rejected == ()


def test_counting_gives_up_in_time() -> None:
    space = space_of(workload(pattern=Pattern.of([2**n for n in range(8, 13)], [1, 2, 4, 8, 16])))
    assert space.all_plans(64) is None
    assert space.size() > 10**6


def test_a_default_outside_the_usual_values_extends_the_knobs() -> None:
    cell = workload(65536)
    default = replace(plan(cell), window_tokens=16384)
    space = build_space(cell, invented(), default, ("bf16",))
    assert 16384 in space.knobs["window_tokens"]


@pytest.mark.parametrize(("facts", "dtypes"), [(CPU, ("fp32",)), (H100, ("bf16", "fp32"))])
@pytest.mark.parametrize("pattern", [Pattern(), LONGNET])
def test_every_plan_of_a_real_machine_passes_the_runtimes_own_check(
    facts: HardwareFacts, dtypes: tuple[str, ...], pattern: Pattern
) -> None:
    cell = workload(4096, pattern=pattern, dtype=dtypes[0])
    kernel = "flash-cpu" if facts is CPU else "cudnn"
    default = Tunables(dtypes[0], tuple(BranchTunables(kernel, kernel) for _ in pattern.resolved(4096)))
    space = build_space(cell, machine_of(facts), default, dtypes)
    for tunables in [*space.kernel_plans, *(move.tunables for move in space.neighbours(default))]:
        assert rejection_reasons(cell, tunables, facts) == ()
    assert len(space.kernel_plans) > 1


def test_a_dense_plan_has_no_knobs_that_do_nothing_for_it() -> None:
    cell = workload(4096, mode="infer", pattern=Pattern(), dtype="fp32")
    default = Tunables("fp32", (BranchTunables("flash-cpu"),))
    space = build_space(cell, machine_of(CPU), default, ("fp32",))
    assert {plan.branches[0].forward for plan in space.all_plans() or ()} == {"flash-cpu", "math"}
    assert space.size() == 2


@pytest.mark.parametrize(
    ("mode", "pattern", "steps"),
    [
        ("train", LONGNET, {"merge", "gather", "sum"}),
        ("infer", LONGNET, {"merge"}),  # nothing is copied by default, so nothing is gathered
        ("train", Pattern(), set()),
    ],
)
def test_blocks_of_the_fused_steps_are_tried_where_the_step_is_taken(
    mode: Mode, pattern: Pattern, steps: set[str]
) -> None:
    cell = workload(4096, mode=mode, pattern=pattern, dtype="bf16")
    backward = "cudnn" if mode == "train" else ""
    default = Tunables("bf16", tuple(BranchTunables("cudnn", backward) for _ in pattern.resolved(4096)))
    space = build_space(cell, machine_of(H100), default, ("bf16",))
    moves = [move for move in space.neighbours(default) if move.knob.endswith(".block")]
    assert {move.knob for move in moves} == {f"param:{step}.block" for step in steps}
    assert all(rejection_reasons(cell, move.tunables, H100) == () for move in moves)
    copied = space.combine(default, {"gather.1": "copy", "param:gather.block": 32}) if steps else default
    assert copied is not None
    assert dict(copied.params).get("gather.block") == (32 if steps else None)
    if mode == "infer":  # without a copy the parameter means nothing and goes
        assert space.combine(copied, {"gather.1": "view"}) == default


def test_a_value_that_the_machine_refuses_in_every_plan_is_no_choice() -> None:
    """On a CPU offload is refused whatever is beside it; keeping gathered rows only where none are gathered."""
    cell = workload(dtype="fp32")
    default = plan(cell, "flash-cpu", dtype="fp32")
    space = build_space(cell, machine_of(CPU), default, ("fp32",))
    assert set(space.knobs["checkpoint"]) == {"selective", "none", "full"}
    assert "offload" in knobs_of(cell, machine_of(CPU), ("fp32",))["checkpoint"]
    assert all(encode(cell, default)[name] in values for name, values in space.knobs.items() if name[:6] != "param:")
