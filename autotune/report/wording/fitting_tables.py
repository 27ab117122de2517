"""Tables of figures, none of which is cut: what does not fit beside the others goes into a further table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill

from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from .hanging import hanging

Cells = Mapping[str, Text]  # by column
_ANY_WIDTH = 10_000  # a measurement is cut to the width of the terminal otherwise


@dataclass(frozen=True, slots=True)
class FittingTables:
    """Rows as one table, or as few as hold their columns; each has the ``keys``, which name a row, and what fits.

    Columns whose names are in ``texts`` begin at the left.
    """

    rows: Sequence[Cells]
    columns: Sequence[str]
    keys: Sequence[str]
    texts: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=_ANY_WIDTH)

        def fits(table: Table) -> bool:
            return Measurement.get(console, wide, table).maximum <= options.max_width

        whole = figures_table(self.rows, [*self.keys, *self.columns], self.texts)
        if fits(whole):
            yield whole
        else:
            yield from self._split(fits)

    def _split(self, fits: Callable[[Table], bool]) -> Iterator[Table]:
        # Indented as all tables are, unless that would cut a column that is alone.
        edge = all(fits(self._narrow([name], edge=True)) for name in self.columns)
        group: list[str] = []
        for name in self.columns:
            if group and not fits(self._narrow([*group, name], edge)):
                yield self._narrow(group, edge)
                group = []
            group.append(name)
        yield self._narrow(group, edge)

    def _narrow(self, columns: Sequence[str], edge: bool) -> Table:
        return figures_table(self.rows, [*self.keys, *columns], self.texts, wrap_names=True, edge=edge)


@dataclass(frozen=True, slots=True)
class WholeNames:
    """Rows of text in which no name is cut or broken, so that it can be copied.

    A table, or where a terminal is too narrow for that a paragraph for each row. What is no terminal has a line for
    each row, however long.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = options.update(max_width=_ANY_WIDTH)
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        for name in self.columns:
            table.add_column(name, no_wrap=True)
        for row in self.rows:
            table.add_row(*map(Text, row))
        if not console.is_terminal or Measurement.get(console, wide, table).maximum <= options.max_width:
            yield from console.render(table, wide)
            return
        names = [name.split(",")[0] for name in self.columns[1:]]
        lead = max(map(len, names)) + 4
        for row in self.rows:
            yield Text(row[0], style="bold", no_wrap=True, overflow="ignore")
            for name, value in zip(names, row[1:], strict=True):
                longest = max(map(len, value.split()), default=0)
                line = hanging(f"  {name:<{lead - 2}}", value)
                yield from console.render(line, options.update(max_width=max(options.max_width, lead + longest)))


def figures_table(
    rows: Sequence[Cells],
    columns: Sequence[str],
    texts: Sequence[str] = (),
    wrap_names: bool = False,
    edge: bool = True,
) -> Table:
    """Return a table; with ``wrap_names`` names of columns break to the width of their figures.

    ``edge`` is a space at its left and right and an empty line above and below it.
    """
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1), show_edge=edge)
    for name in columns:
        width = max(len(row[name].plain) for row in rows)
        header = fill(name, max(width, 1), break_long_words=False, break_on_hyphens=False) if wrap_names else name
        table.add_column(header, justify="left" if name in texts else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(row[name] for name in columns))
    return table
