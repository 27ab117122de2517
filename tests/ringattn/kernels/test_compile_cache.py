"""Compilers of kernels get a folder that can be written, where the home is read-only or there is none."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ringattn.errors import PlanError
from ringattn.kernels import compile_cache
from ringattn.kernels.compile_cache import can_keep, prepare_triton
from ringattn.kernels.contract import KernelConfig
from ringattn.kernels.own import split_kv, triton
from ringattn.kernels.packages import flash_attn_4

NOT_WRITABLE = "/proc/a-home"  # nobody can make a folder there, nor can root


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "XDG_CACHE_HOME"):
        monkeypatch.setenv(name, "")  # which the end of the test undoes, whatever was set meanwhile
    prepare_triton.cache_clear()
    yield
    prepare_triton.cache_clear()


def test_a_home_that_can_be_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    prepare_triton()
    assert os.environ["TRITON_CACHE_DIR"] == ""
    monkeypatch.setenv("HOME", NOT_WRITABLE)
    monkeypatch.setenv("TRITON_HOME", str(tmp_path))
    prepare_triton.cache_clear()
    prepare_triton()
    assert os.environ["TRITON_CACHE_DIR"] == ""


def test_a_user_s_own_choice_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", NOT_WRITABLE)
    monkeypatch.setenv("TRITON_CACHE_DIR", "/theirs")
    prepare_triton()
    assert os.environ["TRITON_CACHE_DIR"] == "/theirs"


@pytest.mark.parametrize("kernel", [triton, split_kv], ids=lambda module: module.__name__.rpartition(".")[2])
def test_every_kernel_of_ours_prepares_triton(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where triton itself is missing."""
    monkeypatch.setenv("HOME", NOT_WRITABLE)
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "ringattn.kernels.own.triton_device", raising=False)
    monkeypatch.delitem(sys.modules, "ringattn.kernels.own.split_kv_device", raising=False)
    with pytest.raises(PlanError, match="import triton"):
        kernel.load(KernelConfig(True, 0.5))
    assert os.environ["TRITON_CACHE_DIR"].startswith(tempfile.gettempdir())


def test_triton_makes_its_cache_where_the_home_cannot_be_written() -> None:
    """In a process of its own, whose folder is gone when it ends."""
    cache = pytest.importorskip("triton.runtime.cache").__name__
    script = f"""
import os
from {cache} import get_cache_manager
from ringattn.kernels.compile_cache import prepare_triton
try:
    get_cache_manager("0f" * 32)
except OSError:
    print("fails")
prepare_triton()
print(get_cache_manager("0f" * 32).put("x", "kernel.json", binary=False), flush=True)  # else the child prints it too
if os.fork() == 0:
    raise SystemExit  # a child's end leaves the folder
os.wait()
print(os.path.isdir(os.environ["TRITON_CACHE_DIR"]), os.environ["TRITON_CACHE_DIR"])
"""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "XDG_"))}
    ended = subprocess.run(
        [sys.executable, "-c", script], env={**environ, "HOME": NOT_WRITABLE}, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    fails, file, there = ended.stdout.splitlines()
    assert fails == "fails"
    assert there.split()[0] == "True"
    assert Path(file).is_relative_to(there.split()[1])
    assert not Path(there.split()[1]).exists()
    assert "set TRITON_CACHE_DIR" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_without_any_folder_it_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def none(**_: object) -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setenv("HOME", NOT_WRITABLE)
    monkeypatch.setattr(tempfile, "mkdtemp", none)
    with caplog.at_level(logging.WARNING, "ringattn"):
        prepare_triton()
        prepare_triton()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "No usable temporary directory found; set TRITON_CACHE_DIR" in line


def test_flash_attn_4_keeps_nothing_where_nothing_can_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = [f"FLASH_ATTENTION_CUTE_DSL_CACHE_{name}" for name in ("ENABLED", "DIR")]
    for name in names:
        monkeypatch.setenv(name, "x")
        monkeypatch.delenv(name)
    monkeypatch.setenv("XDG_CACHE_HOME", NOT_WRITABLE)
    flash_attn_4._keep_compiled_kernels()
    assert not [name for name in names if name in os.environ]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    flash_attn_4._keep_compiled_kernels()
    assert os.environ[names[1]] == str(tmp_path / "ringtune" / "flash-attn-4")


def test_a_folder_is_asked_by_making_it(tmp_path: Path) -> None:
    assert can_keep(tmp_path / "a" / "b")
    (tmp_path / "file").touch()
    assert not can_keep(tmp_path / "file" / "x")
    assert not can_keep(Path(NOT_WRITABLE))
    assert compile_cache.can_keep(tmp_path)
