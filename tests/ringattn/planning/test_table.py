"""The table of plans: buckets, runners-up, refusals, wishes, and what ``explain`` says of it."""

from __future__ import annotations

import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from machine_samples import EPYC, EVIDENCE, H100
from oracle import DENSE, Case, cpu, pattern_of

from ringattn import Profile, RingAttention
from ringattn.errors import InputError, PlanError, ProfileError
from ringattn.hardware.facts import HardwareFacts, detect
from ringattn.planning import module_setup
from ringattn.planning.heuristic import NO_WISHES, Wishes
from ringattn.planning.plan import Conditions, Origin
from ringattn.planning.table import ModuleShape, PlanTable, Row, as_wished, build_table, fitted
from ringattn.planning.unmeasured_workloads import probe_options
from ringattn.profile.schema import Choice, Fingerprint, PlanEntry, Policy
from ringattn.profile.yaml_io import save_profile
from ringattn.workload import BranchTunables, Tunables, Workload, nearest_bucket, not_narrower

POLICY = Policy(
    (("bf16", "bf16"), ("fp16", "fp16"), ("fp32", "fp32"), ("fp64", "fp64")), ("efficient", "math"), ("math",), 4
)
SHAPE = ModuleShape(16, 16, 128, True, DENSE)
TWO = pattern_of([1024, 4096], [1, 4])


def choice(*kernels: str, dtype: str = "bf16", train: bool = True, **changes: Any) -> Choice:
    branches = tuple(BranchTunables(name, name if train else "") for name in kernels)
    return Choice(Tunables(dtype, branches, **changes), EVIDENCE)


def entry(
    length: int, *choices: Choice, dtype: str = "bf16", train: bool = True, auto: Choice | None = None, **more: Any
) -> PlanEntry:
    workload = SHAPE.workload(length, dtype, train)
    first, *rest = choices or (choice("cudnn", train=train),)
    return PlanEntry(workload, first, tuple(rest), auto=auto, **more)


def table(*entries: PlanEntry, facts: HardwareFacts = H100, **arguments: Any) -> PlanTable:
    return build_table(SHAPE, entries, POLICY, facts, **arguments)


def at(made: PlanTable, length: int, dtype: str = "bf16", train: bool = True, batch: int = 1) -> Row:
    return made.plan_at(length, dtype, train, batch)


def kernels_of(row: Row) -> tuple[str, str]:
    assert row.plan is not None
    branch = row.plan.tunables.branches[0]
    return branch.forward, branch.backward


# --- buckets -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("length", "bucket"),
    [(724, None), (725, 1024), (1024, 1024), (2047, 1024), (2048, 1024), (2049, 4096), (5792, 4096), (5793, None)],
)
def test_the_nearest_measured_length_serves(length: int, bucket: int | None) -> None:
    assert nearest_bucket(length, [4096, 1024]) == bucket


@given(st.integers(1, 1 << 24), st.lists(st.integers(1, 1 << 22), max_size=6))
def test_buckets_are_measured_lengths_within_the_measured_range(length: int, measured: list[int]) -> None:
    bucket = nearest_bucket(length, measured)
    inside = bool(measured) and min(measured) / 2**0.5 <= length <= max(measured) * 2**0.5
    assert (bucket in measured) if inside else (bucket is None)


def test_each_row_is_of_a_bucket_a_dtype_and_a_mode() -> None:
    made = table(entry(1024, choice("cudnn")), entry(4096, choice("flash")))
    assert kernels_of(at(made, 1100)) == ("cudnn", "cudnn")
    assert kernels_of(at(made, 3000)) == ("flash", "flash")
    for row in (at(made, 400), at(made, 9000), at(made, 1024, "fp16"), at(made, 1024, train=False)):
        assert (row.origin.source, kernels_of(row)[0]) == ("heuristic", "efficient")
    assert at(made, 1100).bucket == 1024
    assert at(made, 9000).bucket is None
    assert len(made.rows) == 4 * 2 + 2  # four dtypes, two modes, and the two measured ones


def test_the_plan_of_a_row_is_for_the_length_that_was_asked() -> None:
    row = at(table(entry(1024)), 1100, batch=3)
    assert row.plan is not None
    assert (row.plan.workload.seq_len, row.plan.workload.batch) == (1100, 3)


