"""Client for stores on web servers that reads no more of an answer than a store may hold."""

from __future__ import annotations

from typing import Any

import aiohttp

MOST_BYTES = 16 * 2**20  # of one answer: a page that lists 20,000 files has 4 MiB, and files are fetched 5 MiB at once


class BoundedResponse(aiohttp.ClientResponse):
    """Answer of a server, of which ``MOST_BYTES`` are read: a page that never ends would fill the memory."""

    _whole: bytes | None = None

    async def read(self) -> bytes:
        """Return all that the server sends; ValueError where that is more than ``MOST_BYTES``."""
        if self._whole is None:
            read = bytearray()
            while chunk := await self.content.readany():
                read += chunk
                if len(read) > MOST_BYTES:
                    self.close()
                    raise ValueError(f"answers with more than {MOST_BYTES // 2**20} MiB")
            self._whole = bytes(read)
        return self._whole

    async def text(self, encoding: str | None = None, errors: str = "strict") -> str:
        """Return the same as text."""
        return (await self.read()).decode(encoding or self.charset or "utf-8", errors)


def bounded_client(configured: dict[str, Any]) -> dict[str, Any]:
    """Return what fsspec is to make its client of: what is ``configured`` for it, and answers that are bounded."""
    return {**configured.get("client_kwargs", {}), "response_class": BoundedResponse}
