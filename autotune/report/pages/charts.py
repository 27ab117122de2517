"""Charts of the report as inline SVG: no scripts, colours by CSS class, a title and a description in each.

Places are worked out here, in about the pixels that a page has for a chart, and drawn by ``templates/charts.html``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from autotune.display_text import format_factor, plain
from autotune.journal.history import SearchHistory, TimedTrial

WIDTH, HISTORY_WIDTH = 460, 300
LEFT, TOP, LEGEND_ROW = 40, 14, 18
CHARACTER_WIDTH = 6.7  # of the 12 px font of labels, a little generous: 11 px are left where a page is 500 px wide
PLOT_HEIGHT, HISTORY_HEIGHT = 150, 100
# What has a colour of its own in the style sheet, in the order in which bars stand side by side.
SERIES = (
    *("tuned", "torch", "default", "flash-attn-4", "flash-attn-3", "flash-attn-2", "flash", "cudnn", "efficient"),
    *("xformers", "triton", "split-kv", "flash-cpu", "math"),
)
CONFIRMED = 4  # readings from which a trial may be the best so far: of one alone 30 % are noise on a busy machine
SLOWEST_DRAWN = 0.25  # of the default's speed; what is slower would press all others together
_FACTOR_TICKS = (0.3, 0.5, 0.7, 1, 1.5, 2, 3, 5, 10, 20, 50, 100, 1000)


@cache
def environment() -> Environment:
    """Return the environment of the templates: every value is plain text, and escaped, unless it is Markup."""
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else plain(value),
    )


def color_class(name: str) -> str:
    """Return the CSS class of a kernel or a series; names the style sheet does not know share one."""
    return f"k-{name}" if name in (*SERIES, "A", "B") else "k-other"


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: a series' value at one place of the axis. ``color`` is a CSS class."""

    name: str
    color: str
    value: float
    tip: str


def bar_chart(
    chart_id: str, title: str, groups: Sequence[tuple[str, Sequence[Bar]]], label: Callable[[float], str]
) -> Markup:
    """Draw groups of bars from 0 up, with a legend; ``label`` writes the value of each group's first bar.

    A group without bars is said to be not measured.

    Values are finite and at least 0.
    """
    colors = {bar.name: bar.color for _, bars in groups for bar in bars}
    legend = list(_legend(sorted(colors, key=lambda name: SERIES.index(name) if name in SERIES else -1)))
    top = TOP + LEGEND_ROW * (1 + max((row for _, _, row in legend), default=0)) + 10
    base = top + PLOT_HEIGHT
    highest = max((bar.value for _, bars in groups for bar in bars), default=0.0) or 1.0
    step = _step(highest)
    scale = PLOT_HEIGHT / (highest * 1.06)
    slot = (WIDTH - LEFT) / len(groups)
    width = min(22.0, slot * 0.84 / max(1, *(len(bars) for _, bars in groups)))
    placed, labels = [], []
    for number, (_, bars) in enumerate(groups):
        middle = LEFT + slot * (number + 0.5)
        for place, bar in enumerate(bars):
            height = max(bar.value * scale, 1.0)
            placed.append((middle + (place - len(bars) / 2) * width, base - height, width - 1, height, bar))
        if bars:
            text = label(bars[0].value)
            half = len(text) * CHARACTER_WIDTH / 2
            left = max(placed[-len(bars)][0] + width / 2 - half, float(LEFT))
            under = [place[1] for place in placed[-len(bars) :] if place[0] < left + 2 * half]
            labels.append((left + half, min(under) - 4, text))
    return Markup(
        environment()
        .get_template("charts.html")
        .module.bars(  # type: ignore[attr-defined]  # a macro
            id=chart_id,
            title=title,
            told="; ".join(f"{name}: {', '.join(bar.tip for bar in bars)}" for name, bars in groups),
            size=(WIDTH, base + 20),
            left=LEFT,
            base=base,
            ticks=[(base - n * step * scale, f"{n * step:g}") for n in range(int(highest * 1.06 / step) + 1)],
            legend=[(x, TOP + row * LEGEND_ROW, name, colors[name]) for name, x, row in legend],
            bars=placed,
            labels=labels,
            empty=[LEFT + slot * (number + 0.5) for number, (_, bars) in enumerate(groups) if not bars],
            names=[(LEFT + slot * (number + 0.5), name) for number, (name, _) in enumerate(groups)],
        )
    )


