"""State of a cell in a search, which its workers read to agree on what is left to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ringattn.workload import Tunables


@dataclass(frozen=True, slots=True)
class CellStatus:
    """State of one cell, kept by who holds the lease on it.

    ``settled``: its default is known, and so is ``need_s``, what a search of it would take in the three parts of a
    ``CellNeed``. ``left``: it got no result in this ``run``, and may get one in the next. ``standing`` and ``nearby``
    are the plans of earlier profiles on the node that met the cell first: all nodes search the same space.
    """

    standing: tuple[Tunables, ...] = ()
    nearby: tuple[Tunables, ...] = ()
    state: Literal["open", "settled", "left", "done"] = "open"
    run: int = -1
    need_s: tuple[float, ...] = ()

    def over_in(self, run: int) -> bool:
        """Return whether nobody works on the cell any more in this run."""
        return self.state == "done" or (self.state == "left" and self.run == run)

    def settled_in(self, run: int) -> bool:
        """Return whether a worker of this run knows its default."""
        return self.state == "settled" and self.run == run and len(self.need_s) == 3
