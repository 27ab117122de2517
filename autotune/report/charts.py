"""Charts of the report as inline SVG text: no scripts, colours by CSS class, a title and a description in each.

Pure: numbers and names in, escaped markup out. Coordinates are in user units; a chart is 360 wide so that its text
stays readable on a phone and it is scaled up no further than 460 px by the style sheet.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from autotune.formats import escape, format_bytes, format_factor, format_length, format_ms

WIDTH = 360
LEFT, RIGHT, TOP = 42, 84, 14
PLOT_HEIGHT = 170
STRIP_HEIGHT = 18
CHARACTER_WIDTH = 5.6  # of the 10 px label font, a little generous
RATIO_TICKS = (0.25, 0.5, 0.7, 0.85, 1, 1.2, 1.5, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128, 256, 512, 1024)
KERNEL_CLASSES = {
    name: f"k-{name}"
    for name in (
        "cudnn",
        "flash",
        "efficient",
        "flash-attn-2",
        "flash-attn-3",
        "flash-attn-4",
        "xformers",
        "flash-cpu",
        "math",
        "default",
    )
}


def kernel_class(name: str) -> str:
    """Return the CSS class of a kernel; names the style sheet does not know share one."""
    return KERNEL_CLASSES.get(name, "k-other")


@dataclass(frozen=True, slots=True)
class Point:
    """One measured value at a length, with its interval."""

    seq_len: int
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Series:
    name: str
    points: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class FrontPoint:
    """One plan of a time/memory front."""

    peak_bytes: int
    median_ms: float
    label: str
    chosen: bool


class _Log:
    """Maps values from ``low`` to ``high`` onto pixels on a log scale; one value alone sits in the middle."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self._low, self._span = math.log(low), math.log(high) - math.log(low)
        self._start, self._end = start, end

    def __call__(self, value: float) -> float:
        share = (math.log(value) - self._low) / self._span if self._span > 0 else 0.5
        return self._start + min(max(share, 0.0), 1.0) * (self._end - self._start)


def relative_chart(
    chart_id: str, title: str, series: Sequence[Series], strips: Sequence[tuple[str, Sequence[tuple[int, str]]]]
) -> str:
    """Draw time relative to the tuned plan over length, and below it the tuned plan's kernel at each length.

    ``strips`` are (label, ((length, kernel name), ...)). Everything is finite and above zero.
    """
    lengths = sorted({seq_len for _, cells in strips for seq_len, _ in cells})
    values = [v for s in series for p in s.points for v in (p.value, p.low, p.high)]
    x = _Log(lengths[0], lengths[-1], LEFT + 10, WIDTH - RIGHT - 6)
    y = _Log(min([1.0, *values]) / 1.04, max([1.25, *values]) * 1.04, TOP + PLOT_HEIGHT, TOP)
    height = TOP + PLOT_HEIGHT + 24 + len(strips) * (STRIP_HEIGHT + 4) + 4
    parts = [_grid(y, min([1.0, *values]) / 1.04, max([1.25, *values]) * 1.04)]
    parts.append(_length_axis(lengths, x))
    parts += [_line(s, x, y) for s in series]
    parts.append(_line(Series("tuned", tuple(Point(n, 1.0, 1.0, 1.0) for n in lengths)), x, y))
    ends = [(s.name, y(s.points[-1].value)) for s in series if s.points] + [("tuned", y(1.0))]
    parts.append(_end_labels(ends))
    top = TOP + PLOT_HEIGHT + 26
    for label, cells in strips:
        parts.append(_strip(label, cells, lengths, x, top))
        top += STRIP_HEIGHT + 4
    return _svg(chart_id, title, _describe(series, strips), height, parts)