def test_rows_of_several_batches_serve_the_calls_near_them() -> None:
    one, many = entry(256, choice("cudnn")), entry(256, choice("flash"))
    many = replace(many, workload=replace(many.workload, batch=64))
    made = table(one, many)
    assert [kernels_of(at(made, 256, batch=batch))[0] for batch in (1, 2, 48, 500)] == ["cudnn"] * 2 + ["flash"] * 2
    assert [row.measured for row in made.rows if row.measured is not None] == [one.workload, many.workload]
    assert "B~64 S~256" in str(made)


def test_a_row_that_serves_nothing_is_not_checked_and_one_that_does_is() -> None:
    """Where the profile must run, a plan for other heads at a length with a plan for these may be one that cannot."""
    gone = choice("flash-attn-2")
    others = replace(entry(1024, gone), workload=replace(SHAPE.workload(1024, "bf16", True), heads=64, kv_heads=64))
    assert kernels_of(at(table(entry(1024), others, strict=True), 1024)) == ("cudnn", "cudnn")
    with pytest.raises(PlanError, match="cannot run here"):
        table(others, strict=True)


def test_a_plan_that_runs_for_its_own_heads_alone_gives_way_for_others() -> None:
    """A profile of 2 ranks with 32/32 heads, one plan of which exchanges them in groups that 32/8 heads do not have."""
    exchanging = Choice(
        Tunables("bf16", (BranchTunables("cudnn"),), schedule="ulysses", layout="contiguous", head_groups=8)
    )
    plain = Choice(Tunables("bf16", (BranchTunables("cudnn", "cudnn"),), schedule="ulysses", layout="contiguous"))
    of_many = replace(SHAPE, heads=32, kv_heads=32, world=2)
    measured = PlanEntry(of_many.workload(1024, "bf16", False), exchanging)
    of_few = PlanEntry(replace(of_many, kv_heads=8).workload(1024, "bf16", True), plain)
    for kv_heads, source in ((32, "profile"), (8, "heuristic")):
        shape = replace(of_many, kv_heads=kv_heads)
        row = build_table(shape, (measured, of_few), POLICY, H100, strict=True).plan_at(1024, "bf16", False, 1)
        assert row.origin.source == source
    assert "head_groups 8 does not divide the 4 key/value heads of a rank" in row.note
    with pytest.raises(PlanError, match="head_groups 8 does not divide"):  # which a profile for other heads alone is
        build_table(replace(of_many, kv_heads=8), (measured,), POLICY, H100, strict=True)


# --- what cannot run ---------------------------------------------------------------------------------------------


def test_where_the_winner_cannot_run_the_next_does_and_then_the_heuristic() -> None:
    gone = choice("flash-attn-2")
    row = at(table(entry(1024, gone, choice("flash"), choice("cudnn"))), 1024)
    assert (row.origin.source, kernels_of(row)) == ("profile", ("flash", "flash"))
    assert "the package flash_attn is not installed" in row.note
    row = at(table(entry(1024, gone, gone, front=(choice("cudnn"),))), 1024)
    assert kernels_of(row) == ("cudnn", "cudnn")
    row = at(table(entry(1024, gone)), 1024)
    assert (row.origin.source, kernels_of(row)) == ("heuristic", ("efficient", "math"))
    assert "flash_attn" in row.note


def test_a_plan_is_checked_for_the_actual_shape() -> None:
    made = build_table(replace(SHAPE, causal=False), (entry(4096, choice("cudnn")),), POLICY, H100)
    assert kernels_of(at(made, 4096)) == ("cudnn", "cudnn")
    row = at(made, 4160)  # 64 beyond a multiple of 128: cudnn's dq can be NaN
    assert row.origin.source == "heuristic"
    assert "dq can be NaN" in row.note


