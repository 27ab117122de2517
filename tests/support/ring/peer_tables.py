"""The table of peers' tests in docs/coverage.md, whose counts are those of the tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "coverage.md"


def row_of(peer: str, passed: int, refused: Iterable[str]) -> str:
    """The row of a peer with as many shapes that pass, and the reasons of those that are refused."""
    reasons = Counter(refused)
    why = ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items()))
    return f"| {peer} | {passed + reasons.total()} | {passed} | {reasons.total()} | {why} |"


def assert_page_says(peer: str, passed: int, refused: Iterable[str]) -> None:
    row = row_of(peer, passed, refused)
    assert row in PAGE.read_text("utf-8").splitlines(), f"docs/coverage.md lacks the row\n{row}"
