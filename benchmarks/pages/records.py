"""Shared by the makers of tables: the committed records, how figures are written, and the names of the makers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "results"
KERNELS = {
    "flash-attn-4": "flash-attn-4",
    "cudnn": "cuDNN",
    "flash": "FlashAttention 2",
    "efficient": "memory-efficient",
}
FIGURES: dict[str, Callable[[], str]] = {}
Row = dict[str, Any]


def figures(make: Callable[[], str]) -> Callable[[], str]:
    """Enter a maker of a block under its name, with hyphens."""
    FIGURES[make.__name__.replace("_", "-")] = make
    return make


@cache
def record(name: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
    return document


def row_of(name: str, **fields: object) -> Row:
    """Return the one row of a record that has these values."""
    (found,) = (row for row in record(name)["rows"] if fields.items() <= row.items())
    return dict(found)


def number(value: float) -> str:
    """Write three digits: 98.5, 0.492, 102."""
    return f"{value:#.3g}".rstrip(".")


def ms(value: float) -> str:
    return f"{number(value)} ms"


def factor(value: float) -> str:
    return f"{value:.2f}"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(cells)} |" for cells in (head, *rows)]
    return "\n".join([lines[0], "|---" * len(head) + "|", *lines[1:]]) + "\n"
