"""A folder is a role: of the packages and of their tests none holds more files than one look takes in."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MOST = 15  # Python files of a folder; its __init__.py, one line that says what the folder is, counts for none


def crowded(top: Path) -> dict[str, int]:
    """The folders in and under ``top`` that hold too many files, with how many."""
    files = Counter(path.parent for path in top.rglob("*.py") if path.name != "__init__.py")
    return {str(folder.relative_to(top.parent)): count for folder, count in files.items() if count > MOST}


@pytest.mark.parametrize("top", ["ringattn", "autotune", "tests"])
def test_no_folder_is_crowded(top: str) -> None:
    assert any((ROOT / top).rglob("*.py"))
    assert crowded(ROOT / top) == {}


def test_a_crowded_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "top" / "room"
    folder.mkdir(parents=True)
    for name in ("__init__", *(f"idea_{number}" for number in range(MOST))):
        (folder / f"{name}.py").touch()
    assert crowded(tmp_path / "top") == {}
    (folder / "one_more.py").touch()
    assert crowded(tmp_path / "top") == {"top/room": MOST + 1}
