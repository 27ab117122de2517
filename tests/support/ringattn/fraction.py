"""A regular fraction of a full product of parameters (a fractional factorial design).

One combination in ``parts`` is in it: those of which the numbers of the values sum to a multiple of ``parts``. Whatever
values a few parameters have, the others complete them to a combination in it, as long as the numbers of the others
reach from 0 to ``parts - 1`` in sum. Of three parts, any two parameters of two values complete the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def fraction(parts: int, *parameters: Sequence[Any], others: int = 0) -> list[tuple[Any, ...]]:
    """Return the combinations in the fraction; ``others`` is the sum of the numbers of parameters that are given."""
    numbered = product(*(enumerate(values) for values in parameters))
    return [
        tuple(value for _, value in chosen)
        for chosen in numbered
        if (others + sum(number for number, _ in chosen)) % parts == 0
    ]


def missing(made: Sequence[tuple[Any, ...]], of: int, *parameters: Sequence[Any]) -> set[tuple[Any, ...]]:
    """Return the combinations of any ``of`` of the parameters that no combination in ``made`` has."""
    return {
        (*places, *values)
        for places in combinations(range(len(parameters)), of)
        for values in set(product(*(parameters[place] for place in places)))
        - {tuple(each[place] for place in places) for each in made}
    }
