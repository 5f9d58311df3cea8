"""Tells the scoring stage that there is work. Best effort: the backlog is in the ledger, and the stage looks there by itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

log = logging.getLogger("evaluator")

CALL_S = 5.0


class WakeUp:
    """Calling it never waits and never fails. Calls that arrive while one is under way become one more."""

    def __init__(self, submit: Callable[[], Awaitable[None]]) -> None:
        self._submit = submit
        self._wanted = False
        self._task: asyncio.Task[None] | None = None

    def __call__(self) -> None:
        self._wanted = True
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run(), name="wake the scorer")

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        while self._wanted:
            self._wanted = False
            try:
                async with asyncio.timeout(CALL_S):
                    await self._submit()
            except Exception:
                log.warning("the scorer did not hear of new work; it will find it by itself", exc_info=True)
