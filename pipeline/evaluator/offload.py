"""Blocking work outside the event loop, in many small pieces: handing one over to a thread costs more than most verifiers do.

Invariant: every piece that is asked for is done, by one of a few threads, and its result or exception reaches who asked. One thread
does what is quick; a piece that takes long holds it up, and another one does what waits.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

THREADS = 8
HELP_S = 0.005
"""When something has waited this long, another thread begins."""


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
        self._called = False
        self._help: asyncio.TimerHandle | None = None

    async def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        piece = _Piece(loop.create_future(), function, arguments)
        self._waiting.append(piece)
        if self._idle < THREADS:
            self._look_again(loop)
        elif not self._called:
            self._called = True
            loop.call_soon(self._begin, loop)
        return await piece.future

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        """The first thread, for all that was asked for in one pass of the loop."""
        self._called = False
        self._start(loop)

    def _look_again(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._help is None:
            self._help = loop.call_later(HELP_S, self._held_up, loop)

    def _held_up(self, loop: asyncio.AbstractEventLoop) -> None:
        self._help = None
        self._start(loop)

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._waiting and self._idle:
            self._idle -= 1
            self._threads.submit(self._work, loop)
            self._look_again(loop)

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
        self._start(loop)  # for what came when the thread had looked
