"""No kernel runs where nobody validated it: what is checked, when, what comes of a failure, and what is remembered."""

from __future__ import annotations

import copy
import logging
import os
import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_samples import EVIDENCE, H100
from oracle import Case, assert_equal_to, cpu, exact, found, pattern_of
from torch._subclasses.fake_tensor import FakeTensorMode
from wrong_kernels import RIGHT, raising, with_wrong_dq

from ringattn import RingAttention
from ringattn.errors import PlanError, RingAttentionError
from ringattn.hardware.facts import HardwareFacts
from ringattn.hardware.kernel_faults import Combination, Figure, KernelFault, Verdict, join_faults
from ringattn.kernels.contract import BoundKernel, KernelNeed
from ringattn.kernels.registry import KERNELS
from ringattn.planning import module_setup, self_check
from ringattn.planning.plan import ORDINARY, Origin, combination_of, combinations, kernel_needs, rejection_reasons
from ringattn.planning.self_check import faults_of
from ringattn.planning.validation import validation_memory
from ringattn.planning.validation.accuracy_check import check_all, config_of, hold, make_case
from ringattn.planning.validation.validation_memory import Memory, environment_of, key_of, user_memory
from ringattn.profile.locations import Located, shipped_folder
from ringattn.profile.schema import Choice, Fingerprint, PlanEntry, Profile
from ringattn.profile.yaml_io import load_profile
from ringattn.workload import BranchTunables, Tunables, Workload

ROOT = Path(__file__).parents[3]
CPU = torch.device("cpu")
CASE = Case(24, 2, 2, 8, causal=True)
BACKWARD = Combination("flash-cpu", 8, "fp32", True, True, False)
FORWARD = replace(BACKWARD, backward=False)


def put(monkeypatch: pytest.MonkeyPatch, kernel: Any) -> None:
    monkeypatch.setitem(KERNELS, "flash-cpu", kernel)  # type: ignore[arg-type]


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Combination]:
    """Every combination that is checked from now on."""
    made: list[Combination] = []

    def counted(asked: Any, device: torch.device) -> Any:
        made.extend(asked)
        return check_all(asked, device)

    monkeypatch.setattr(self_check, "check_all", counted)
    return made


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(module_setup, "_said", set())
    caplog.set_level(logging.WARNING, "ringattn")
    return caplog


@pytest.fixture
def another_process() -> Iterator[Any]:
    """Call it: what this process remembers of kernels is gone, what the file holds is not."""
    yield validation_memory._memory_at.cache_clear
    validation_memory._memory_at.cache_clear()


def train(module: RingAttention, case: Case = CASE, dtype: torch.dtype = torch.float32) -> None:
    """A training step, held against float64."""
    q, k, v = case.inputs(dtype)
    dout = case.dout(dtype)
    assert_equal_to(found(module, q, k, v, dout), exact(case, q, k, v, dout), 2e-5)


def infer(module: RingAttention, case: Case = CASE, dtype: torch.dtype = torch.float32) -> None:
    module(*(x.detach() for x in case.inputs(dtype)))


# --- the check ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("head_dim", [1, 8, 40, 80])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_a_right_kernel_is_far_within_the_bounds(dtype: str, head_dim: int, grouped: bool, causal: bool) -> None:
    asked = [
        Combination(name, head_dim, dtype, backward, causal, grouped)
        for name in ("flash-cpu", "math")
        for backward in (False, True)
    ]
    verdicts = check_all(asked, CPU)
    assert [[figure.name for figure in verdict.figures] for verdict in verdicts.values()] == [
        ["out", "lse"],
        ["dq", "dk", "dv"],
    ] * 2
    for verdict in verdicts.values():
        assert verdict.passes
        assert verdict.reason == ""
        assert all(figure.error < figure.bound / 4 for figure in verdict.figures)