def front_chart(chart_id: str, title: str, points: Sequence[FrontPoint]) -> str:
    """Draw time against peak memory of every plan on the front; the chosen one is ringed."""
    ordered = sorted(points, key=lambda p: (p.peak_bytes, p.median_ms))
    lows, highs = (pick(p.peak_bytes for p in ordered) for pick in (min, max))
    x = _Log(max(lows, 1) / 1.1, max(highs, 1) * 1.1, LEFT + 18, WIDTH - 24)
    fastest, slowest = (pick(p.median_ms for p in ordered) for pick in (min, max))
    y = _Log(max(fastest, 1e-6) / 1.06, max(slowest, 1e-6) * 1.06, TOP + PLOT_HEIGHT - 20, TOP)
    base = TOP + PLOT_HEIGHT - 20
    parts = [f'<line class="axis" x1="{LEFT + 18}" y1="{base}" x2="{WIDTH - 24}" y2="{base}"/>']
    for value in dict.fromkeys((fastest, slowest)):
        at = y(max(value, 1e-6))
        parts.append(f'<line class="grid" x1="{LEFT + 18}" y1="{at:.1f}" x2="{WIDTH - 24}" y2="{at:.1f}"/>')
        parts.append(
            f'<text class="tick" x="{LEFT + 12}" y="{at + 3.5:.1f}" text-anchor="end">{format_ms(value)}</text>'
        )
    for value, anchor in ((lows, "start"), (highs, "end")) if lows != highs else ((lows, "middle"),):
        at = x(max(value, 1))
        parts.append(
            f'<text class="tick" x="{at:.1f}" y="{base + 15}" text-anchor="{anchor}">{format_bytes(value)}</text>'
        )
    places = [(x(max(p.peak_bytes, 1)), y(max(p.median_ms, 1e-6)), p) for p in ordered]
    steps = "".join(f"H{px:.1f}V{py:.1f}" for px, py, _ in places[1:])
    parts.append(f'<path class="front" d="M{places[0][0]:.1f} {places[0][1]:.1f}{steps}"/>')
    for number, (px, py, p) in enumerate(places, 1):
        if p.chosen:
            parts.append(f'<circle class="ring" cx="{px:.1f}" cy="{py:.1f}" r="9"/>')
        tip = f"{number}. {p.label}: {format_ms(p.median_ms)}, {format_bytes(p.peak_bytes)}"
        parts.append(f'<circle class="dot" cx="{px:.1f}" cy="{py:.1f}" r="4.5"><title>{escape(tip)}</title></circle>')
        parts.append(f'<text class="label" x="{px + 8:.1f}" y="{py - 7:.1f}">{number}</text>')
    parts.append(
        f'<text class="tick" x="{(LEFT + WIDTH) / 2}" y="{base + 30}" text-anchor="middle">'
        "peak memory beyond the inputs</text>"
    )
    told = "; ".join(f"{p.label} {format_ms(p.median_ms)} {format_bytes(p.peak_bytes)}" for p in ordered)
    return _svg(chart_id, title, told, base + 36, parts)


def interval_bar(middle: float, low: float, high: float, domain: tuple[float, float]) -> str:
    """Draw a speed-up and its interval against the line of 1, on the domain of a whole report. Decorative."""
    x = _Log(min(domain[0], 1.0) / 1.02, max(domain[1], 1.0) * 1.02, 4, 116)
    start, end, at, one = x(low), x(high), x(middle), x(1.0)
    kind = "faster" if low > 1 else "slower" if high < 1 else "same"
    return (
        '<svg class="interval" viewBox="0 0 120 16" width="120" height="16" aria-hidden="true" focusable="false">'
        f'<line class="one" x1="{one:.1f}" y1="1" x2="{one:.1f}" y2="15"/>'
        f'<line class="range {kind}" x1="{start:.1f}" y1="8" x2="{max(end, start + 1):.1f}" y2="8"/>'
        f'<circle class="mid {kind}" cx="{at:.1f}" cy="8" r="3.5"/></svg>'
    )


