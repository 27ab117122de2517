"""What the ranks of a group say of a call that went wrong, and by what number they know a call that did not."""

from __future__ import annotations

import json
import sys
from typing import NamedTuple

from ringattn.errors import RingAttentionError

_KNOWN = "_ringattn_known"
_MOST_CALLS = 2**40  # of a module: a ticket of a million modules then fits in 63 bits

# Between what ranks tell of a call and the plan that each runs it by.
BY_THE_PLAN = ", by the plan "

Call = tuple[int, int]  # a module, and which of its calls


class PeerError(RingAttentionError):
    """Another rank failed or is gone: which one, and its reason."""


class SatOutError(PeerError):
    """The end of a call whose messages this rank exchanged for the others' sake."""


class Failure(NamedTuple):
    """An entry of the ledger: ``rank`` failed, as ``told_by`` says.

    ``moment`` is how many forwards and backwards it had ended before: ranks that fail in the same one each raise their
    own error, and must not raise the other's in a later call. ``missed`` is the call (module, number) that the rank did
    not begin.
    """

    rank: int
    told_by: int
    reason: str
    moment: int = sys.maxsize
    missed: Call | None = None

    @classmethod
    def read(cls, text: str | bytes) -> Failure:
        rank, told_by, reason, moment, missed = json.loads(text)
        return cls(rank, told_by, reason, moment, missed and (missed[0], missed[1]))

    def __str__(self) -> str:
        return f"rank {self.rank} {self.reason}"


def mark_known(error: BaseException) -> None:
    """Every rank raises this error, or knows of it."""
    vars(error)[_KNOWN] = True


def is_known(error: BaseException) -> bool:
    return _KNOWN in vars(error)


def ticket_of(module: int, call: int, *, backward: bool) -> int:
    """A number for one forward of a module, or for the backward that belongs to it. ``call`` counts its forwards."""
    return 2 * (module * _MOST_CALLS + call) + backward


def ticket_text(ticket: int) -> str:
    forward, backward = divmod(ticket, 2)
    module, call = divmod(forward, _MOST_CALLS)
    direction = "backward" if backward else "forward"
    return f"the {direction} of call {call} of the module that was built as number {module} on its group"
