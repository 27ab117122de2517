"""One table holds everything about a tunable: a new one needs one entry, and the entries keep their own promises."""

from __future__ import annotations

import copy
import itertools
import os
import pickle
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from patience import LIMIT_S

from autotune.space.space import decode, encode, knobs_of, machine_of
from ringattn.errors import FieldError
from ringattn.hardware.facts import HardwareFacts
from ringattn.planning.equal_plans import case_of, plainest, void_reasons
from ringattn.planning.plan import rejection_reasons
from ringattn.tunables import TABLE, Tunable
from ringattn.workload import BranchTunables, Mode, Pattern, Tunables, Workload, describe

ROOT = Path(__file__).parents[1]
ENTRY = """    prefetch: str = tunable(
        "off",
        ("off", "next"),
        void=lambda case: "" if case.dense else "prefetch next is for dense plans",
        meaning="rows of the next block are read ahead",
        stage="housekeeping",
    )
"""
BEFORE = "    params: tuple[tuple[str, ParamValue], ...] = ()\n"

CPU = HardwareFacts("cpu", "Invented", "invented", "x86_64", 4, 16384, 32, threads=4)
H100 = HardwareFacts(
    *("nvidia", "H100", "h100-sxm", "sm_90", 132, 81559, 50),
    packages=("triton",),
    device_count=4,
    link="nv18",
)
PATTERNS = (Pattern(), Pattern.of([512], [1]), Pattern.of([512, 1024], [1, 2]), Pattern.of([1024, 4096], [2, 4]))
MODES: tuple[Mode, ...] = ("train", "infer")
WORKLOADS = [
    Workload(mode, True, 2048, 4, 64, "bf16", pattern=pattern, world=world)
    for mode, pattern, world in itertools.product(MODES, PATTERNS, (1, 4))
]


def test_a_new_tunable_is_one_entry(tmp_path: Path) -> None:
    for package in ("ringattn", "autotune"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "profiles").symlink_to(ROOT / "profiles")
    table = tmp_path / "ringattn" / "tunables.py"
    before, after = table.read_text().split(BEFORE)
    table.write_text(before + ENTRY + BEFORE + after)
    script = Path(__file__).parent / "support" / "new_tunable.py"
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "prefetch is 'lazy'; use one of off, next\n"


def test_every_field_of_a_plan_is_in_the_table() -> None:
    names = {f.name for f in (*fields(BranchTunables), *fields(Tunables))}
    assert set(TABLE) == names - {"branches", "params"}


@st.composite
def plans(draw: st.DrawFn) -> tuple[Workload, Tunables]:
    """A workload with any values that are worth trying, whether or not they go together."""
    workload = draw(st.sampled_from(WORKLOADS))
    case = case_of(workload, Tunables("bf16", tuple(BranchTunables("") for _ in workload.pattern.resolved(2048))))

    def one(per_branch: bool) -> dict[str, Any]:
        named = {"forward": "math", "backward": "math", "dtype": "bf16"}
        return {
            e.name: named.get(e.name) or draw(st.sampled_from(e.allowed or e.tried(case)))
            for e in TABLE.values()
            if e.per_branch == per_branch
        }

    return workload, Tunables(branches=tuple(BranchTunables(**one(True)) for _ in case.rates), **one(False))


@given(plans())
def test_the_plainest_form_holds_nothing_void_and_stays(drawn: tuple[Workload, Tunables]) -> None:
    workload, tunables = drawn
    plain = plainest(workload, tunables)
    assert void_reasons(workload, plain) == []
    assert plainest(workload, plain) == plain
    assert (plain == tunables) == (not void_reasons(workload, tunables))


@given(plans(), st.sampled_from([CPU, H100]))
def test_a_plan_that_runs_is_the_plainest_of_its_equals(drawn: tuple[Workload, Tunables], facts: HardwareFacts) -> None:
    workload, tunables = drawn
    reasons = rejection_reasons(workload, tunables, facts)
    assert set(void_reasons(workload, tunables)) <= set(reasons)
    if not reasons:
        assert decode(workload, encode(workload, tunables)) == tunables


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_values_to_try_are_allowed_and_begin_with_the_plain_one(workload: Workload) -> None:
    knobs = knobs_of(workload, machine_of(H100), ("bf16", "fp32"))
    for name, values in knobs.items():
        entry = TABLE.get(name.partition(".")[0])
        if entry is not None and not entry.required and entry.name != "backward":
            assert values[0] == entry.plain
            assert [entry.checked(value) for value in values] == list(values)
            assert len(set(values)) == len(values)


BOUNDED = [entry for entry in TABLE.values() if entry.allowed or entry.least is not None]  # the others take any name


@pytest.mark.parametrize("entry", BOUNDED, ids=lambda entry: entry.name)
@pytest.mark.parametrize("bad", ["no", -1, ["view"]], ids=str)
def test_a_value_that_is_not_allowed_is_refused_by_name(entry: Tunable, bad: Any) -> None:
    branch = BranchTunables("math", "math")
    whole: Any = branch if entry.per_branch else Tunables("bf16", (branch,))
    with pytest.raises(FieldError, match=f"^{entry.name} is "):
        replace(whole, **{entry.name: bad})


@pytest.mark.parametrize("workload", WORKLOADS, ids=str)
def test_describe_shows_every_choice_that_counts(workload: Workload) -> None:
    branches = tuple(BranchTunables("math", "math" if workload.train else "") for _ in workload.pattern.resolved(2048))
    base = Tunables("bf16", branches, layout="contiguous" if workload.world > 1 else "")
    case = case_of(workload, base)
    texts = {describe(base)}
    changed = [
        replace(base, **{entry.name: value})  # type: ignore[arg-type]
        for entry in TABLE.values()
        if not entry.per_branch and not entry.required
        for value in entry.tried(case)
        if value != entry.plain
    ]
    counting = [plan for plan in changed if plan != base and not void_reasons(workload, plan)]
    texts |= {describe(plan) for plan in counting}
    assert len(texts) == len(counting) + 1


def test_the_hash_of_a_plan_is_kept_and_goes_with_no_copy() -> None:
    """That of text is another in each process."""
    plan, equal = (Tunables("bf16", (BranchTunables("math"),)) for _ in range(2))
    assert hash(plan) == hash(equal) != hash(replace(plan, compile=True))
    for copied in (pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):  # noqa: S301  just made
        assert copied == plan
        assert not hasattr(copied, "_hash")
