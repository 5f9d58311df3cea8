"""Calls that must reach another process: repeated until they are acknowledged, and never for longer than a deadline."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pipeline.errors import FencedOut, StageFailed

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

DEADLINE_S = 120.0
TRY_S = 30.0
"""One try; a reply that was lost must not use up the whole deadline."""


async def acknowledged(call: Callable[[], Awaitable[Answer]], *, stage: str, what: str) -> Answer:
    """The answer of an idempotent call. Raises StageFailed with the last error as its cause, and FencedOut at once."""
    last: Exception | None = None
    pause = 0.1
    try:
        async with asyncio.timeout(DEADLINE_S):
            while True:
                try:
                    async with asyncio.timeout(TRY_S):
                        return await call()
                except FencedOut:
                    raise
                except Exception as error:
                    last = error
                    log.warning("%s: %s failed, trying again in %.1f s: %r", stage, what, pause, error)
                await asyncio.sleep(pause)
                pause = min(2 * pause, 5.0)
    except TimeoutError as late:
        raise StageFailed(stage, f"{what} was not acknowledged within {DEADLINE_S:g} s") from (last or late)
