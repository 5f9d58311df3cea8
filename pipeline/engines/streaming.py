"""What an engine says while it works on a call. Invariant: whoever stops listening has the work ended."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import numpy as np

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


class Hearing:
    """The lines of a server's stream as pieces. rooms: tokens that each sequence may say. tell: told each piece.

    Raises ValueError or KeyError for what cannot be.
    """

    def __init__(
        self, rooms: Mapping[str, int], stops: frozenset[int], vocab_size: int, tell: Callable[[list[Piece]], None]
    ) -> None:
        self._rooms, self._stops, self._vocab_size, self._tell = rooms, stops, vocab_size, tell
        self._said = dict.fromkeys(rooms, 0)
        self._open = set(rooms)
        self._version: int | None = None

    def hear(self, line: dict[str, Any]) -> None:
        if self._version is None:
            self._version = line["version"]
        elif line:
            self._piece(line["id"], np.asarray(line["token_ids"], np.int32))

    def reply(self) -> dict[str, Any]:
        """Behind the last line."""
        if self._open:
            raise ValueError(f"the stream ended before {sorted(self._open)[:3]} did")
        return {"version": self._version, "tokens": sum(self._said.values())}

    def _piece(self, request_id: str, tokens: np.ndarray) -> None:
        start = self._said[request_id]
        self._said[request_id] = end = start + len(tokens)
        if request_id not in self._open or end > self._rooms[request_id]:
            raise ValueError(f"{request_id}: {end} tokens, asked for 1..{self._rooms[request_id]}")
        if len(tokens) and not (0 <= tokens.min() and tokens.max() < self._vocab_size):
            raise ValueError(f"{request_id}: token ids outside the vocabulary of {self._vocab_size}")
        reason = None
        if len(tokens) and int(tokens[-1]) in self._stops:
            reason = "stop"
        elif end == self._rooms[request_id]:
            reason = "length"
        if reason is not None:
            self._open.discard(request_id)
        if len(tokens):
            self._tell([Piece(request_id, start, tokens, None, reason, self._version)])