def test_a_named_profile_must_run() -> None:
    with pytest.raises(PlanError, match=r"the profile's plan for .*S1024.* cannot run here: plan: .*flash_attn"):
        table(entry(1024, choice("flash-attn-2"), choice("cudnn")), strict=True)
    # what the user asked for explicitly comes first, and is all that must run
    made = table(entry(1024, choice("flash-attn-2")), strict=True, wishes=Wishes(forward="flash", backward="flash"))
    assert kernels_of(at(made, 1024)) == ("flash", "flash")
    assert kernels_of(at(table(entry(1024), strict=True), 1024)) == ("cudnn", "cudnn")


def test_a_named_profile_whose_plan_is_too_narrow_says_so() -> None:
    with pytest.raises(PlanError, match=r"it computes in less than fp32, which only dtype='auto' may"):
        table(entry(1024, choice("flash"), dtype="fp32"), strict=True)


def test_a_refusal_in_a_profile_refuses() -> None:
    refusing = PlanEntry(SHAPE.workload(1 << 20, "bf16", True), refusal="nothing fits in 80 GiB")
    for strict in (False, True):
        made = table(refusing, entry(1024), strict=strict)
        row = at(made, 1 << 20)
        assert row.plan is None
        with pytest.raises(PlanError, match=r"cannot run .*S1048576.*: measured: nothing fits in 80 GiB\. Name a back"):
            row.runnable()
        assert "refused: cannot run" in str(made)
        assert at(made, 1024).plan is not None
    # an explicit choice beats the profile
    assert at(table(refusing, wishes=Wishes(backward="flash")), 1 << 20).plan is not None


def test_the_heuristic_refuses_with_every_candidate() -> None:
    made = table(wishes=Wishes(forward="cudnn"))
    row = at(made, 1024, "fp32")
    assert row.plan is None
    with pytest.raises(PlanError, match=r"no kernel can run .*cudnn: no fp32"):
        row.runnable()
    assert at(made, 1024).plan is not None


def test_where_no_row_can_run_the_module_is_refused_at_once() -> None:
    with pytest.raises(PlanError, match="nothing that was asked for can run on this machine: cudnn: ") as raised:
        table(facts=EPYC, wishes=Wishes(forward="cudnn", backward="cudnn"))
    assert raised.value.rejected == {"cudnn": ("runs on NVIDIA GPUs only",)}


def test_a_refusal_is_raised_anew_each_time() -> None:
    row = at(table(wishes=Wishes(forward="cudnn")), 1024, "fp32")
    errors = []
    for _ in range(2):
        with pytest.raises(PlanError) as raised:
            row.runnable()
        errors.append(raised.value)
    assert errors[0] is not errors[1]
    assert row.refusal is not None
    assert row.refusal.__traceback__ is None  # frames hold on to everything their callers held


# --- dtype -------------------------------------------------------------------------------------------------------


def test_only_auto_computes_in_less_than_the_inputs() -> None:
    measured = entry(
        1024, choice("efficient", dtype="fp32"), dtype="fp32", auto=choice("cudnn", dtype="bf16"), front=()
    )
    plain, auto, narrow = (
        at(table(measured, **arguments), 1024, "fp32")
        for arguments in ({}, {"auto_dtype": True}, {"wishes": Wishes(dtype="bf16")})
    )
    assert [row.plan.tunables.dtype for row in (plain, auto, narrow) if row.plan] == ["fp32", "bf16", "bf16"]
    assert [each.origin for each in (plain, auto, narrow)] == [
        Origin("profile"),
        Origin("profile"),
        Origin("profile", user=True),
    ]
    assert kernels_of(auto) == ("cudnn", "cudnn")


def test_an_explicit_dtype_takes_what_was_measured_in_it() -> None:
    measured = entry(1024, choice("efficient", dtype="fp32"), choice("flash", dtype="bf16"), dtype="bf16")
    made = table(measured, wishes=Wishes(dtype="bf16"))
    assert (at(made, 1024).origin, kernels_of(at(made, 1024))) == (Origin("profile", user=True), ("flash", "flash"))
    assert kernels_of(at(table(measured), 1024)) == ("efficient", "efficient")  # wider than the inputs is free to win