def _svg(chart_id: str, title: str, description: str, height: float, parts: Iterable[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {WIDTH} {height:.0f}" role="img" '
        f'aria-labelledby="{chart_id}-t {chart_id}-d"><title id="{chart_id}-t">{escape(title)}</title>'
        f'<desc id="{chart_id}-d">{escape(description)}</desc>{"".join(parts)}</svg>'
    )


def _grid(y: _Log, low: float, high: float) -> str:
    ticks = [t for t in RATIO_TICKS if low <= t <= high]
    while len(ticks) > 7:  # keep 1, the line everything is read against
        ticks = [t for i, t in enumerate(ticks) if t == 1 or (i - ticks.index(1)) % 2 == 0]
    lines = []
    for tick in ticks:
        at, kind = y(tick), "grid one" if tick == 1 else "grid"
        lines.append(f'<line class="{kind}" x1="{LEFT}" y1="{at:.1f}" x2="{WIDTH - RIGHT}" y2="{at:.1f}"/>')
        lines.append(f'<text class="tick" x="{LEFT - 6}" y="{at + 3.5:.1f}" text-anchor="end">{tick:g}x</text>')
    return "".join(lines)


def _length_axis(lengths: Sequence[int], x: _Log) -> str:
    labels, last_end = [], -math.inf
    for seq_len in lengths:
        text, at = format_length(seq_len), x(seq_len)
        half = len(text) * CHARACTER_WIDTH / 2
        if at - half < last_end + 4:
            continue
        last_end = at + half
        labels.append(
            f'<text class="tick" x="{at:.1f}" y="{TOP + PLOT_HEIGHT + 15}" text-anchor="middle">{text}</text>'
        )
    base = TOP + PLOT_HEIGHT
    return f'<line class="axis" x1="{LEFT}" y1="{base}" x2="{WIDTH - RIGHT}" y2="{base}"/>' + "".join(labels)


def _series_class(name: str) -> str:
    return "tuned" if name == "tuned" else kernel_class(name)


def _line(series: Series, x: _Log, y: _Log) -> str:
    kind = _series_class(series.name)
    parts = []
    if len(series.points) > 1:
        path = "L".join(f"{x(p.seq_len):.1f} {y(p.value):.1f}" for p in series.points)
        parts.append(f'<path class="line" d="M{path}"/>')
    for p in series.points:
        at, mid = x(p.seq_len), y(p.value)
        if p.high > p.low:
            parts.append(
                f'<line class="whisker" x1="{at:.1f}" y1="{y(p.low):.1f}" x2="{at:.1f}" y2="{y(p.high):.1f}"/>'
            )
        tip = f"{series.name} at {format_length(p.seq_len)}: {format_factor(p.value)} the time of the tuned plan"
        parts.append(f'<circle class="dot" cx="{at:.1f}" cy="{mid:.1f}" r="3.2"><title>{escape(tip)}</title></circle>')
    return f'<g class="{kind}">{"".join(parts)}</g>'


def _end_labels(ends: Sequence[tuple[str, float]], gap: float = 13) -> str:
    """Draw names at the ends of their lines, pushed apart where they would overlap."""
    placed: list[tuple[str, float]] = []
    for name, wanted in sorted(ends, key=lambda end: end[1]):
        floor = placed[-1][1] + gap if placed else TOP + 4
        placed.append((name, max(wanted + 3.5, floor)))
    overflow = placed[-1][1] - (TOP + PLOT_HEIGHT + 4)
    if overflow > 0:  # push the crowd up from the bottom instead
        ceiling = math.inf
        for index in range(len(placed) - 1, -1, -1):
            name, at = placed[index]
            at = min(at, TOP + PLOT_HEIGHT + 4 if ceiling is math.inf else ceiling - gap)
            placed[index], ceiling = (name, at), at
    return "".join(
        f'<text class="label {_series_class(name)}" x="{WIDTH - RIGHT + 6}" y="{at:.1f}">{_clipped(name)}</text>'
        for name, at in placed
    )


def _clipped(name: str) -> str:
    """Escape ``name``, cut to the room right of the plot; the full name is in the tips and the description."""
    room = int((RIGHT - 8) / CHARACTER_WIDTH)
    return escape(name if len(name) <= room else name[: room - 1] + "…")


def _strip(label: str, cells: Sequence[tuple[int, str]], lengths: Sequence[int], x: _Log, top: float) -> str:
    """Draw the kernel at each length: neighbours with one kernel share a bar, half-way to the next."""
    at = [x(seq_len) for seq_len in lengths]
    edges = [LEFT, *((a + b) / 2 for a, b in pairwise(at)), WIDTH - RIGHT + 4]
    names = dict(cells)
    parts = [f'<text class="label" x="{WIDTH - RIGHT + 8}" y="{top + 12.5:.1f}">{_clipped(label)}</text>']
    runs = groupby(range(len(lengths)), key=lambda i: names.get(lengths[i], ""))
    for name, indices in runs:
        run = list(indices)
        if not name:
            continue
        start, end = edges[run[0]], edges[run[-1] + 1]
        where = format_length(lengths[run[0]]) + (f" to {format_length(lengths[run[-1]])}" if len(run) > 1 else "")
        parts.append(
            f'<g class="{kernel_class(name)}"><rect class="block" x="{start + 1:.1f}" y="{top:.1f}" '
            f'width="{end - start - 2:.1f}" height="{STRIP_HEIGHT}" rx="3">'
            f"<title>{escape(f'{label} {where}: {name}')}</title></rect>"
        )
        if len(name) * CHARACTER_WIDTH <= end - start - 6:
            parts.append(
                f'<text class="on-block" x="{(start + end) / 2:.1f}" y="{top + 12.5:.1f}" text-anchor="middle">'
                f"{escape(name)}</text>"
            )
        parts.append("</g>")
    return "".join(parts)


def _describe(series: Sequence[Series], strips: Sequence[tuple[str, Sequence[tuple[int, str]]]]) -> str:
    told = [
        f"{s.name}: "
        + ", ".join(f"{format_factor(p.value)} the tuned time at {format_length(p.seq_len)}" for p in s.points)
        for s in series
    ]
    told += [
        f"{label} kernel: " + ", ".join(f"{name} at {format_length(n)}" for n, name in cells) for label, cells in strips
    ]
    return ". ".join(told)
