"""Threads beside Ray's own.

Invariant: a blocking call of Ray leaves its caller free to go on, and to end, although the call never returns.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
SWITCH_S = 0.0005


def take_turns() -> None:
    """For the process that calls it: Ray carries each request and answer in threads of its own, in several steps; each step would
    wait the interpreter's 5 ms for a loop or an engine that computes."""
    sys.setswitchinterval(SWITCH_S)


def begun(function: Callable[..., T], *args: Any, **kwargs: Any) -> Future[T]:
    """The call, begun in a thread that nobody joins."""
    result: Future[T] = Future()
    result.set_running_or_notify_cancel()  # from here on, a caller that gives up leaves the call alone

    def call() -> None:
        try:
            value = function(*args, **kwargs)
        except BaseException as error:
            result.set_exception(error)
        else:
            result.set_result(value)

    threading.Thread(target=call, name=f"begun {getattr(function, '__name__', function)}", daemon=True).start()
    return result


async def in_thread(function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """As `asyncio.to_thread`, in such a thread: a call that waits for a Ray whose services have died may wait for ever, and a loop
    waits at its end for the threads of its executor."""
    return await asyncio.wrap_future(begun(function, *args, **kwargs))
