"""Counts in messages: one of a thing is not several."""

from __future__ import annotations

import pytest
from machines import workload

from autotune.probe.request import VALIDATION_PENDING, CellReport
from ringattn.wording import plural


@pytest.mark.parametrize(
    ("count", "noun", "text"),
    [
        (0, "cell", "0 cells"),
        (1, "cell", "1 cell"),
        (2, "cell", "2 cells"),
        (1, "entry", "1 entry"),
        (2, "entry", "2 entries"),
        (1, "branch", "1 branch"),
        (3, "branch", "3 branches"),
        (2, "key/value head", "2 key/value heads"),
    ],
)
def test_plural(count: int, noun: str, text: str) -> None:
    assert plural(count, noun) == text


def test_a_report_says_that_validation_is_pending_beside_its_note() -> None:
    report = CellReport(workload(64), "default", note="noisy", validation_pending=True)
    assert report.text == f"noisy; {VALIDATION_PENDING}"
    assert CellReport(workload(64), "default").text == ""
