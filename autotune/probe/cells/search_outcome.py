"""Outcome of a search: what all of its workers write alike into their profiles, beside the rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from autotune.journal.sharing.lease import WHOLE
from autotune.journal.store import Store

OUTCOME = "outcome"
NOTES = "notes"  # of a worker


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """Facts of a whole search. ``elapsed_s`` is the time of all workers together, ``date`` an ISO date."""

    elapsed_s: float
    date: str
    notes: tuple[str, ...] = ()


def outcome_of(store: Store) -> SearchOutcome | None:
    """Return the outcome of a shared search that has come to its end. A search of one process has none to wait for."""
    found: SearchOutcome | None = store.recall(OUTCOME, SearchOutcome) if store.shared else None
    return found


def agreed_outcome(
    store: Store, notes: tuple[str, ...], elapsed_s: Callable[[], float], date: str, wait: Callable[[], None]
) -> SearchOutcome:
    """Return the outcome of the search: that of the first worker that finds no cell of it in work.

    ``notes`` are those of this worker, ``wait`` lets others go on.
    """
    store.worker.note(NOTES, list(notes))
    while (found := outcome_of(store)) is None:
        if not store.worker.take(WHOLE):
            wait()
            continue
        try:
            found = outcome_of(store)
            if found is None:
                every = (str(note) for noted in store.worker.noted(NOTES) for note in noted)
                found = SearchOutcome(round(elapsed_s(), 1), date, tuple(dict.fromkeys(every)))
                store.remember(OUTCOME, dataclasses.asdict(found))
            return found
        finally:
            store.worker.free(WHOLE)
    return found
