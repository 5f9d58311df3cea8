"""Blocking work outside the event loop, in many small pieces: handing one over to a thread costs more than most verifiers do.

Invariant: every piece that is asked for is done, by one of a few threads, and its result or exception reaches who asked. A piece
that takes long holds up one thread, and the others do what waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

THREADS = 8


@dataclass(slots=True, eq=False)
class _Piece:
    future: asyncio.Future[Any]
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    value: Any = None
    error: BaseException | None = None

    def do(self) -> None:
        try:
            self.value = self.function(*self.arguments)
        except BaseException as error:  # it is the caller's
            self.error = error

    def settle(self) -> None:
        if self.future.done():  # who asked went away
            return
        if self.error is None:
            self.future.set_result(self.value)
        else:
            self.future.set_exception(self.error)


class Offload:
    """`await offload(function, *arguments)`, in place of `asyncio.to_thread`, from one event loop. What is asked for at the same
    moment is handed over together, and so are results."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(THREADS, "offload")
        self._idle = THREADS
        self._waiting: deque[_Piece] = deque()
        self._done: deque[_Piece] = deque()
        self._told = False

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        piece = _Piece(loop.create_future(), function, arguments)
        self._waiting.append(piece)
        self._start(loop)
        return await piece.future

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        """At most a thread for each piece that waits."""
        if self._idle and THREADS - self._idle < len(self._waiting):
            self._idle -= 1
            self._threads.submit(self._work, loop)

    def _work(self, loop: asyncio.AbstractEventLoop) -> None:
        """A thread, until nothing waits."""
        while self._waiting:
            try:
                piece = self._waiting.popleft()
            except IndexError:  # another thread was faster
                break
            piece.do()
            self._done.append(piece)
            if not self._told:
                self._told = True
                loop.call_soon_threadsafe(self._settle)
        loop.call_soon_threadsafe(self._ended, loop)

    def _settle(self) -> None:
        self._told = False  # before looking: what is done afterwards tells again
        while self._done:
            self._done.popleft().settle()

    def _ended(self, loop: asyncio.AbstractEventLoop) -> None:
        self._idle += 1
        if self._waiting:  # it came when the thread had looked
            self._start(loop)
