"""Lines for the terminal that stay indented where they are longer than it is wide."""

from __future__ import annotations

from rich.table import Table
from rich.text import Text


def hanging(lead: str, text: str, style: str = "") -> Table:
    """Return ``lead``, its spaces too, with ``text`` behind it, whose further lines begin below the first."""
    line = Table.grid()
    line.add_column(no_wrap=True)
    line.add_column(overflow="fold")  # a path is no use cut off
    line.add_row(Text(lead, style=style), Text(text, style=style))
    return line
