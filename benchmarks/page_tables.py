"""Write the figures of README.md and docs/ from the committed results: what stands between two markers.

    python benchmarks/page_tables.py

A page holds ``<!-- begin: figures NAME -->`` and ``<!-- end: figures NAME -->``; what stands between them is made by
the function of that name in benchmarks/pages, from benchmarks/results alone. A ratio is the record's own, the median
of paired readings; it need not be the quotient of two medians.
"""

from __future__ import annotations

import re
from pathlib import Path

from pages import one_gpu, ranks, readme, tuner  # noqa: F401 - each enters its makers
from pages.records import FIGURES

ROOT = Path(__file__).resolve().parent.parent
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md", ROOT / "docs" / "concepts" / "probe.md")
BLOCK = re.compile(r"(<!-- begin: figures ([\w-]+) -->\n).*?(<!-- end: figures \2 -->)", re.DOTALL)


def rewritten(text: str) -> str:
    """Return the page with every block made anew; a name that is not one of FIGURES is a KeyError."""
    return BLOCK.sub(lambda found: f"{found[1]}{FIGURES[found[2]]()}{found[3]}", text)


def main() -> None:
    for page in PAGES:
        page.write_text(rewritten(page.read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