def history_chart(chart_id: str, title: str, history: SearchHistory) -> Markup:
    """Draw the trials of one search where they began, and on the axis what failed or was far slower.

    The line is the best so far, of trials that were read often enough to be believed; the others are hollow. It does
    not go beyond the plan that was chosen: what read faster and was not chosen, the final did not confirm.
    """
    trials = history.trials
    marks = [trial for trial in trials if trial.speedup is None or trial.speedup < SLOWEST_DRAWN]
    timed = [(trial, trial.speedup) for trial in trials if trial.speedup is not None and trial not in marks]
    low = min([0.8, *(speedup for _, speedup in timed)]) / 1.1
    high = max([1.25, *(speedup for _, speedup in timed)]) * 1.1
    last_s = max([history.end_s, *(trial.elapsed_s for trial in trials)]) or 1.0
    base = TOP + HISTORY_HEIGHT

    def x(elapsed_s: float) -> float:
        return LEFT + 8 + elapsed_s / last_s * (HISTORY_WIDTH - LEFT - 20)

    def y(speedup: float) -> float:
        return base - 12 - math.log(speedup / low) / math.log(high / low) * (HISTORY_HEIGHT - 12)

    ticks = [tick for tick in _FACTOR_TICKS if low <= tick <= high]
    confirmed = [(trial.readings, speedup) for trial, speedup in timed if trial.chosen]
    ceiling = max(confirmed)[1] if confirmed else math.inf
    best, steps = 1.0, f"M{x(0):.1f} {y(1.0):.1f}"
    for trial, speedup in timed:
        if best < speedup <= ceiling and trial.readings >= CONFIRMED:
            best = speedup
            steps += f"H{x(trial.elapsed_s):.1f}V{y(best):.1f}"
    return Markup(
        environment()
        .get_template("charts.html")
        .module.history(  # type: ignore[attr-defined]  # a macro
            id=chart_id,
            title=title,
            told=f"{len(timed)} trials, {len(marks)} failed or far slower; best {format_factor(best)}",
            size=(HISTORY_WIDTH, base + 20),
            left=LEFT,
            base=base,
            ticks=[(y(tick), f"{tick:g}x", tick == 1) for tick in ticks],
            steps=f"{steps}H{x(last_s):.1f}",
            dots=[(x(trial.elapsed_s), y(speedup), _kind(trial), trial.tip) for trial, speedup in timed],
            marks=[(x(t.elapsed_s), "failed" if t.speedup is None else "slow", t.tip) for t in marks],
            end=f"{last_s:.3g} s",
        )
    )


def _kind(trial: TimedTrial) -> str:
    """Return the CSS classes of the dot of a trial that gave a time."""
    if trial.chosen:
        return "trial chosen"
    return "trial unsure" if 0 < trial.readings < CONFIRMED else "trial"  # the default is its own measure, without any


def _legend(names: Sequence[str]) -> Iterator[tuple[str, float, int]]:
    """Return each name with where its entry starts and on which row."""
    x, row = float(LEFT), 0
    for name in names:
        width = 14 + len(name) * CHARACTER_WIDTH + 12
        if x > LEFT and x + width > WIDTH:
            x, row = float(LEFT), row + 1
        yield name, x, row
        x += width


def _step(highest: float) -> float:
    """Return the distance of ticks, 1, 2 or 5 times a power of ten: four at most below ``highest``."""
    power = 10.0 ** math.floor(math.log10(highest / 4))
    return next(step * power for step in (1, 2, 5, 10) if step * power >= highest / 4)
