"""Engines of models beside the live one, made when they are asked for.

Invariant: at most `capacity` idle engines stay; one that is in use is never closed, and two callers of one model share its engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from pipeline.engines.base import Engine
from pipeline.service.models import weights_key

Key = tuple[tuple[tuple[int, int, int], ...], int]


@dataclass(slots=True, eq=False)
class _Entry:
    opening: asyncio.Task[Engine]
    users: int = 0


class LoadedEngines:
    """opens: (folder, version) -> engine; blocking, run in a thread."""

    def __init__(self, opens: Callable[[Path, int], Engine], capacity: int) -> None:
        self._opens, self._capacity = opens, capacity
        self._entries: dict[Key, _Entry] = {}
        """Least recently used first."""

    @asynccontextmanager
    async def use(self, folder: Path, version: int) -> AsyncIterator[Engine]:
        """The engine of a model for one call. Raises what opening it raised; the next caller tries again."""
        key = (weights_key(folder), version)
        entry = self._entries.pop(key, None)
        if entry is None:
            entry = _Entry(asyncio.create_task(asyncio.to_thread(self._opens, folder, version), name=f"open {folder.name}"))
        self._entries[key] = entry
        entry.users += 1
        try:
            yield await asyncio.shield(entry.opening)
        finally:
            entry.users -= 1
            failed = entry.opening.done() and (entry.opening.cancelled() or entry.opening.exception() is not None)
            if failed and self._entries.get(key) is entry:
                del self._entries[key]
            await self._evict()

    async def close(self) -> None:
        for entry in list(self._entries.values()):
            await self._close(entry)
        self._entries.clear()

    async def _evict(self) -> None:
        idle = [key for key, entry in self._entries.items() if not entry.users and entry.opening.done()]
        surplus = max(0, len(self._entries) - self._capacity)
        going = [self._entries.pop(key) for key in idle[:surplus]]
        for entry in going:
            await self._close(entry)

    async def _close(self, entry: _Entry) -> None:
        try:
            engine = await entry.opening
        except Exception:  # whoever asked for it was told why it did not open
            return
        await engine.close()
