"""Back end of a command, whose every answer is waited for so long and no longer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from ringattn.store.bounded import Answer, answered

from .backend import Backend

COMMAND_S = 30.0  # of one question: a listing of 20,000 objects takes 20 requests to S3, 5 s


@dataclass(frozen=True, slots=True)
class BoundedBackend:
    """Asks ``backend``; StoreError, naming the store, where it does not answer within ``limit_s``.

    What hangs in a client, or in the kernel for a file server that is gone, is left alone.
    """

    backend: Backend
    limit_s: float

    @property
    def url(self) -> str:
        return self.backend.url

    def names(self, folder: str) -> tuple[str, ...]:
        return self._answer(partial(self.backend.names, folder))

    def loose_files(self) -> tuple[str, ...]:
        return self._answer(self.backend.loose_files)

    def is_bare(self) -> bool:
        return self._answer(self.backend.is_bare)

    def read(self, name: str, limit: int) -> bytes:
        return self._answer(partial(self.backend.read, name, limit))

    def put(self, name: str, content: bytes) -> None:
        self._answer(partial(self.backend.put, name, content))

    def create(self, name: str, content: bytes) -> bool:
        return self._answer(partial(self.backend.create, name, content))

    def delete(self, name: str) -> None:
        self._answer(partial(self.backend.delete, name))

    def other_writers(self, folder: str) -> str:
        return self._answer(partial(self.backend.other_writers, folder))

    def lease_refusal(self) -> str:
        return self._answer(self.backend.lease_refusal)

    def _answer(self, question: Callable[[], Answer]) -> Answer:
        return answered(question, self.url, self.limit_s)
