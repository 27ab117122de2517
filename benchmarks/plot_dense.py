"""Draw docs/dense.svg: what each kernel costs over length, on every card of which dense.py's figures are committed.

    python benchmarks/plot_dense.py [--output FILE]

The picture is made from benchmarks/results/*-dense.json alone: the same figures give the same bytes. It carries the
colours of the report for light and for dark pages.
"""

from __future__ import annotations

import argparse
import re
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

from pages.records import record as committed_record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from autotune.display_text import escape, format_factor, format_length  # noqa: E402
from autotune.report.pages.charts import WIDTH, Bar, bar_chart, color_class  # noqa: E402

PICTURE = ROOT / "docs" / "dense.svg"
CARDS = ("h100", "h200")
# Not the mixed pair, which has no colour.
SERIES = {"tuned": "module"} | {name: name for name in ("flash-attn-4", "cudnn", "triton", "flash", "efficient")}
WORK = re.compile(r"dense causal B1 S(?P<length>\d+) H16 D128 bf16 forward\+backward")
CAPTION_HEIGHT, MARGIN = 40, 12


def picture(records: dict[str, dict[str, Any]]) -> str:
    """Return the SVG of the records of ``dense.py``, card by card from left to right."""
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
    style = files("autotune.report.pages").joinpath("templates", "report.css").read_text("utf-8")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {whole[0]} {whole[1]}">\n'
        f"<style>\n{style}svg .page {{ fill: var(--card); }}\n"
        "svg .card { font-size: 12px; font-weight: 600; fill: var(--ink); }\n</style>\n"
        f'<rect class="page" width="{whole[0]}" height="{whole[1]}" rx="10"/>\n{"".join(parts)}</svg>\n'
    )


def _chart(card: str, record: dict[str, Any]) -> str:
    """Draw forward and backward of the module and of each kernel at each length, relative to the module."""
    groups = []
    for row in record["rows"]:
        if not (work := WORK.fullmatch(row["work"])):
            continue
        length = format_length(int(work["length"]))
        ratios = {name: row["ms"][kernel] / row["ms"]["module"] for name, kernel in SERIES.items()}
        tips = {
            name: f"{name}, {length}: {format_factor(ratio)} the time of RingAttention"
            for name, ratio in ratios.items()
        }
        groups.append((length, [Bar(name, color_class(name), ratio, tips[name]) for name, ratio in ratios.items()]))
    title = f"{record['machine']['device']}: time of forward and backward, relative to RingAttention"
    return bar_chart(card, title, groups, format_factor)


def committed() -> dict[str, dict[str, Any]]:
    return {card: committed_record(f"{card}-dense") for card in CARDS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=PICTURE, help="file to write [default: docs/dense.svg]")
    parser.parse_args().output.write_text(picture(committed()), encoding="utf-8")


if __name__ == "__main__":
    main()
