"""Child interpreters, and theirs, import what this one does and nothing from the working folder."""

from __future__ import annotations

import os
import site
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import autotune
from autotune.children import child_command, child_environ
from autotune.folders import memory_file, readable_copy, write_trouble

PACKAGES = str(Path(autotune.__file__).resolve().parents[1])
SPAWNING = """
import multiprocessing

def where(queue):
    import random, json
    queue.put([random.__file__, json.__file__])

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    process = context.Process(target=where, args=(queue,))
    process.start()
    print(*queue.get(), sep="\\n")
    process.join()
"""


@pytest.mark.parametrize("search", ["", os.pathsep, f"{os.pathsep}/nowhere", f"/nowhere{os.pathsep}"])
def test_nothing_is_imported_from_the_working_folder(tmp_path: Path, search: str) -> None:
    for name in ("random", "json", "queue", "multiprocessing", "autotune"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working folder')\n")
    package = tmp_path / "elsewhere"
    package.mkdir()
    (package / "spawning.py").write_text(SPAWNING)
    environ = child_environ({**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{search}"})
    for command in (
        child_command("spawning"),
        [sys.executable, "-c", "import random, json; print(random.__file__, json.__file__, sep='\\n')"],  # a grandchild
    ):
        ended = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        files = ended.stdout.split()
        assert len(files) == 2
        assert not [file for file in files if Path(file).is_relative_to(tmp_path)]


def test_a_child_finds_this_package_in_a_checkout() -> None:
    environ = child_environ({"PYTHONPATH": "/theirs"})
    expected = [PACKAGES, "/theirs"] if PACKAGES not in site.getsitepackages() else ["/theirs"]
    assert environ["PYTHONPATH"].split(os.pathsep) == expected


def test_an_installed_package_is_not_put_before_python_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ``queue.py`` or ``enum.py`` among installed packages comes after Python's, in a child as in its parent."""
    monkeypatch.setattr(site, "getsitepackages", lambda: ["/usr/lib/x", PACKAGES])
    assert child_environ({"PYTHONPATH": "/theirs"})["PYTHONPATH"] == "/theirs"


def test_torch_gets_a_cache_folder_where_there_is_none_for_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    assert "TORCHINDUCTOR_CACHE_DIR" not in child_environ({})
    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert Path(child_environ({})["TORCHINDUCTOR_CACHE_DIR"]).is_dir()
    assert child_environ({"TORCHINDUCTOR_CACHE_DIR": "/mine"})["TORCHINDUCTOR_CACHE_DIR"] == "/mine"


# --- files that need no folder, and folders that are asked -----------------------------------------------------------


def test_a_copy_in_memory_is_read_by_a_child(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "gettempdir", lambda: pytest.fail("no folder is needed"))
    with readable_copy("schema: 1 \u00e9".encode()) as path:
        ended = subprocess.run(["cat", str(path)], capture_output=True)
        assert ended.stdout.decode() == "schema: 1 \u00e9"
    assert not path.exists()
    with memory_file() as file:
        file.write(b"x")
        file.seek(0)
        assert file.read() == b"x"


def test_a_folder_is_asked_by_writing(tmp_path: Path) -> None:
    assert write_trouble(tmp_path) == ""
    assert list(tmp_path.iterdir()) == []
    assert write_trouble(tmp_path / "missing") == "No such file or directory"
    assert write_trouble(Path("/proc"))
    (tmp_path / "file").touch()
    assert write_trouble(tmp_path / "file") == "Not a directory"


@pytest.mark.parametrize("function", ["write", "fsync"])
def test_a_full_disk_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    if function == "fsync":
        monkeypatch.setattr(os, "fsync", full)
    else:
        real = tempfile.TemporaryFile

        def file_on_full_disk(**options: object) -> object:
            made = real(**options)  # type: ignore[call-overload]
            made.flush = full
            return made

        monkeypatch.setattr(tempfile, "TemporaryFile", file_on_full_disk)
    assert write_trouble(tmp_path) == "No space left on device"
    assert list(tmp_path.iterdir()) == []
