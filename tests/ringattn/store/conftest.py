"""Stores of tests answer, however busy the machine is; the limits are what tests of them set."""

from __future__ import annotations

import pytest
from patience import LIMIT_S

from ringattn.store import lookup


@pytest.fixture(autouse=True)
def _patient_with_stores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that was not read within a second was taken for one that is gone, under load."""
    monkeypatch.setattr(lookup, "ANSWER_S", LIMIT_S)
