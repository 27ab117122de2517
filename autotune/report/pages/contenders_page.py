"""The comparison of presets, other libraries and this machine's plan as one page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby

from autotune.display_text import format_length
from autotune.report.contenders import HEURISTIC, OURS, TORCH, Crossover, Standing

from .charts import Bar, bar_chart, color_class
from .page import template

_DRAWN = {OURS: "tuned", TORCH: "torch", HEURISTIC: "default"}  # the name that the style sheet has a colour for


def contenders_page(title: str, asked: str, standings: Sequence[Standing], crossed: Sequence[Crossover]) -> str:
    """Return the page; ``title`` names the machine, and ``asked`` says what was compared."""
    by_length = [(length, list(rows)) for length, rows in groupby(standings, key=lambda s: s.seq_len)]
    return template("contenders.html").render(
        title=title,
        asked=asked,
        groups=by_length,
        crossovers=crossed,
        chart=bar_chart("tokens", "tokens/s over length", [(format_length(n), _bars(r)) for n, r in by_length], _rate),
        known=lambda value: not math.isnan(value),
        rate=_rate,
        sections={"speed": "Speed over length", "all": "Every contender", "crossovers": "Where they pass torch"},
    )


def _bars(rows: Sequence[Standing]) -> list[Bar]:
    found = {row.name: row for row in rows if not math.isnan(row.tokens_per_s)}
    drawn = [(name, series, found[name].tokens_per_s) for name, series in _DRAWN.items() if name in found]
    return [Bar(name, color_class(series), rate, f"{name}: {_rate(rate)} tokens/s") for name, series, rate in drawn]


def _rate(tokens_per_s: float) -> str:
    return f"{tokens_per_s:,.0f}"
