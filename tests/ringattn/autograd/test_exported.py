"""Programs that torch.export saves: what they compute where another process loads them, and what they refuse.

The rest of torch.compile is in test_compiled.py. There a graph is run by the process that made it, which holds the
module, and by it alone: that cannot tell whether the graph itself says what to compute.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from machine_samples import A100, EPYC, H100
from oracle import DENSE, Case, Results, assert_equal_to, cpu, exact, pattern_of
from recorder import record

import ringattn
from ringattn import RingAttention, load_profile
from ringattn.autograd import exported
from ringattn.autograd import torch_compile as compiled
from ringattn.autograd.exported import Configuration, configuration_text
from ringattn.errors import InputError, PlanError, ProfileError, RingAttentionError
from ringattn.planning.heuristic import Wishes
from ringattn.planning.plan import Conditions
from ringattn.planning.table import ModuleShape, build_table, table_of
from ringattn.profile.plain_data import from_plain
from ringattn.profile.schema import Choice, Fingerprint, PlanEntry, Profile
from ringattn.workload import INPUT_DTYPES, BranchTunables, Tunables

ROOT = Path(ringattn.__file__).parent.parent
CASES = [
    Case(24, 4, 2, 8, 2, DENSE, causal=True),
    Case(24, 4, 4, 8, 2, DENSE, scale=0.7),
    Case(24, 4, 2, 8, 2, pattern_of([8, 16], [1, 2]), causal=True),
    Case(24, 4, 4, 8, 2, pattern_of([16, 24], [2, 4], "blocked")),
]
CASE = CASES[2]


class WithLse(torch.nn.Module):
    def __init__(self, attn: RingAttention) -> None:
        super().__init__()
        self.attn = attn

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return self.attn(q, k, v, return_lse=True)


def export(case: Case, module: RingAttention | None = None, *, longest: int = 0, **options: Any) -> Any:
    """The program of a case, with its lse; for lengths up to ``longest``, if given."""
    inputs = tuple(x.detach() for x in case.inputs())
    lengths = {1: torch.export.Dim("length", max=longest)} if longest else None
    dynamic = None if lengths is None else (lengths,) * 3
    return torch.export.export(WithLse(module or case.module()), inputs, dynamic_shapes=dynamic, **options)


def loaded(program: Any) -> Any:
    """The program as read back from a file."""
    file = io.BytesIO()
    torch.export.save(program, file)
    return torch.export.load(io.BytesIO(file.getvalue())).module()


LOADER = """
import sys, torch
from ringattn import RingAttention
from ringattn.autograd import torch_compile as compiled
others = [RingAttention(4, 8, 2, causal=causal, scale=0.01, profile=None, device="cpu") for causal in (True, False)]
found = []
for number in range(int(sys.argv[2])):
    program = torch.export.load(f"{sys.argv[1]}/{number}.pt2").module()
    q, k, v, dout = torch.load(f"{sys.argv[1]}/{number}.inputs")
    out, lse = program(q, k, v)
    found.append((out.detach(), lse, *torch.autograd.grad(out, (q, k, v), dout)))
torch.save(found, f"{sys.argv[1]}/found")
"""


def test_another_process_computes_what_was_exported(tmp_path: Path) -> None:
    """One that has built other modules, whose first numbers a count would have given to these as well."""
    programs = [(case, export(case)) for case in CASES] + [(CASE, export(CASE, longest=64, strict=True))]
    cases = [case for case, _ in programs]
    cases[-1] = replace(CASE, length=40)
    for number, (case, (_, program)) in enumerate(zip(cases, programs, strict=True)):
        torch.export.save(program, tmp_path / f"{number}.pt2")
        torch.save((*case.inputs(), case.dout()), tmp_path / f"{number}.inputs")
    subprocess.run([sys.executable, "-c", LOADER, str(tmp_path), str(len(cases))], check=True, cwd=ROOT)
    for case, results in zip(cases, torch.load(tmp_path / "found"), strict=True):
        assert_equal_to(Results(*results), exact(case, *case.inputs(), case.dout()))


def test_what_is_exported_outlives_its_module() -> None:
    case = replace(CASE, scale=0.321)
    program = loaded(export(case))
    q, k, v = case.inputs()
    out, lse = program(q, k, v)
    results = Results(out.detach(), lse, *torch.autograd.grad(out, (q, k, v), case.dout()))
    assert_equal_to(results, exact(case, q, k, v, case.dout()))


def test_the_plan_of_each_length_is_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unlike kernels at 16 and 256 positions, as a profile may name them: the loader reads no profile."""
    case = Case(16, 4, 2, 8, 1)
    kernels = {16: "math", 256: "flash-cpu"}
    entries = tuple(
        PlanEntry(replace(case, length=length).workload("fp32", "infer"), choice(name))
        for length, name in kernels.items()
    )
    profile = Profile("measured", Fingerprint.of(cpu()), cpu().software, None, entries)
    module = case.module(profile=profile)
    inputs = tuple(x.detach() for x in case.inputs(torch.float32))
    lengths = {1: torch.export.Dim("length", max=512)}
    program = loaded(torch.export.export(module, inputs, dynamic_shapes=(lengths,) * 3))
    del module
    executed = record(monkeypatch)
    for length, name in kernels.items():
        executed.calls.clear()
        program(*(x.detach() for x in replace(case, length=length).inputs(torch.float32)))
        assert {call.name for call in executed.calls} == {name}


