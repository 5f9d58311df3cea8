"""Calls that are made at the same moment travel together, and each answer comes back as soon as it is there.

A call between processes costs a millisecond, and a step makes hundreds. Invariant: every call ends, with its own answer, with its
own exception, or with the fault that took the whole request.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import pickle
import traceback
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pipeline.errors import RemoteTraceback, StageFailed
from pipeline.evaluator.nursery import cancel_when_left
from pipeline.pickling import by_fields


@by_fields
@dataclass(frozen=True, slots=True)
class Answer:
    number: int
    """Place of the call in its request."""
    value: Any = None
    error: BaseException | None = None
    trace: str = ""

    def settle(self, future: asyncio.Future[Any]) -> None:
        if future.done():
            return
        if self.error is None:
            future.set_result(self.value)
        else:
            self.error.__cause__ = RemoteTraceback(self.trace)
            future.set_exception(self.error)


Call = tuple[Any, ...]
Carrier = Callable[[list[Call]], AsyncIterator[Sequence[Answer]]]
"""Takes the arguments of several calls to where they are answered, and yields the answers as they come."""
GATHER_S = 0.002
"""An answer waits this long for others, unless it is the last: sending one costs both processes about a millisecond."""
LARGE_BYTES = 16 * 1024
"""An array of more is not copied where it can travel beside the block."""


def pack(parts: Sequence[Any], beside: list[pickle.PickleBuffer] | None = None) -> bytes:
    """Calls or answers as one block, for `pickle.loads`: Ray would carry each of their hundreds of small arrays by itself.

    beside: takes what is not copied into the block, above all large arrays, for `loads(..., buffers=...)`.
    """
    block = io.BytesIO()
    pickler = pickle.Pickler(block, pickle.HIGHEST_PROTOCOL, buffer_callback=None if beside is None else beside.append)
    pickler.dispatch_table = {np.ndarray: _array}
    pickler.dump(parts)
    return block.getvalue()


def _array(array: np.ndarray) -> tuple[Any, ...]:
    """A small one as numpy does it, though without its call in Python for each that is read."""
    if array.nbytes > LARGE_BYTES or array.ndim != 1 or not array.size or array.dtype.kind not in "iuf":
        return array.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    return np.frombuffer, (bytearray(array), array.dtype)


class Multiplexer:
    """The caller's side. lanes: requests that what is waiting is spread over, for example one a replica."""

    def __init__(self, carry: Carrier, lanes: int = 1) -> None:
        self._carry = carry
        self._lanes = lanes
        self._waiting: list[tuple[Call, asyncio.Future[Any]]] = []
        self._requests: set[asyncio.Task[None]] = set()

    async def call(self, *arguments: Any) -> Any:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if not self._waiting:
            loop.call_soon(self._send)
        self._waiting.append((arguments, future))
        return await future

    def _send(self) -> None:
        waiting = [entry for entry in self._waiting if not entry[1].done()]
        self._waiting = []
        for lane in range(min(self._lanes, len(waiting))):
            part = waiting[lane :: self._lanes]
            request = asyncio.create_task(self._request(part), name=f"request of {len(part)} calls")
            self._requests.add(request)
            request.add_done_callback(self._requests.discard)
            cancel_when_left(request, [future for _, future in part])

    async def _request(self, part: list[tuple[Call, asyncio.Future[Any]]]) -> None:
        try:
            async for answers in self._carry([arguments for arguments, _ in part]):
                for answer in answers:
                    answer.settle(part[answer.number][1])
            fault: BaseException = ConnectionError("the request ended without an answer")
        except Exception as error:
            fault = error
        for _, future in part:
            if not future.done():
                future.set_exception(fault)


async def answers(calls: Sequence[Call], play: Callable[..., Awaitable[Any]]) -> AsyncIterator[list[Answer]]:
    """The other side: plays all calls at the same time, and yields what is done, together with what else is done by then."""
    done: list[Answer] = []
    more, last = asyncio.Event(), asyncio.Event()
    left = len(calls)

    def ended(number: int, task: asyncio.Task[Any]) -> None:
        nonlocal left
        left -= 1
        done.append(_answer(number, task))
        more.set()
        if not left:
            last.set()

    tasks = [asyncio.ensure_future(play(*arguments)) for arguments in calls]
    for number, task in enumerate(tasks):
        task.add_done_callback(partial(ended, number))
    try:
        while left or done:
            await more.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(GATHER_S):
                    await last.wait()
            more.clear()
            ready, done[:] = list(done), []
            yield ready
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _answer(number: int, task: asyncio.Future[Any]) -> Answer:
    if task.cancelled():
        return failure(number, StageFailed("remote", "the call was cancelled where it was answered"))
    error = task.exception()
    return Answer(number, task.result()) if error is None else failure(number, error)


def failure(number: int, error: BaseException) -> Answer:
    """The error as it can travel, with its traceback as text."""
    trace = "".join(traceback.format_exception(error))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        error = StageFailed("remote", f"{type(error).__name__}: {error}")
    return Answer(number, error=error, trace=trace)
