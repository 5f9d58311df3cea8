"""The one thread that touches the model, and how busy it was.

Invariant: work that has begun is waited for, also when its caller is cancelled, so that nothing else touches the model meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class Worker:
    """clock: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.seconds: dict[str, float] = {}
        """Kind of work -> seconds, finished work only."""
        self._clock = clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trainer")
        self._since: float | None = None

    async def run(self, kind: str, function: Callable[..., T], *arguments: Any) -> T:
        self._since = begun = self._clock()
        future = asyncio.get_running_loop().run_in_executor(self._thread, function, *arguments)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.wait([future])
            raise
        finally:
            self._since = None
            self.seconds[kind] = self.seconds.get(kind, 0.0) + self._clock() - begun

    def running_s(self) -> float:
        """Age of the work in hand, 0 when there is none."""
        return 0.0 if self._since is None else self._clock() - self._since

    def busy_s(self) -> float:
        return sum(self.seconds.values()) + self.running_s()

    def close(self) -> None:
        self._thread.shutdown(wait=True)