def test_auto_without_a_measured_narrower_plan_is_the_plain_choice() -> None:
    assert kernels_of(at(table(entry(1024, choice("flash")), auto_dtype=True), 1024)) == ("flash", "flash")
    assert at(table(auto_dtype=True), 1024, "fp32").origin.source == "heuristic"


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "fp64"])
def test_no_dtype_is_narrower_than_itself(dtype: str) -> None:
    assert not_narrower(dtype)[0] == dtype
    assert "bf16" not in not_narrower("fp16")
    assert "fp16" not in not_narrower("bf16")
    assert "tf32" not in not_narrower("fp32")


# --- wishes ------------------------------------------------------------------------------------------------------


def test_wishes_change_a_measured_plan_and_nothing_else_of_it() -> None:
    tunables = Tunables(
        "bf16",
        (BranchTunables("cudnn", "cudnn"), BranchTunables("flash", "flash", "copy")),
        window_tokens=4096,
        params=(("cudnn.a", 1), ("flash.b", 2), ("merge.block", 32)),
    )
    wished = as_wished(tunables, Wishes("flash", "math", None, "full"), train=True)
    assert wished == replace(
        tunables,
        branches=(BranchTunables("flash", "math"), BranchTunables("flash", "math", "copy")),
        checkpoint="full",
        params=(("flash.b", 2), ("merge.block", 32)),
    )
    assert as_wished(tunables, NO_WISHES, train=True) == tunables
    inferring = as_wished(tunables, Wishes(backward="math", checkpoint="full"), train=False)
    assert [branch.backward for branch in inferring.branches] == ["", ""]
    assert inferring.checkpoint == "selective"


def test_a_window_that_no_longer_splits_goes() -> None:
    tunables = Tunables("bf16", (BranchTunables("cudnn"),), window_tokens=4096)
    workload = Workload("infer", True, 4096, 16, 128, "bf16", pattern=pattern_of([1024], [1]))
    assert fitted(tunables, workload).window_tokens is None
    assert fitted(tunables, workload.at(4097)) == tunables


def test_a_wish_that_cannot_run_gives_way_to_nothing() -> None:
    made = table(entry(1024), wishes=Wishes(forward="flash-cpu", backward="math"), facts=EPYC)
    assert at(made, 1024, "fp64").plan is None
    assert kernels_of(at(made, 1024, "fp32")) == ("flash-cpu", "math")


def test_a_deterministic_torch_gets_deterministic_plans() -> None:
    made = table(entry(1024, choice("cudnn"), choice("flash")), conditions=Conditions(deterministic=True))
    assert kernels_of(at(made, 1024)) == ("flash", "flash")
    assert "its backward is not deterministic" in at(made, 1024).note


# --- a module and its profile ------------------------------------------------------------------------------------


def measured_here(*entries: PlanEntry) -> Profile:
    return Profile("measured", Fingerprint.of(cpu()), cpu().software, plans=entries)


def small(length: int, *kernels: str, dtype: str = "fp32", train: bool = False, **changes: Any) -> PlanEntry:
    mode: Any = "train" if train else "infer"
    workload = Workload(mode, False, length, 2, 4, dtype)
    first, *rest = (
        Choice(Tunables(changes.get("compute", dtype), (BranchTunables(name, name if train else ""),)), EVIDENCE)
        for name in kernels
    )
    return PlanEntry(workload, first, tuple(rest), auto=changes.get("auto"))


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(module_setup, "_said", set())
    caplog.set_level(logging.INFO, "ringattn")
    return caplog


def call(module: RingAttention, length: int, dtype: torch.dtype = torch.float32) -> None:
    module(*(x.detach() for x in Case(length).inputs(dtype)))


def test_plan_for_is_what_a_call_obeys() -> None:
    module = Case(64).module(profile=measured_here(small(64, "math"), small(256, "flash-cpu")))
    for length, kernel in ((64, "math"), (80, "math"), (256, "flash-cpu")):
        plan = module.plan_for(length, torch.float32, train=False)
        assert plan == module.plan_for(length, "fp32", train=False)
        assert plan.tunables.branches[0].forward == kernel
        call(module, length)
        program = module.program_for(*(x.detach() for x in Case(length).inputs(torch.float32)), train=False)
        assert program.plan.tunables == plan.tunables
    assert module.plan_for(64, torch.float64, train=True).tunables.branches == (BranchTunables("math", "math"),)


