"""Threads beside Ray's own, and how a process shares its interpreter and its memory among them.

Invariant: a blocking call of Ray leaves its caller free to go on, and to end, although the call never returns.
"""

from __future__ import annotations

import asyncio
import ctypes
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
SWITCH_S = 0.0005
KEPT_BYTES = 64 * 1024 * 1024
_MMAP_BYTES = 32 * 1024 * 1024
"""The most that glibc takes."""
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
"""Of glibc's malloc.h."""


def take_turns() -> None:
    """For the process that calls it: Ray carries each request and answer in threads of its own, in several steps; each step would
    wait the interpreter's 5 ms for a loop or an engine that computes."""
    sys.setswitchinterval(SWITCH_S)


def keep_memory() -> None:
    """For the process that calls it: what it frees, up to KEPT_BYTES, it has for what comes next. glibc gives the memory of a group
    back to the kernel, and each page that is asked for again costs as much as filling it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries decide for themselves
    if mallopt is not None:
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_TRIM_THRESHOLD, KEPT_BYTES)


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
