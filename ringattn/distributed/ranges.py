"""Named ranges around the messages of a program over several ranks, and around the waits for them."""

from __future__ import annotations

from typing import Any

from ringattn.runtime.ranges import name_methods, named

from .comm import NOTHING, Comm, Pending


def name_messages(owner: object, *methods: str) -> None:
    """Put ranges around methods of one object that start messages, and around the waits for these."""

    def naming(start: Any) -> Any:
        def run(*arguments: Any, **keywords: Any) -> Any:
            result = start(*arguments, **keywords)
            pending = result[0] if isinstance(result, tuple) else result
            assert isinstance(pending, Pending)
            if pending is not NOTHING and "wait" not in vars(pending):
                name_methods(pending, wait="wait")
            return result

        return run

    for method in methods:
        setattr(owner, method, naming(named("messages", getattr(owner, method))))


def with_named_messages(comm: Comm) -> Comm:
    """Return the messages of the same group, with ranges."""
    made = Comm(comm.group)
    name_messages(made, "exchange", "all_to_all")
    return made
