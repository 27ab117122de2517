"""One pool of ranks per world size for all tests, made anew only after a test broke it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from pool import Pool

_pools: dict[int, Pool] = {}


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[[int], Pool]]:
    """``ranks(world)`` is the pool of that size."""

    def of(world: int) -> Pool:
        if world not in _pools or not _pools[world].alive:
            _pools[world] = Pool(world)
        return _pools[world]

    yield of
    for pool in _pools.values():
        pool.stop()
    _pools.clear()
