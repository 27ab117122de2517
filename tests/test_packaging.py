"""What is built, what is installed, and what an import costs: always in a fresh interpreter, from another directory."""

from __future__ import annotations

import email
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
SHIPPED = {path.name for path in (ROOT / "profiles").glob("*.yaml")}

LOAD_EVERY_SHIPPED_PROFILE = """
import json, os, ringattn
from ringattn.profile.locations import home_folder, search_paths

folders = [path for origin, path in search_paths(os.environ, home_folder()) if origin == "shipped"]
sources = {path.name: ringattn.load_profile(path).source for folder in folders for path in folder.glob("*.yaml")}
print(json.dumps({"package": ringattn.__file__, "folders": [str(folder) for folder in folders], "sources": sources}))
"""


def run(*command: str | Path, cwd: Path, path: Path | None = None) -> str:
    """The standard output of ``command``, which must succeed; ``path`` alone is its PYTHONPATH."""
    ours = ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL")
    environ = {name: value for name, value in os.environ.items() if name not in ours}
    if path is not None:
        environ["PYTHONPATH"] = str(path)
    done = subprocess.run([str(part) for part in command], cwd=cwd, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, f"{command} in {cwd}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def run_python(code: str, cwd: Path, path: Path) -> Any:
    """What ``code`` prints as JSON in its last line."""
    return json.loads(run(sys.executable, "-c", code, cwd=cwd, path=path).splitlines()[-1])


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, the wheel built from it, and in ``direct/`` the wheel built from the checkout."""
    for needed in ("build", "hatchling"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed; pip install '.[dev]'")
    folder = tmp_path_factory.mktemp("built")
    build = (sys.executable, "-m", "build", "--no-isolation", ROOT, "--outdir")
    run(*build, folder, cwd=folder)
    run(*build, folder / "direct", "--wheel", cwd=folder)
    return folder


@pytest.fixture(scope="session")
def wheel(built: Path) -> Path:
    (path,) = built.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the installed wheel and none of what it depends on."""
    target = tmp_path_factory.mktemp("installed")
    install = ("install", "--quiet", "--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", *install, "--target", target, wheel, cwd=target)
    return target


def files_in(wheel: Path) -> set[str]:
    names = zipfile.ZipFile(wheel).namelist()
    assert len(names) == len(set(names)), f"{wheel} holds a file twice"
    return set(names)


def test_there_are_shipped_profiles() -> None:
    assert SHIPPED


def test_wheel_holds_both_packages_whole_the_profiles_and_nothing_else(wheel: Path) -> None:
    files = files_in(wheel)
    tops = {name.partition("/")[0] for name in files}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"ringattn", "autotune"}
    assert {"ringattn/py.typed", "autotune/py.typed"} <= files
    sources = (path for package in ("ringattn", "autotune") for path in (ROOT / package).rglob("*") if path.is_file())
    assert {str(path.relative_to(ROOT)) for path in sources if path.suffix != ".pyc"} <= files
    assert {Path(name).name for name in files if name.startswith("ringattn/_profiles/")} >= SHIPPED


def test_wheel_from_the_sdist_is_the_wheel_from_the_checkout(built: Path, wheel: Path) -> None:
    (direct,) = (built / "direct").glob("*.whl")
    assert files_in(wheel) == files_in(direct)


def test_sdist_holds_the_profiles_where_a_checkout_and_an_installation_look(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("profiles", "ringattn/_profiles"):
        assert {Path(name).name for name in names if Path(name).parent == Path(folder)} >= SHIPPED


def test_sdist_holds_what_the_readme_links(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    linked = re.findall(r"\]\(([^)#:]+)\)", (ROOT / "README.md").read_text("utf-8"))
    assert linked
    for target in linked:
        assert target in names or any(name.startswith(f"{target}/") for name in names), target


def test_hard_dependencies_are_few_and_need_no_cuda(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    required = metadata.get_all("Requires-Dist") or []
    hard = {re.match(r"[\w.-]+", line).group() for line in required if "extra ==" not in line}  # type: ignore[union-attr]
    assert hard == {"torch", "pyyaml", "optuna", "click", "rich", "jinja2", "nvidia-ml-py"}
    assert set(metadata.get_all("Provides-Extra") or []) == {
        "flash",
        "flash4",
        "xformers",
        "store",
        "sign",
        "sigstore",
        "cluster",
        "transformers",
        "dev",
        "docs",
    }


def test_installed_wheel_loads_every_shipped_profile(installed: Path, tmp_path: Path) -> None:
    found = run_python(LOAD_EVERY_SHIPPED_PROFILE, cwd=tmp_path, path=installed)
    assert found["package"] == str(installed / "ringattn" / "__init__.py")
    assert found["folders"] == [str(installed / "ringattn" / "_profiles")]
    assert set(found["sources"]) == SHIPPED


def test_checkout_loads_every_shipped_profile(tmp_path: Path) -> None:
    found = run_python(LOAD_EVERY_SHIPPED_PROFILE, cwd=tmp_path, path=ROOT)
    assert found["package"] == str(ROOT / "ringattn" / "__init__.py")
    assert found["folders"] == [str(ROOT / "profiles")]
    assert set(found["sources"]) == SHIPPED


def test_console_script_of_the_wheel_runs(installed: Path, tmp_path: Path) -> None:
    assert "probe" in run(sys.executable, installed / "bin" / "ringtune", "--help", cwd=tmp_path, path=installed)


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
@pytest.mark.parametrize(
    ("target", "stamp"),
    [("probe", ".ringtune-ready"), ("test", ".ringtune-ready-dev"), ("docs", ".ringtune-ready-docs")],
)
def test_make_sets_up_once_and_again_when_a_requirement_changes(target: str, stamp: str, tmp_path: Path) -> None:
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copyfile(ROOT / name, tmp_path / name)
        os.utime(tmp_path / name, (1_000_000_000, 1_000_000_000))

    def planned(*options: str) -> str:
        return run("make", "--dry-run", target, "VENV=venv", "NO_INSTALL=0", *options, cwd=tmp_path)

    assert "-m venv venv" in planned()
    assert "pip install" in planned()
    assert "pip install" not in planned("NO_INSTALL=1")
    assert "-m venv" not in planned("NO_INSTALL=1")

    for name in ("bin/pip", stamp):  # what the set-up leaves behind
        (tmp_path / "venv" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "venv" / name).touch()
    assert "pip install" not in planned()
    os.utime(tmp_path / "constraints.txt")
    os.utime(tmp_path / "venv" / stamp, (1_000_000_001, 1_000_000_001))
    assert "pip install" in planned()
    assert "-m venv" not in planned()
