"""What an engine says while it works on a call. Invariant: whoever stops listening has the work ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from pipeline.engines.base import Piece


async def heard(work: Callable[[], Awaitable[Any]], pieces: asyncio.Queue[list[Piece] | None]) -> AsyncIterator[list[Piece]]:
    """What the work puts into `pieces`; what came meanwhile, together. Raises what the work raises."""
    task = asyncio.ensure_future(work())
    task.add_done_callback(lambda _: pieces.put_nowait(None))
    more = True
    try:
        while more:
            found = [await pieces.get()]
            while not pieces.empty():
                found.append(pieces.get_nowait())
            more = None not in found
            told = [piece for part in found if part is not None for piece in part]
            if told:
                yield told
        await task
    finally:
        task.cancel()
        await asyncio.wait({task})
