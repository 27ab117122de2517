"""Effort and day of a row, which rows of several probes keep when they are merged. Plain data."""

from __future__ import annotations

import re
from dataclasses import dataclass

from ringattn.errors import FieldError


@dataclass(frozen=True, slots=True)
class RowOrigin:
    """Effort of the probe that measured a row, and its day (``YYYY-MM-DD``)."""

    effort: str = ""
    date: str = ""

    def __post_init__(self) -> None:
        check_date(self.date)


def check_date(date: str) -> None:
    """Raise FieldError, for the field ``date``, unless it is a day or empty."""
    if date and not re.fullmatch(r"\d{4}-\d{2}-\d{2}", date, re.ASCII):
        raise FieldError(f"is {date!r}; write YYYY-MM-DD", field="date")
