"""What the ranks of a group say of a call that went wrong, and by what number they know a call that did not."""

from __future__ import annotations

import json
import sys
from typing import NamedTuple

from .errors import RingAttentionError

_KNOWN = "_ringattn_known"

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


def ticket_of(module: int, *, backward: bool) -> int:
    """A number for the forwards, or the backwards, of a module."""
    return 2 * module + backward


def ticket_text(ticket: int) -> str:
    module, backward = divmod(ticket, 2)
    return f"the {'backward' if backward else 'forward'} of the module that was built as number {module} on its group"
