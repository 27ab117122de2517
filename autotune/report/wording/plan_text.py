"""Text of plans for the terminal, whose lines break between names and never inside one."""

from __future__ import annotations

import re
from typing import Any

from rich.console import Console, ConsoleOptions
from rich.containers import Lines
from rich.measure import Measurement
from rich.text import Text

_PIECE = re.compile(r"[^\s,]+,*\s*|,+\s*|\s+")  # a line may end behind a space, and behind the comma between branches
_PAIR = re.compile(r"[^/]*/|[^/]+")  # and, where a piece is longer than a line, behind the slash of forward/backward


def pieces(text: str) -> list[str]:
    """Split a text where a line may end; joined again it is the same."""
    return _PIECE.findall(text)


def longest_piece(text: str) -> int:
    """Return the columns of the longest part of ``text`` that stays on one line."""
    return max((len(piece.rstrip()) for piece in pieces(text)), default=0)


def wrapped(text: str, width: int) -> list[str]:
    """Return the lines of ``text`` at ``width`` columns; a name longer than one is broken as a last resort."""
    lines = [""]
    for piece in pieces(text):
        parts = [piece] if len(piece.rstrip()) <= width else _PAIR.findall(piece)
        for part in parts:
            if lines[-1] and len(lines[-1]) + len(part.rstrip()) > width:
                lines.append("")
            lines[-1] += part
            while len(lines[-1].rstrip()) > width:
                lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return [line.rstrip() for line in lines]


class PlanText(Text):
    """Text of one line that ``wrapped`` breaks."""

    def wrap(self, console: Console, width: int, **_: Any) -> Lines:
        """Return the lines at ``width`` columns."""
        return Lines(Text(line, style=self.style) for line in wrapped(self.plain, width))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(longest_piece(self.plain), len(self.plain))
