"""How a rank that fails in the middle of an exchange goes on with it: its steps end, its messages do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .comm import CommError

Result = TypeVar("Result")


class DrainedError(Exception):
    """A step failed, and every message of the call was exchanged all the same; ``error`` is what to raise."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Failsafe:
    """Runs steps until one fails; from then on none runs, so that what must still be sent can be sent.

    A rank that stopped in the middle of an exchange would leave the others waiting.
    """

    def __init__(self, report: Callable[[BaseException], None]) -> None:
        self._error: Exception | None = None
        self._report = report

    def run(self, step: Callable[..., Result], *args: object) -> Result | None:
        return None if self._error is not None else self.attempt(step, *args)

    def attempt(self, step: Callable[..., Result], *args: object) -> Result | None:
        """Runs a step that itself sends and receives, also after a failure; a lost peer ends it all the same."""
        try:
            return step(*args)
        except CommError:
            raise
        except Exception as error:  # noqa: BLE001  raised again by ``close``, after the last message
            self.fail(error.error if isinstance(error, DrainedError) else error)
            return None

    def fail(self, error: Exception) -> None:
        """What runs beside these steps failed."""
        if self._error is None:
            self._error = error
            self._report(error)

    def close(self) -> None:
        if self._error is not None:
            raise DrainedError(self._error) from self._error
