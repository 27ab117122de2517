"""Work that may never end, such as a question to a file server that is gone, waited for until a deadline."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ringattn.errors import StoreError

Answer = TypeVar("Answer")


ANSWER_S = 1.0


class NoAnswerYet(Exception):
    """The work had not ended at the deadline. It goes on in its thread, which ends with the process at the latest."""


class Pending(Generic[Answer]):
    """Work in a thread of its own, begun at once. A call that hangs in the kernel cannot be ended, only left alone."""

    def __init__(self, work: Callable[[], Answer]) -> None:
        self._work = work
        self._answers: list[Answer] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="ringtune-store", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answers.append(self._work())
        except BaseException as error:  # noqa: BLE001  raised where the answer is asked for
            self._error = error

    def answer(self, deadline_s: float) -> Answer:
        """Return the answer, or raise what the work raised; NoAnswerYet at ``deadline_s`` of ``time.monotonic()``."""
        self._thread.join(min(threading.TIMEOUT_MAX, max(0.0, deadline_s - time.monotonic())))
        if self._error is not None:
            raise self._error
        if not self._answers:
            raise NoAnswerYet
        return self._answers[0]


def answered(work: Callable[[], Answer], url: str, limit_s: float = ANSWER_S) -> Answer:
    """Return what a store answers, or raise what it raises; StoreError after ``limit_s``."""
    try:
        return Pending(work).answer(time.monotonic() + limit_s)
    except NoAnswerYet:
        raise StoreError(url, f"did not answer within {limit_s:g} s") from None
