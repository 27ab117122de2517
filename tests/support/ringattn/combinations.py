"""A few of all combinations of parameters in which any few of them meet (a covering array)."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any


def _anything(*_: Any) -> bool:
    return True


def _meetings(of: int, numbers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield the places and numbers of any ``of`` values of a combination, which has them by their numbers."""
    for places in combinations(range(len(numbers)), of):
        yield (*places, *(numbers[place] for place in places))


def covering(of: int, *parameters: Sequence[Any], allowed: Callable[..., bool] = _anything) -> list[tuple[Any, ...]]:
    """Return allowed combinations, few, such that whatever values ``of`` of the parameters have together are in one.

    Values that no allowed combination has together are in none. The same on every machine: each is the first of those
    that add the most.
    """
    every = [
        numbers
        for numbers in product(*(range(len(values)) for values in parameters))
        if allowed(*(values[number] for values, number in zip(parameters, numbers, strict=True)))
    ]
    left = {meeting for numbers in every for meeting in _meetings(of, numbers)}
    # What a combination adds only falls as others are taken: the first whose count still holds adds the most.
    queue = [(-len(left), place) for place in range(len(every))]
    taken = []
    while left:
        count, place = heapq.heappop(queue)
        adds = left.intersection(_meetings(of, every[place]))
        if len(adds) == -count:
            taken.append(place)
            left -= adds
        elif adds:
            heapq.heappush(queue, (-len(adds), place))
    chosen = (every[place] for place in sorted(taken))
    return [tuple(values[number] for values, number in zip(parameters, numbers, strict=True)) for numbers in chosen]
