"""Calls of the replay buffer and the fetcher from the evaluator pool: repeated over a restart of theirs, bounded in all.

Invariant: every call made here may be repeated (it takes an id, or changes nothing the second time), so a lost acknowledgement
costs nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from pipeline.errors import StageFailed

R = TypeVar("R")
log = logging.getLogger("evaluator")

CALL_S = 60.0
ATTEMPTS = 5
PAUSE_S = 1.0


async def settled(what: str, call: Callable[[], Awaitable[R]], stage: str = "replay_buffer") -> R:
    """The call's answer. Raises StageFailed of that stage when it cannot be reached; its refusals pass as they are."""
    last: Exception | None = None
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(PAUSE_S * 2 ** (attempt - 1))
        try:
            async with asyncio.timeout(CALL_S):
                return await call()
        except (ConnectionError, TimeoutError) as error:
            log.warning("%s did not answer %s", stage, what, exc_info=error)
            last = error
    raise StageFailed(stage, f"no answer to {what} after {ATTEMPTS} tries: {last!r}") from last
