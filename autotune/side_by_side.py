"""A few steps at a time in threads, for work that waits outside the interpreter."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType


class SideBySide:
    """Up to ``count`` steps at once. The first that fails is raised from ``run`` or at the end, after all others."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._threads = ThreadPoolExecutor(count)
        self._running: deque[Future[None]] = deque()

    def run(self, step: Callable[..., None], *args: object) -> None:
        """Starts a step once there is room; ``args`` are let go when it ends."""
        while len(self._running) >= self.count:
            self._running.popleft().result()
        self._running.append(self._threads.submit(step, *args))

    def __enter__(self) -> SideBySide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._threads.shutdown(wait=True)
        if error is None:
            for each in self._running:
                each.result()