@pytest.mark.parametrize("length", [0, -1, True, 2.5, "8"])
def test_plan_for_wants_a_length(length: Any) -> None:
    with pytest.raises(InputError, match=r"length is .*; it must be an integer >= 1"):
        Case(8).module().plan_for(length, torch.float32, train=False)


@pytest.mark.parametrize("dtype", [torch.int32, "int32", "tf32", "auto", 16, None])
def test_plan_for_wants_an_input_dtype(dtype: Any) -> None:
    with pytest.raises(InputError, match=r"dtype is .*; use one of bf16, fp16, fp32, fp64 or torch\.bfloat16"):
        Case(8).module().plan_for(8, dtype, train=False)


def test_plan_for_knows_the_longest_sequence() -> None:
    module = Case(8).module(max_seq_len=16)
    module.plan_for(16, torch.float32, train=False)
    with pytest.raises(InputError, match="17 positions, more than max_seq_len, 16"):
        module.plan_for(17, torch.float32, train=False)


def test_the_table_prints_one_row_a_line() -> None:
    module = Case(64).module(profile=measured_here(small(64, "math")))
    lines = str(module.plan).splitlines()
    assert len(lines) == len(module.plan.rows) == 9
    assert lines.count(f"{'S~64':>16}  fp32  infer  math fp32  (profile)") == 1
    assert f"{'any other length':>16}  fp64  train  math/math fp64  (heuristic)" in lines


def test_explain_says_where_the_plans_come_from_and_what_gave_way(tmp_path: Path) -> None:
    path = tmp_path / "here.yaml"
    save_profile(measured_here(small(64, "math"), small(64, "flash-cpu", train=True)), path)
    text = Case(64).module(profile=path).explain()
    assert f"{path} (argument): taken; tier exact: the same device and software" in text
    assert "2 plans for dense full D4" in text
    assert "S~64  fp32  infer  math fp32  (profile)" in text
    assert re.search(r"heuristic-\S+ \(shipped\): taken for what no plan covers", text)
    text = Case(64).module(profile=measured_here(small(64, "math")), causal=True).explain()
    assert "no plan for dense causal D4" in text