@pytest.mark.parametrize("spoilt", ["out", "lse", "dq", "dk", "dv"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("fault", ["scaled", "nan", "last tile", "one row"])
def test_every_result_is_looked_at(spoilt: str, dtype: str, fault: str) -> None:
    case = make_case(16, dtype, causal=True, grouped=True, rows=200, device=CPU)
    right = RIGHT.load(self_check_config(True, 16, dtype))

    def spoil(name: str, x: torch.Tensor) -> torch.Tensor:
        if name != spoilt:
            return x
        x = x.clone()
        rows = x.transpose(1, 2) if name == "lse" else x
        if fault == "scaled":
            rows *= 1.13
        elif fault == "nan":
            rows[0, 3, 0] = float("nan")
        elif fault == "last tile":
            rows[:, 192:] = 0
        else:
            rows[:, 77] *= -1
        return x

    wrong = BoundKernel(
        lambda *t: tuple(map(spoil, ("out", "lse"), right.forward(*t))),  # type: ignore[arg-type,return-value]
        lambda *t, **k: tuple(map(spoil, ("dq", "dk", "dv"), right.backward(*t, **k))),  # type: ignore[arg-type,return-value]
    )
    verdict = hold(wrong, case, dtype, backward=spoilt.startswith("d"))
    assert not verdict.passes
    assert f"{spoilt} errs by" in verdict.reason
    assert hold(wrong, case, dtype, backward=not spoilt.startswith("d")).passes


@pytest.mark.parametrize("entry", ["one_query", "forward"])
def test_one_query_is_checked_by_what_runs_it(entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wrong where there is one query, in an entry of its own or not: found where that is asked for, and only there."""
    right = RIGHT.load(self_check_config(False, 8, "fp32"))

    def wrong(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, /) -> Any:
        out, lse = right.forward(q, k, v)
        return out, lse + (q.shape[1] == 1)

    kernel = BoundKernel(wrong if entry == "forward" else right.forward, right.backward)
    kernel = kernel._replace(one_query=wrong) if entry == "one_query" else kernel
    put(monkeypatch, replace(RIGHT, load=lambda config: kernel))
    asked = [replace(FORWARD, causal=False, one_query=one) for one in (True, False)]
    verdicts = check_all(asked, CPU)
    assert [verdicts[one].passes for one in asked] == [False, True]
    assert "lse errs by" in verdicts[asked[0]].reason


def test_one_query_over_a_cache_asks_for_a_full_block() -> None:
    cudnn = combination_of(
        "cudnn", replace(KernelNeed("nvidia", "sm_90", "bf16", 64, 4, 4, 900, 1, True, False), queries=1)
    )
    assert (cudnn.one_query, cudnn.causal) == (True, False)
    reads = combination_of(
        "split-kv", replace(KernelNeed("nvidia", "sm_90", "bf16", 64, 4, 4, 900, 1, True, False), queries=1)
    )
    assert (reads.one_query, reads.causal) == (True, True)


def self_check_config(causal: bool, head_dim: int, dtype: str) -> Any:
    return config_of(Combination("flash-cpu", head_dim, dtype, False, causal, True))


def test_a_backward_that_makes_its_own_lse_is_wrong() -> None:
    """Partials are merged, so the LSE that a backward is given is not that of its block alone."""
    case = make_case(16, "fp32", causal=False, grouped=False, rows=200, device=CPU)
    right = RIGHT.load(self_check_config(False, 16, "fp32"))

    def backward(dout: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, /, grads: Any = None) -> Any:
        return right.backward(dout, q, k, v, *right.forward(q, k, v))

    assert not hold(BoundKernel(right.forward, backward), case, "fp32", backward=True).passes


def test_an_error_of_a_kernel_is_a_verdict_and_one_of_the_device_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, raising(AssertionError("head_dim 8 is not\nsupported")))
    assert check_all([FORWARD], CPU)[FORWARD].reason == (
        r"fails on this machine: AssertionError: head_dim 8 is not\nsupported"
    )
    for error in (torch.OutOfMemoryError("out"), RuntimeError("CUDA error: an illegal memory access was encountered")):
        put(monkeypatch, raising(error))
        with pytest.raises(type(error)):
            check_all([FORWARD], CPU)
    put(monkeypatch, raising(RuntimeError("CUDA error: no kernel image is available for execution on the device")))
    assert "no kernel image" in check_all([FORWARD], CPU)[FORWARD].reason


def test_a_check_is_apart_from_what_its_caller_does(checked: list[Combination]) -> None:
    before = torch.random.get_rng_state()
    with torch.autocast("cpu", torch.bfloat16), torch.inference_mode():
        infer(CASE.module(backend="flash-cpu", dtype="bf16"))  # not all CPUs choose it
    assert torch.equal(torch.random.get_rng_state(), before)
    with FakeTensorMode():
        q = torch.empty(1, 24, 2, 4)
        out = RingAttention(2, 4, profile=None, device="cpu", backend="flash-cpu")(q, q, q)
    assert out.shape == q.shape
    assert [(c.head_dim, c.dtype) for c in checked] == [(8, "bf16"), (4, "fp32")]
    assert all(v.passes for v in user_memory().verdicts().values())


def test_a_check_may_be_made_inside_a_compiled_graph(checked: list[Combination]) -> None:
    module = CASE.module(backend="flash-cpu")
    torch.compile(module, backend="eager")(*(x.detach() for x in CASE.inputs(torch.float32)))
    assert checked == [FORWARD]


# --- when --------------------------------------------------------------------------------------------------------


def test_a_combination_is_checked_once(checked: list[Combination]) -> None:
    module = CASE.module(backend="flash-cpu")
    for _ in range(2):
        train(module)
    train(module, replace(CASE, length=31))
    assert checked == [FORWARD, BACKWARD]
    train(CASE.module(backend="flash-cpu"))
    train(pickle.loads(pickle.dumps(copy.deepcopy(module))))  # noqa: S301 - our own
    assert checked == [FORWARD, BACKWARD]


def test_math_is_never_checked(checked: list[Combination]) -> None:
    train(CASE.module(backend="math"))
    assert checked == []


def test_a_pattern_a_dtype_and_groups_are_other_combinations(checked: list[Combination]) -> None:
    case = Case(24, 4, 2, 8, pattern=pattern_of([8, 16], [1, 2]))
    train(case.module(backend="flash-cpu"), case)
    infer(case.module(backend="flash-cpu", dtype=torch.bfloat16), case, torch.bfloat16)
    grouped = replace(FORWARD, causal=False, grouped=True)
    assert checked == [grouped, replace(grouped, backward=True), replace(grouped, dtype="bf16")]


def test_while_a_graph_is_captured_nothing_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    cuda = torch.device("cuda", 0)
    with pytest.raises(RingAttentionError, match=r"flash-cpu forward, head_dim 8, .* call warmup\(\) at this length"):
        faults_of([FORWARD], cpu(), cuda, None)
    user_memory().remember({key_of(FORWARD, cpu()): Verdict((Figure("out", 0.0, 1.0),))})
    assert faults_of([FORWARD], cpu(), cuda, None) == []


# --- a failure ---------------------------------------------------------------------------------------------------


def test_a_forced_backend_is_refused_with_the_figures(
    monkeypatch: pytest.MonkeyPatch, checked: list[Combination]
) -> None:
    put(monkeypatch, with_wrong_dq())
    module = CASE.module(backend="flash-cpu")
    for _ in range(2):
        with pytest.raises(PlanError, match=r"flash-cpu: is wrong on this machine: dq errs by 4\.0e-01 \(allowed 1"):
            train(module)
    infer(module)  # its forward is right
    assert checked == [FORWARD, BACKWARD]
    with pytest.raises(PlanError, match=r"dq errs by 4\.0e-01"):
        module.plan_for(24, torch.float32, train=True)


def test_the_heuristics_next_kernel_serves_and_that_is_said_once(
    monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture, another_process: Any
) -> None:
    put(monkeypatch, with_wrong_dq())
    for process in range(2):
        module_setup._said.clear()
        said.clear()
        for _ in range(2):
            module = CASE.module()
            train(module)
            train(module, replace(CASE, length=30))
        told = [record.message for record in said.records if "wrong on this machine" in record.message]
        assert len(told) == 1, process
        assert "the heuristic's first plan cannot run here and gives way to the next best plan" in told[0]
        assert "dq errs by 4.0e-01" in told[0]
        branch = module.plan_for(24, torch.float32, True).tunables.branches[0]
        assert branch == BranchTunables("flash-cpu", "math")
        assert "is wrong on this machine" in module.explain()
        another_process()


def test_a_profiles_next_plan_serves(monkeypatch: pytest.MonkeyPatch, said: pytest.LogCaptureFixture) -> None:
    put(monkeypatch, with_wrong_dq())
    choices = [
        Choice(Tunables("fp32", (BranchTunables(*pair),)), EVIDENCE)
        for pair in (("flash-cpu", "flash-cpu"), ("math", "math"))
    ]
    entry = PlanEntry(CASE.workload("fp32"), choices[0], (choices[1],))
    older = replace(profile_of(entry), software=(("python", "3.1"), ("torch", "1.0")))
    monkeypatch.setattr(module_setup, "find_profiles", lambda *a, **k: (located(older), ()))
    module = CASE.module(profile="auto")
    train(module)
    plan = module.plan_for(24, torch.float32, True)
    assert (plan.tunables.branches[0].backward, plan.origin) == ("math", Origin("profile"))
    (told,) = [record.message for record in said.records if "wrong on this machine" in record.message]
    assert "a measured plan cannot run here and gives way to the next best plan" in told
    with pytest.raises(PlanError, match=r"the profile's plan for .* cannot run here: .*dq errs by"):
        train(CASE.module(profile=older))


def test_a_kernel_that_raises_gives_way_too(
    monkeypatch: pytest.MonkeyPatch, checked: list[Combination], another_process: Any
) -> None:
    put(monkeypatch, raising(NotImplementedError("no such head_dim")))
    train(CASE.module())
    train(CASE.module())
    assert len(checked) == 2
    with pytest.raises(PlanError, match="fails on this machine: NotImplementedError: no such head_dim"):
        train(CASE.module(backend="flash-cpu"))
    another_process()
    train(CASE.module())
    assert checked[2:] == [FORWARD]  # errors are not kept: it may have been a full disk


# --- what is trusted ---------------------------------------------------------------------------------------------


def profile_of(*entries: PlanEntry) -> Profile:
    return Profile("measured", Fingerprint.of(cpu()), cpu().software, plans=entries)


def located(profile: Profile) -> Any:
    rule = shipped_folder() / "heuristic-cpu.yaml"
    return Located("mine.yaml", profile, "user"), Located(str(rule), load_profile(rule), "shipped")


def entry_of(case: Case = CASE, evidence: Any = EVIDENCE, **changes: Any) -> PlanEntry:
    workload = replace(case.workload("fp32"), **changes)
    return PlanEntry(workload, Choice(Tunables("fp32", (BranchTunables("flash-cpu", "flash-cpu"),)), evidence))


def test_the_evidence_of_this_machine_is_trusted(checked: list[Combination], monkeypatch: pytest.MonkeyPatch) -> None:
    for profile in (profile_of(entry_of()), profile_of(entry_of(seq_len=4096, heads=8, kv_heads=8))):
        train(CASE.module(profile=profile))
    train(CASE.module(profile=profile_of(entry_of()), backend="flash-cpu"))
    assert checked == []
    put(monkeypatch, with_wrong_dq())  # as it is trusted, nobody looks
    q, k, v = CASE.inputs(torch.float32)
    CASE.module(profile=profile_of(entry_of()))(q, k, v).sum().backward()
    assert checked == []


@pytest.mark.parametrize(
    "profile",
    [
        profile_of(entry_of(evidence=None)),
        replace(profile_of(entry_of()), software=(("python", "3.1"), ("torch", "1.0"))),
        replace(profile_of(entry_of()), fingerprint=replace(Fingerprint.of(cpu()), device_name="a nearby one")),
        profile_of(entry_of(heads=8, kv_heads=2)),  # a nearby row: its heads are grouped
        profile_of(entry_of(causal=False), entry_of(evidence=None)),
    ],
    ids=["no evidence", "other software", "another device", "grouped heads", "not causal"],
)
def test_other_evidence_is_not(profile: Profile, checked: list[Combination]) -> None:
    train(CASE.module(profile=profile))
    assert checked == [FORWARD, BACKWARD]


def test_whoever_validates_plans_itself_is_left_alone(checked: list[Combination]) -> None:
    module = CASE.module(backend="flash-cpu")
    module.validates = False
    train(module)
    assert checked == []


# --- memory ------------------------------------------------------------------------------------------------------


def test_another_process_checks_nothing_again(checked: list[Combination], another_process: Any) -> None:
    train(CASE.module(backend="flash-cpu"))
    another_process()
    train(CASE.module(backend="flash-cpu"))
    assert checked == [FORWARD, BACKWARD]


SCRIPT = """
import sys, torch
sys.path.insert(0, {tests!r})
from oracle import Case
from wrong_kernels import with_wrong_dq
from ringattn.planning import self_check
from ringattn.errors import PlanError
from ringattn.kernels.registry import KERNELS
check_all = self_check.check_all
self_check.check_all = lambda asked, device: print("checks", len(asked)) or check_all(asked, device)
def call(head_dim):
    case = Case(24, 2, 2, head_dim, causal=True)
    case.module(backend="flash-cpu")(*case.inputs(torch.float32))
call(8)
KERNELS["flash-cpu"] = with_wrong_dq()
try:
    call(16)
except PlanError as error:
    print("refused", "dq errs by 4.0e-01" in str(error))
"""


def test_real_processes_share_what_they_found() -> None:
    """Of a right kernel, and of one that is wrong at another head dimension."""
    script = SCRIPT.format(tests=str(ROOT / "tests" / "support" / "ringattn"))
    printed = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.split("\n")
        for _ in range(2)
    ]
    assert printed == [["checks 2", "checks 2", "refused True", ""], ["refused True", ""]]


@pytest.mark.parametrize("changed", ["torch", "device_name"])
def test_a_changed_machine_is_checked_again(
    changed: str, checked: list[Combination], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(monkeypatch, with_wrong_dq())
    with pytest.raises(PlanError):
        train(CASE.module(backend="flash-cpu"))
    facts = cpu()
    other = (
        replace(facts, device_name="another")
        if changed == "device_name"
        else replace(facts, software=tuple(sorted({**dict(facts.software), "torch": "99.0"}.items())))
    )
    monkeypatch.setattr(module_setup, "detect", lambda device: other)
    put(monkeypatch, RIGHT)
    train(CASE.module(backend="flash-cpu"))
    assert checked == [FORWARD, BACKWARD] * 2


def test_versions_of_the_kernels_own_package_count_and_those_of_others_do_not() -> None:
    def key(name: str, **versions: str) -> Any:
        return key_of(Combination(name, 64, "bf16", True, True, False), with_software(H100, **versions))

    four = {"flash_attn.cute": "4.0.0b36"}
    assert key("flash-attn-4", **four) != key("flash-attn-4", **{"flash_attn.cute": "4.0.0b37"})
    assert key("cudnn", **four) == key("cudnn", **{"flash_attn.cute": "4.0.0b37"})
    assert key("cudnn", cudnn="9.19.0") != key("cudnn", cudnn="9.20.0")
    assert key("cudnn", driver="1") != key("cudnn", driver="2")
    assert key("cudnn", python="3.11") == key("cudnn", python="3.12")


def with_software(facts: HardwareFacts, **versions: str) -> HardwareFacts:
    return replace(facts, software=tuple(sorted({**dict(facts.software), **versions}.items())))


def test_what_is_written_is_read_whole() -> None:
    memory, facts = user_memory(), H100
    verdicts = {
        key_of(BACKWARD, facts): Verdict((Figure("dq", 0.41234567, 0.03125), Figure("dk", float("nan"), 0.03125))),
        key_of(replace(BACKWARD, params=(("a", True), ("tile", "128x64"), ("warps", 4))), facts): Verdict(
            (Figure("dq", 1e-3, 0.03125),)
        ),
    }
    memory.remember(verdicts)
    read = Memory(memory.path).verdicts()
    assert list(map(str, read.items())) == list(map(str, verdicts.items()))  # NaN is not NaN
    (fault,) = Memory(memory.path).faults(facts, 8)
    assert fault.reason == (
        "is wrong on this machine: dq errs by 4.1e-01 (allowed 3.1e-02), dk errs by nan (allowed 3.1e-02) "
        "against float64"
    )
    assert Memory(memory.path).faults(facts, 16) == ()
    assert Memory(memory.path).faults(with_software(facts, torch="99"), 8) == ()
    assert [path.name for path in memory.path.parent.iterdir()] == ["validations.json"]


def test_two_processes_add_to_one_file() -> None:
    path = user_memory().path
    one, other = Memory(path), Memory(path)
    fine = Verdict((Figure("dq", 0.0, 1.0),))
    one.remember({key_of(FORWARD, H100): fine})
    other.remember({key_of(BACKWARD, H100): fine})
    assert set(one.verdicts()) == set(Memory(path).verdicts()) == {key_of(FORWARD, H100), key_of(BACKWARD, H100)}


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"schema": 2, "verdicts": []}',
        '{"schema": 1}',
        '{"schema": 1, "verdicts": [7]}',
        '{"schema": 1, "verdicts": [{"environment": {}, "combination": {"params": {}}, "figures": [["a", "1", "2"]]}]}',
        '{"schema": 1, "verdicts": [{"environment": {}, "combination": 3, "figures": []}]}',
        "\udcff",
        "[" * 100_000,
    ],
    ids=range(11),
)
def test_a_broken_file_is_said_once_and_replaced(
    content: str, said: pytest.LogCaptureFixture, checked: list[Combination]
) -> None:
    path = user_memory().path
    path.parent.mkdir(parents=True)
    path.write_bytes(content.encode("utf-8", "surrogateescape"))
    for _ in range(2):
        train(CASE.module(backend="flash-cpu"))
    told = [record.message for record in said.records if str(path) in record.message]
    assert len(told) == 1
    assert "is no list of accuracy checks" in told[0]
    assert "\n" not in told[0]
    assert checked == [FORWARD, BACKWARD]
    assert len(Memory(path).verdicts()) == 2


@pytest.mark.parametrize("obstacle", ["file in the way", "folder in the way"])
def test_a_place_that_cannot_be_written_is_said_once(
    obstacle: str, said: pytest.LogCaptureFixture, checked: list[Combination]
) -> None:
    path = user_memory().path
    if obstacle == "file in the way":
        path.parent.parent.mkdir(parents=True)
        path.parent.write_text("")
    else:
        path.mkdir(parents=True)
    for _ in range(2):
        train(CASE.module(backend="flash-cpu"))
    told = [record.message for record in said.records if str(path) in record.message]
    assert len(told) in (1, 2)  # it can neither be read nor written
    assert all("every process checks kernels anew" in text for text in told)
    assert checked == [FORWARD, BACKWARD]


# --- rules, with invented machines --------------------------------------------------------------------------------


def test_a_fault_refuses_its_combination_and_nothing_else() -> None:
    asked = Workload("train", True, 4096, 16, 128, "bf16")
    plan = Tunables("bf16", (BranchTunables("cudnn", "flash"),))
    (forward, backward) = combinations(asked, plan, H100)
    assert str(backward) == "flash backward, head_dim 128, bf16, causal"
    facts = replace(H100, faults=(KernelFault(backward, "is wrong"),))
    assert rejection_reasons(asked, plan, H100) == ()
    assert rejection_reasons(asked, plan, facts) == ("branch 0 backward flash: is wrong",)
    for other in (
        replace(asked, kv_heads=4),
        replace(asked, causal=False),
        replace(asked, head_dim=64),
    ):
        assert rejection_reasons(other, plan, facts) == ()
    assert rejection_reasons(asked, replace(plan, dtype="fp16"), facts) == ()
    inference = Tunables("bf16", (BranchTunables("flash"),))
    assert rejection_reasons(replace(asked, mode="infer"), inference, facts) == ()


def test_parameters_of_a_kernel_are_part_of_a_combination() -> None:
    facts = replace(H100, packages=("triton",))
    asked = Workload("train", True, 4096, 16, 64, "bf16")
    tile = KERNELS["triton"].params(next(iter(needs(asked, facts))))["forward_tile"][1]
    plan = Tunables("bf16", (BranchTunables("triton", "triton"),), params=(("triton.forward_tile", tile),))
    forward, backward = combinations(asked, plan, facts)
    assert forward.params == (("forward_tile", tile),)
    assert backward.params == ()
    wrong = replace(facts, faults=(KernelFault(forward, "is wrong"),))
    assert rejection_reasons(asked, plan, wrong) == ("branch 0 forward triton: is wrong",)
    assert rejection_reasons(asked, replace(plan, params=()), wrong) == ()


def needs(workload: Workload, facts: HardwareFacts) -> Any:
    plain = Tunables("bf16", (BranchTunables("triton", "triton"),))
    return kernel_needs(workload, plain, 0, facts, backward=False, conditions=ORDINARY)


def test_blocks_that_are_full_and_those_that_are_causal_are_two_combinations_of_a_ring() -> None:
    asked = Workload("train", True, 64, 2, 8, "fp32", world=2)
    plan = Tunables("fp32", (BranchTunables("flash-cpu", "flash-cpu"),), schedule="ring", layout="zigzag")
    assert {(c.backward, c.causal) for c in combinations(asked, plan, cpu())} == {
        (False, False),
        (False, True),
        (True, False),
        (True, True),
    }


def test_faults_of_several_ranks_are_one_list() -> None:
    one, two = KernelFault(FORWARD, "is off by 1"), KernelFault(BACKWARD, "is off by 2")
    assert join_faults((one,), (two, replace(one, reason="is off by 3"))) == join_faults((two,), (one,))


def test_an_environment_names_no_host_and_no_path() -> None:
    assert {name for name, _ in environment_of(H100, "")} == {
        "arch",
        "cuda",
        "cudnn",
        "device_name",
        "driver",
        "isa",
        "mig",
        "ringtune",
        "torch",
        "vendor",
    }