def choice(kernel: str) -> Choice:
    return Choice(Tunables("fp32", (BranchTunables(kernel),)))


def test_the_configuration_gives_every_plan_of_the_table() -> None:
    """Of a profile with all that one can hold: preferences, narrower dtypes, parameters, wishes."""
    profile = load_profile(ROOT / "profiles" / "nvidia-h100-sxm-80g.yaml")
    facts = replace(H100, packages=("triton",))
    shape = ModuleShape.of(next(e.workload for e in profile.plans if not e.workload.pattern.dense))
    entries = tuple(e for e in profile.plans if ModuleShape.of(e.workload) == shape)
    policy = load_profile(ROOT / "profiles" / "heuristic-sm_90.yaml").policy
    assert policy is not None
    for options in (
        {},
        {"auto_dtype": True},
        {"prefer": "memory"},
        {"launch": "captured"},
        {"wishes": Wishes(checkpoint="full")},
    ):
        conditions = Conditions(deterministic=bool(options))
        table = build_table(shape, entries, policy, facts, conditions=conditions, **options)  # type: ignore[arg-type]
        text = configuration_text(table, 0.125)
        c = from_plain(Configuration, json.loads(text), "here")
        assert c.scale == 0.125
        again = table_of(c.question)
        for dtype in INPUT_DTYPES:
            for length in (100, 4096, 20000, 65536):
                for train in (False, True):
                    row, same = table.plan_at(length, dtype, train, 1), again.plan_at(length, dtype, train, 1)
                    assert row.plan is not None
                    assert same.plan is not None
                    assert (row.plan.tunables, row.plan.fused) == (same.plan.tunables, same.plan.fused)


# --- refused -----------------------------------------------------------------------------------------------------


def test_a_plan_that_cannot_run_where_it_is_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    program = export(CASE, CASE.module(backend="flash-cpu")).module()
    monkeypatch.setattr(exported, "detect", lambda device: A100)
    monkeypatch.setattr(compiled, "_loaded", {})
    inputs = [x.detach().float() for x in CASE.inputs()]
    text = CASE.module(backend="flash-cpu").configuration
    with pytest.raises(
        PlanError, match=r"^the exported plan for infer .* cannot run here: .*flash-cpu: runs on CPUs only[^\n]*$"
    ):
        compiled.attend(*inputs, text, False)
    monkeypatch.setattr(exported, "detect", lambda device: EPYC)  # another CPU runs it
    monkeypatch.setattr(compiled, "_loaded", {})
    assert compiled.attend(*inputs, text, False)[0].shape == inputs[0].shape
    with pytest.raises(PlanError, match="flash-cpu: no fp64"):
        program(*(x.detach() for x in CASE.inputs()))


def test_a_deterministic_torch_is_obeyed_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    loaded = exported.ExportedAttention(CASE.module().configuration, torch.device("cpu"))
    assert loaded._conditions.deterministic


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "exported program: holds a configuration that is not JSON; export the module again"),
        ("{}", "exported program: shape: is missing"),
        ('{"format": 1, "heads": 2}', "exported program: heads: is not a known key"),
    ],
)
def test_a_damaged_configuration(text: str, message: str) -> None:
    inputs = [x.detach() for x in CASE.inputs()]
    with pytest.raises(ProfileError, match=message):
        compiled.attend(*inputs, text, False)


def test_a_configuration_of_another_version() -> None:
    plain = json.loads(CASE.module().configuration) | {"format": 2}
    with pytest.raises(ProfileError, match="exported program: format is 2, and this version reads 1; export the mod"):
        exported.ExportedAttention(json.dumps(plain), torch.device("cpu"))


def test_tensors_that_do_not_fit_are_named_when_they_are_exported() -> None:
    q, k, v = (x.detach() for x in CASE.inputs())
    with pytest.raises(InputError, match="k has 23 positions and q 24"):
        torch.export.export(CASE.module(), (q, k[:, :-1], v))
    with pytest.raises(InputError, match="more than max_seq_len, 16"):
        torch.export.export(CASE.module(max_seq_len=16), (q, k, v))


def test_max_seq_len_is_exported() -> None:
    text = CASE.module(max_seq_len=16).configuration
    with pytest.raises(InputError, match="the sequence has 24 positions, more than max_seq_len, 16"):
        compiled.attend(*(x.detach() for x in CASE.inputs()), text, False)


def test_a_compiled_graph_of_another_process_is_refused() -> None:
    inputs = [x.detach() for x in CASE.inputs()]
    with pytest.raises(RingAttentionError, match="a compiled graph runs a RingAttention that this process does not"):
        compiled.attend(*inputs, "0123456789abcdef@cpu", False)


def test_a_digest_is_the_same_in_every_process() -> None:
    """So that a graph that torch caches on the disk never means another module."""
    code = """
from ringattn import RingAttention
RingAttention(2, 8, profile=None, device="cpu")
print(RingAttention(4, 8, 2, profile=None, device="cpu").digest)
"""
    run = subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, capture_output=True, text=True)
    assert run.stdout.strip() == RingAttention(4, 8, 2, profile=None, device="cpu").digest
