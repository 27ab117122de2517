"""``forward`` only looks up and runs. Its code is read for what it may not do, and what it calls is counted."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import os
import subprocess
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import DENSE, Case, pattern_of

import ringattn
from ringattn import RingAttention
from ringattn.autograd import checkpoint
from ringattn.autograd.function import _Attend
from ringattn.hardware import facts as hardware
from ringattn.planning import heuristic, module_setup, plan, table
from ringattn.profile import locations as profile_paths
from ringattn.profile import resolve
from ringattn.runtime.program import Program

PACKAGE = Path(ringattn.__file__).parent

# Everything that runs at every call, once a shape is known.
HOT = [
    RingAttention.forward,
    RingAttention.call_mode,
    _Attend.forward,
    _Attend.backward,
    Program.attend,
    Program.gradients,
    Program.forward,
]
HOT += [Program._forward_window, Program._backward_window, Program.backward, Program._rows, Program._direct]


def tree(function: Any) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(function)))


def called(function: Any) -> set[str]:
    """The last names of everything that a function calls or reads: ``os.environ.get`` gives environ and get."""
    names = set()
    for node in ast.walk(tree(function)):
        if isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.Name):
            names.add(node.id)
    return names


@pytest.mark.parametrize("function", HOT, ids=lambda f: f.__qualname__)
def test_nothing_is_tried(function: Any) -> None:
    assert not [node for node in ast.walk(tree(function)) if isinstance(node, ast.Try | ast.TryStar)]


@pytest.mark.parametrize("function", HOT, ids=lambda f: f.__qualname__)
def test_nothing_is_asked(function: Any) -> None:
    asking = {
        "hasattr",
        "getattr",
        "environ",
        "getenv",
        "detect",
        "collect",
        "find_profiles",
        "resolve",
        "set_up",
        "find_spec",
    }
    asking |= {"get_device_properties", "get_device_capability", "is_available", "device_count", "current_device"}
    asking |= {"synchronize", "import_module", "__import__", "item", "tolist"}
    assert called(function).isdisjoint(asking)


@pytest.mark.parametrize("function", HOT, ids=lambda f: f.__qualname__)
def test_no_dictionary_of_strings_and_no_import(function: Any) -> None:
    for node in ast.walk(tree(function)):
        assert not isinstance(node, ast.Dict | ast.DictComp | ast.Import)
        assert not (
            isinstance(node, ast.Subscript)
            and isinstance(node.slice, ast.Constant)
            and isinstance(node.slice.value, str)
        )


CASES = {
    "dense": Case(24, 4, 2, 8, 2, DENSE, causal=True),
    "dilated": Case(24, 4, 2, 8, 2, pattern_of([8, 16], [1, 2]), causal=True),
    "strided": Case(24, 4, 2, 8, 2, pattern_of([8, 16], [1, 2]), layout="last_strided"),
}

QUESTIONS: list[tuple[Any, str]] = [
    (hardware, "detect"),
    (module_setup, "detect"),
    (module_setup, "find_profiles"),
    (module_setup, "resolve"),
    (module_setup, "set_up"),
    (resolve, "resolve"),
    (profile_paths, "collect"),
    (plan, "rejection_reasons"),
    (plan, "build_plan"),
    (heuristic, "build_plan"),
    (table, "build_plan"),
    (table, "heuristic_tunables"),
    (torch.cuda, "is_available"),
    (torch.cuda, "current_device"),
    (torch.cuda, "device_count"),
    (torch.cuda, "get_device_properties"),
    (torch.cuda, "get_device_capability"),
    (torch.cuda, "synchronize"),
    (torch.cuda, "mem_get_info"),
    (torch, "get_num_threads"),
    (os, "getenv"),
    (os, "stat"),
    (importlib, "import_module"),
    (builtins, "open"),
]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts every question put to the machine, the environment, the file system or the planner from now on."""
    counts: Counter[str] = Counter()

    def counting(owner: Any, name: str) -> Any:
        original = getattr(owner, name)

        def count(*arguments: Any, **keywords: Any) -> Any:
            counts[name] += 1
            return original(*arguments, **keywords)

        return count

    for owner, name in QUESTIONS:
        monkeypatch.setattr(owner, name, counting(owner, name))
    read = os.environ.__class__.__getitem__
    monkeypatch.setattr(os.environ.__class__, "__getitem__", lambda *a: (counts.update(["environ"]), read(*a))[1])
    return counts


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_after_the_first_call_of_a_shape_nothing_is_asked(name: str, autocast: bool, asked: Counter[str]) -> None:
    case = CASES[name]
    module = case.module()
    q, k, v = case.inputs(torch.float32)

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            out, _ = module(q, k, v, return_lse=True)
        out.backward(case.dout(torch.float32))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            module(q, k, v)

    step()
    assert asked["detect"] == 1  # at init
    assert asked["environ"] > 0
    assert asked["build_plan"] > 0
    asked.clear()
    for _ in range(3):
        step()
    assert asked == Counter()


def test_another_shape_is_planned_but_the_machine_is_not_asked(asked: Counter[str]) -> None:
    module = CASES["dilated"].module()
    module(*CASES["dilated"].inputs())
    asked.clear()
    module(*Case(40, 4, 2, 8, 2, CASES["dilated"].pattern, causal=True).inputs())
    assert asked["build_plan"] > 0
    assert set(asked) <= {"build_plan", "rejection_reasons", "heuristic_tunables"}


def test_autograds_function_is_called_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a module does in eager mode is one autograd Function and no registered operator."""
    from ringattn.autograd import torch_compile as compiled

    monkeypatch.setattr(compiled, "attend", None)
    monkeypatch.setattr(compiled, "attend_backward", None)
    case = CASES["dilated"]
    out = case.module()(*case.inputs())
    assert type(out.grad_fn).__name__ == "_AttendBackward"
    out.backward(case.dout())


def test_what_saves_and_restores_catches_nothing() -> None:
    for function in (checkpoint.forward, checkpoint.restore):
        assert not [node for node in ast.walk(tree(function)) if isinstance(node, ast.Try)]


# --- imports ---------------------------------------------------------------------------------------------------------


def test_the_runtime_imports_neither_the_tuner_and_what_it_needs_nor_torchs_compiler() -> None:
    code = """
import sys
import ringattn
from ringattn import RingAttention, Workload, Profile, load_profile, detect
import torch
import ringattn.distributed.context
x = torch.zeros(1, 4, 2, 4)
RingAttention(2, 4, profile=None, device="cpu")(x, x, x)
for name in ("autotune", "optuna", "click", "rich", "sqlalchemy"):
    assert name not in sys.modules, name
assert "torch._dynamo" not in sys.modules  # 1.1 of the 3.3 s in which a rank would start
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


@pytest.mark.parametrize(
    "module", ["ringattn", "workload", "errors", "profile.schema", "profile.yaml_io", "profile.resolve"]
)
def test_what_the_command_line_needs_comes_without_torch(module: str) -> None:
    name = module if module == "ringattn" else f"ringattn.{module}"
    code = f"import sys, {name}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ringattn' has no attribute 'Attention'"):
        ringattn.Attention  # noqa: B018
    assert set(ringattn.__all__) <= set(dir(ringattn)) | {
        "RingAttention",
        "HardwareFacts",
        "detect",
        "Profile",
        "load_profile",
    }
    for name in ringattn.__all__:
        assert getattr(ringattn, name).__name__ == name
