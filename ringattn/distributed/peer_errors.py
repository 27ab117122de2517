"""Errors of other ranks, and the sequence numbers by which ranks tell one call from another."""

from __future__ import annotations

import logging
from typing import NamedTuple

from ringattn.errors import RingAttentionError

logger = logging.getLogger("ringattn")

_KNOWN = "_ringattn_known"
_MOST_CALLS = 2**40  # of a module: a sequence number of a million modules then fits in 63 bits

# Separates the inputs of a call from its plan in the description that ranks compare.
BY_THE_PLAN = ", by the plan "


class PeerError(RingAttentionError):
    """Another rank failed or is gone: names the rank and its reason. The process group is aborted."""


class Failure(NamedTuple):
    """Reason why a group was aborted: the global ``rank`` at fault, and text that continues "rank 3 ..."."""

    rank: int
    reason: str

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


def mark_known(error: BaseException) -> None:
    """Mark an error that every rank raises or knows of."""
    vars(error)[_KNOWN] = True


def is_known(error: BaseException) -> bool:
    return _KNOWN in vars(error)


def sequence_number(module: int, call: int, *, backward: bool) -> int:
    """Return a number for one forward of a module, or for its backward. ``call`` counts the module's forwards."""
    return 2 * (module * _MOST_CALLS + call) + backward


def describe_sequence_number(number: int) -> str:
    forward, backward = divmod(number, 2)
    module, call = divmod(forward, _MOST_CALLS)
    direction = "backward" if backward else "forward"
    return f"the {direction} of call {call} of the module that was built as number {module} on its group"
