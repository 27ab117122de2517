"""Plans in a terminal: lines end between names, and nothing is lost."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autotune.report.wording.plan_text import longest_piece, pieces, wrapped

NAMES = st.text("abc-4=/", min_size=1, max_size=20)
PLANS = st.lists(st.lists(NAMES, min_size=1, max_size=4).map(",".join), min_size=1, max_size=5).map(" ".join)


@given(PLANS, st.integers(1, 60))
def test_lines_hold_the_whole_text_in_order_and_no_line_is_longer(text: str, width: int) -> None:
    lines = wrapped(text, width)
    assert "".join(lines).replace(" ", "") == text.replace(" ", "")
    assert max(map(len, lines)) <= width
    assert all(line == line.strip() for line in lines)


@given(PLANS, st.integers(0, 30))
def test_no_name_is_broken_where_the_longest_fits(text: str, more: int) -> None:
    lines = wrapped(text, longest_piece(text) + more)
    assert [piece.strip() for line in lines for piece in pieces(line)] == [piece.strip() for piece in pieces(text)]


@pytest.mark.parametrize(
    ("width", "lines"),
    [
        (60, ["flash-attn-4/cudnn,cudnn/cudnn bf16"]),
        (20, ["flash-attn-4/cudnn,", "cudnn/cudnn bf16"]),
        (14, ["flash-attn-4/", "cudnn,", "cudnn/cudnn", "bf16"]),  # the last resort but one: behind the slash
    ],
)
def test_an_example(width: int, lines: list[str]) -> None:
    assert wrapped("flash-attn-4/cudnn,cudnn/cudnn bf16", width) == lines
