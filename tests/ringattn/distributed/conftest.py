"""Ranks that tests share, and some that a test may break."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from faults import TIMEOUT_S
from pool import Pool
from shared_ranks import ranks

__all__ = ["ranks"]


@pytest.fixture
def fragile() -> Iterator[Pool]:
    """Three ranks that a test may break."""
    pool = Pool(3, TIMEOUT_S)
    yield pool
    pool.kill()
