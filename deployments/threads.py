"""Blocking calls of Ray. Invariant: the caller can go on, and end, although such a call never returns."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


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