def test_explain_gives_the_reasons_of_what_gave_way(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    save_profile(measured_here(small(64, "cudnn", "math")), tmp_path / "here.yaml")
    monkeypatch.setenv("RINGTUNE_PROFILE_PATH", str(tmp_path))
    text = Case(64).module(profile="auto").explain()
    assert "math fp32  (profile)" in text
    assert "note, fp32 infer: cudnn fp32: branch 0 forward cudnn: runs on NVIDIA GPUs only" in text


def test_the_profile_beats_the_heuristic_and_an_explicit_choice_beats_both() -> None:
    profile = measured_here(small(64, "math"))
    assert Case(64).module(profile=profile).plan_for(64, "fp32", False).tunables.branches[0].forward == "math"
    assert Case(64).module(profile=None).plan_for(64, "fp32", False).tunables.branches[0].forward == "flash-cpu"
    module = Case(64).module(profile=profile, backend="flash-cpu")
    assert module.plan_for(64, "fp32", False).tunables.branches[0].forward == "flash-cpu"
    assert "(profile + user, not measured)" in str(module.plan)  # with the kernel that was measured it would be
    assert "(profile + user)" in str(Case(64).module(profile=profile, backend="math").plan)


def test_a_plan_says_where_it_is_from_and_whether_it_was_measured() -> None:
    """In ``plan_for`` as in the table: a cell for which no time was left keeps its default, without a measurement."""
    kept = small(256, "math")
    assert kept.choice is not None
    module = Case(64).module(
        profile=measured_here(small(64, "math"), replace(kept, choice=Choice(kept.choice.tunables)))
    )
    for length, origin in ((64, "profile"), (256, "profile, not measured"), (4096, "heuristic")):
        plan = module.plan_for(length, "fp32", False)
        assert str(plan.origin) == origin
        assert str(plan).endswith(f"  ({origin})")
    for printed in (str(module.plan), module.explain()):
        assert "S~64  fp32  infer  math fp32  (profile)\n" in printed
        assert "S~256  fp32  infer  math fp32  (profile, not measured)\n" in printed


@pytest.mark.parametrize("naming", ["argument", "profile", "variable"])
def test_a_plan_that_cannot_run_here_raises_where_the_profile_was_named(
    naming: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile = measured_here(small(64, "cudnn", "math"))
    path = tmp_path / "here.yaml"
    save_profile(profile, path)
    if naming == "variable":
        monkeypatch.setenv("RINGTUNE_PROFILE", str(path))
    argument: Any = {"argument": path, "profile": profile, "variable": "auto"}[naming]
    file = "<profile argument>" if naming == "profile" else str(path)
    with pytest.raises(
        PlanError,
        match=rf"^{file}: plans\[0\]: the profile's plan for infer dense full .* cannot run here: [^\n]*NVIDIA",
    ):
        Case(64).module(profile=argument)


def test_what_a_profile_says_cannot_break_the_line_of_an_error() -> None:
    with pytest.raises(PlanError, match=r"cannot run here") as caught:
        Case(64).module(profile=measured_here(small(64, "two\nlines \x1b[2J")))
    assert str(caught.value).isprintable()
    assert r"two\nlines \x1b[2J" in str(caught.value)


@pytest.mark.parametrize("variable", [False, True])
def test_a_named_profile_that_is_missing_raises(
    variable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "none.yaml"
    if variable:
        monkeypatch.setenv("RINGTUNE_PROFILE", str(path))
    with pytest.raises(ProfileError, match=r"^[^\n]*none\.yaml: [^\n]*$"):
        Case(64).module(profile="auto" if variable else str(path))


def test_a_named_profile_of_another_machine_raises() -> None:
    other = Profile("measured", Fingerprint.of(H100), H100.software, plans=())
    with pytest.raises(ProfileError, match=r"does not fit this machine: it was made for vendor nvidia"):
        Case(64).module(profile=other)


def test_a_module_without_matching_plans_uses_the_heuristic_and_says_so_once(said: pytest.LogCaptureFixture) -> None:
    profile = measured_here(small(64, "math"))
    for _ in range(3):
        Case(64, head_dim=8).module(profile=profile)
    messages = [(r.levelname, r.getMessage()) for r in said.records]
    assert len(messages) == 1
    assert messages[0][0] == "WARNING"
    assert messages[0][1].startswith("dense full H2 D8 on ")
    assert "no plan was measured for this workload, using the heuristic" in messages[0][1]
    assert "`ringtune probe --heads 2 " in messages[0][1]


def test_the_tier_is_said_once_at_info(said: pytest.LogCaptureFixture) -> None:
    profile = measured_here(small(64, "math"))
    for _ in range(3):
        call(Case(64).module(profile=profile), 64)
    assert [(r.levelname, r.getMessage()) for r in said.records] == [("INFO", "profile <profile argument>, tier exact")]


def test_a_torch_newer_than_the_tested_ones_is_said_once(
    said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many modules there are, and whether or not a profile serves; when they are built, not when called."""
    here = detect("cpu")
    versions = {**dict(here.software), "torch": "9.1.0+cpu"}
    monkeypatch.setattr(module_setup, "detect", lambda device: replace(here, software=tuple(sorted(versions.items()))))
    modules = [Case(64).module(profile=profile) for profile in (None, measured_here(small(64, "math")), None)]
    (warned,) = [r.getMessage() for r in said.records if r.levelname == "WARNING"]
    assert warned.startswith("torch 9.1.0+cpu is newer than what this was tested with, torch 2.")
    said.clear()
    call(modules[0], 64)
    assert not said.records


@pytest.mark.parametrize("environ", [{"LOCAL_RANK": "{}"}, {"SLURM_LOCALID": "{}"}], ids=["torchrun", "Slurm"])
def test_the_first_rank_of_a_host_alone_warns(
    environ: dict[str, str], said: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A bare heuristic, a broken file, a length that was not measured: every rank of a host finds the same."""
    (tmp_path / "broken.yaml").write_text("schema: 99\n")
    monkeypatch.setenv("RINGTUNE_PROFILE_PATH", str(tmp_path))
    logged, parts = [], ("broken.yaml", "no plan was", "outside")
    for rank in ("3", "0"):
        for name, value in environ.items():
            monkeypatch.setenv(name, value.format(rank))
        module_setup._said.clear()
        said.clear()
        RingAttention(2, 4, device="cpu")
        call(Case(64).module(profile=measured_here(small(64, "math"))), 4096)
        logged.append({(r.levelname, part) for r in said.records for part in parts if part in r.getMessage()})
    assert logged == [{(level, part) for part in parts} for level in ("INFO", "WARNING")]


def test_no_profile_on_purpose_is_silent(said: pytest.LogCaptureFixture) -> None:
    call(Case(64).module(profile=None), 64)
    assert not said.records


def test_beyond_the_measured_lengths_the_heuristic_serves_and_is_said_once(said: pytest.LogCaptureFixture) -> None:
    module = Case(64).module(profile=measured_here(small(64, "math"), small(128, "math")))
    said.clear()
    for length in (64, 128, 181):
        call(module, length)
    assert not said.records
    for length in (400, 500, 10, 600):
        call(module, length)
        assert module.plan_for(length, "fp32", False).tunables.branches[0].forward == "flash-cpu"
    (record,) = said.records
    assert record.levelname == "WARNING"
    assert record.getMessage() == (
        "dense full H2 D4 fp32 infer: measured from 64 to 128 positions; outside, a heuristic plan serves; "
        "`ringtune probe --heads 2 --head-dim 4 --no-causal --dense --mode infer --precision fp32 "
        "--seq-len 400` measures this one"
    )


def test_a_mode_that_was_not_measured_is_said_with_its_remedy(said: pytest.LogCaptureFixture) -> None:
    """It was called a module that was not measured, and nothing said how to measure it."""
    module = Case(64).module(profile=measured_here(small(64, "math")))
    said.clear()
    module(*Case(64).inputs(torch.bfloat16))
    (record,) = said.records
    assert record.getMessage() == (
        "dense full H2 D4 bf16 train: not measured; a heuristic plan serves; `ringtune probe --heads 2 --head-dim 4 "
        "--no-causal --dense --mode train --precision bf16 --seq-len 64` measures it"
    )


@pytest.mark.parametrize("rows", [[small(64, "math")], []], ids=["of one sequence", "none"])
def test_documents_that_were_not_measured_are_said_with_their_remedy(
    rows: list[PlanEntry], said: pytest.LogCaptureFixture
) -> None:
    """At init a command is named that measures one sequence."""
    module = RingAttention(2, 4, device="cpu", **({"profile": measured_here(*rows)} if rows else {}))
    said.clear()
    q, k, v = (x.detach() for x in Case(64).inputs(torch.float32))
    module(q, k, v, cu_seqlens=[0, 20, 64])
    (record,) = said.records
    assert record.getMessage() == (
        "dense full H2 D4 fp32 infer: documents were not measured; a heuristic plan serves; `ringtune probe --heads 2 "
        "--head-dim 4 --no-causal --dense --mode infer --precision fp32 --seq-len 64 --documents 2` measures it"
    )
    module(*(x.double() for x in (q, k, v)), cu_seqlens=[0, 20, 64])
    assert said.records[-1].getMessage().endswith("no probe measures it (no better dtype to check it against)")


@pytest.mark.parametrize("profile", ["none", "of training"])
def test_decoding_that_was_not_measured_is_said_with_its_remedy(profile: str, said: pytest.LogCaptureFixture) -> None:
    given = {"profile": measured_here(small(64, "math"))} if profile == "of training" else {}
    module = RingAttention(2, 4, device="cpu", **given)
    said.clear()
    x = torch.randn(1, 1, 2, 4)
    module.cross(x, *(torch.randn(1, 30, 2, 4) for _ in range(2)))
    module.prefill(x, x, x, module.kv_cache(1, dtype="fp32"))
    (record,) = said.records
    assert record.getMessage() == (
        "dense full H2 D4 fp32 decode: not measured; a heuristic plan serves; `ringtune probe --heads 2 --head-dim 4 "
        "--no-causal --dense --mode decode --precision fp32` measures it"
    )


def test_a_small_profile_of_the_user_hides_no_other_row_of_this_silicon(
    said: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One length was probed here; the other rows of the profile that shipped serve on, also of older software."""
    older = replace(
        measured_here(
            small(64, "flash-cpu"), small(70, "flash-cpu"), small(512, "math"), small(64, "math", train=True)
        ),
        software=(("torch", "2.9.0"),),
    )
    mine, shipped = tmp_path / "mine", tmp_path / "shipped"
    for folder, profile in ((mine, measured_here(small(64, "math"))), (shipped, older)):
        folder.mkdir()
        save_profile(profile, folder / "here.yaml")
    monkeypatch.setenv("RINGTUNE_PROFILE_PATH", f"{mine}{os.pathsep}{shipped}")
    module = Case(64).module(profile="auto")
    for length, train, forward, source in (
        (64, False, "math", "profile"),
        (70, False, "math", "profile"),  # within the reach of the user's own row
        (512, False, "math", "profile"),
        (64, True, "math", "profile"),
        (8192, False, "flash-cpu", "heuristic"),
    ):
        plan = module.plan_for(length, "fp32", train)
        assert plan.origin is not None
        assert (plan.tunables.branches[0].forward, plan.origin.source) == (forward, source), (length, train)
    told = [record.getMessage() for record in said.records]
    assert f"profile {mine / 'here.yaml'}, tier exact" in told
    assert f"profile {shipped / 'here.yaml'}, tier same-silicon" in told
    (row,) = (entry for entry in module._setup.entries if entry.workload.seq_len == 512)
    assert module._setup.place_of(row) == f"{shipped / 'here.yaml'}: plans[2]"


def test_heads_that_a_small_profile_did_not_measure_keep_their_own_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = small(64, "math")
    other = replace(other, workload=replace(other.workload, heads=8, kv_heads=8))
    for name, profile in (("a", measured_here(other)), ("b", measured_here(small(64, "flash-cpu")))):
        save_profile(profile, tmp_path / f"{name}.yaml")
    monkeypatch.setenv("RINGTUNE_PROFILE_PATH", str(tmp_path))
    plan = Case(64).module(profile="auto").plan_for(64, "fp32", False)
    assert plan.tunables.branches[0].forward == "flash-cpu"


def test_a_runner_up_is_said_once(
    said: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_profile(measured_here(small(64, "cudnn", "math")), tmp_path / "here.yaml")
    monkeypatch.setenv("RINGTUNE_PROFILE_PATH", str(tmp_path))
    module = Case(64).module(profile="auto")
    said.clear()
    for length in (64, 70):
        call(module, length)
    (record,) = said.records
    assert record.levelname == "WARNING"
    assert "a measured plan cannot run here and gives way to the next best plan (cudnn " in record.getMessage()


def test_dtype_auto_computes_in_what_was_measured_to_be_good_enough() -> None:
    narrow = Choice(Tunables("bf16", (BranchTunables("math"),)))
    profile = measured_here(small(64, "math", auto=narrow))
    q, k, v = (x.detach() for x in Case(64).inputs(torch.float32))
    out = Case(64).module(profile=profile, dtype="auto")(q, k, v)
    assert out.dtype is torch.float32
    expected = Case(64).module(backend="math")(q.bfloat16(), k.bfloat16(), v.bfloat16())
    assert torch.equal(out, expected.float())
    assert torch.equal(Case(64).module(profile=profile)(q, k, v), Case(64).module(backend="math")(q, k, v))


@pytest.mark.parametrize(
    ("changes", "options"),
    [
        ({}, "--heads 4 --head-dim 32 --causal --dense"),
        ({"kv_heads": 2, "causal": False}, "--heads 4 --kv-heads 2 --head-dim 32 --no-causal --dense"),
        (
            {"pattern": pattern_of([64, 128], [1, 2]), "world": 3},
            "--heads 4 --head-dim 32 --causal --segment-lengths 64,128 --dilation-rates 1,2 --nproc 3",
        ),
    ],
)
def test_the_hint_asks_for_this_module_and_nothing_else(changes: dict[str, Any], options: str) -> None:
    shape = replace(ModuleShape(4, 4, 32, True, DENSE), **changes)
    assert probe_options(shape.workload(1, "bf16", True)) == options
