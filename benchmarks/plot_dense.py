"""Draw docs/dense.svg: what each kernel costs over length, on every card of which dense.py's figures are committed.

    python benchmarks/plot_dense.py [--output FILE]

The picture is made from benchmarks/results/*-dense.json alone: the same figures give the same bytes. It carries the
colours of the report for light and for dark pages.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from autotune.formats import escape  # noqa: E402
from autotune.report.charts import WIDTH, Point, Series, relative_chart  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "dense.svg"
CARDS = ("h100", "h200")
KERNELS = ("flash-attn-4", "cudnn", "triton", "flash", "efficient")  # not the mixed pair, which has no colour
WORK = re.compile(r"dense causal B1 S(?P<length>\d+) H16 D128 bf16 (?P<direction>forward\S*)")
CAPTION_HEIGHT, MARGIN = 40, 12


def picture(records: dict[str, dict[str, Any]]) -> str:
    """The SVG of the records of ``dense.py``, card by card from left to right."""
    charts = [_chart(card, record) for card, record in records.items()]
    height = max(int(match[1]) for chart in charts if (match := re.search(r'viewBox="0 0 \d+ (\d+)"', chart)))
    whole = (MARGIN + len(charts) * (WIDTH + MARGIN), CAPTION_HEIGHT + height + MARGIN)
    parts = []
    for number, (chart, record) in enumerate(zip(charts, records.values(), strict=True)):
        left, software = MARGIN + number * (WIDTH + MARGIN), record["machine"]["software"]
        versions = f"torch {software['torch']}, cuDNN {software['cudnn']}, flash-attn-4 {software['flash_attn.cute']}"
        parts.append(
            f'<text class="card" x="{left}" y="20">{escape(record["machine"]["device"])}</text>'
            f'<text x="{left}" y="34">{escape(versions)}</text>'
            f'<svg x="{left}" y="{CAPTION_HEIGHT}" width="{WIDTH}" height="{height}">{chart}</svg>\n'
        )
    style = files("autotune.report").joinpath("templates", "report.css").read_text("utf-8")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]} {whole[1]}">\n'
        f"<style>\n{style}svg .page {{ fill: var(--card); }}\n"
        "svg .card { font-size: 12px; font-weight: 600; fill: var(--ink); }\n</style>\n"
        f'<rect class="page" width="{whole[0]}" height="{whole[1]}" rx="10"/>\n{"".join(parts)}</svg>\n'
    )


def _chart(card: str, record: dict[str, Any]) -> str:
    """Forward and backward of each kernel over length, relative to the module; below, the module's own kernels."""
    times: dict[int, dict[str, float]] = {}
    strips: dict[str, list[tuple[int, str]]] = {"forward": [], "forward+backward": []}
    for row in record["rows"]:
        if not (work := WORK.fullmatch(row["work"])):
            continue
        length, kernels = int(work["length"]), row["plan"].split(": ")[1].split()[0]
        strips[work["direction"]].append((length, kernels.split("/")[-1]))
        if work["direction"] == "forward+backward":
            times[length] = row["ms"]
    series = []
    for kernel in KERNELS:
        ratios = [(length, ms[kernel] / ms["module"]) for length, ms in sorted(times.items())]
        series.append(Series(kernel, tuple(Point(length, ratio, ratio, ratio) for length, ratio in ratios)))
    title = f"{record['machine']['device']}: time of forward and backward, relative to RingAttention"
    below = (("forward", strips["forward"]), ("backward", strips["forward+backward"]))
    return relative_chart(card, title, series, below)


def committed() -> dict[str, dict[str, Any]]:
    return {card: json.loads((RESULTS / f"{card}-dense.json").read_text("utf-8")) for card in CARDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURE, help="file to write [default: docs/dense.svg]")
    parser.parse_args().output.write_text(picture(committed()), encoding="utf-8")


if __name__ == "__main__":
    main()
