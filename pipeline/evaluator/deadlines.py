"""The deadlines of what is played together: one timer for all of them, because nearly all are met, and a timer each costs more than
most phases.

Invariant: as with `asyncio.timeout`, the task that is inside at its deadline is cancelled and leaves with TimeoutError; a
cancellation from elsewhere stays one.
"""

from __future__ import annotations

import asyncio
from types import TracebackType


class Deadline:
    """`with deadlines.within(seconds) as deadline: await ...`"""

    __slots__ = ("_all", "_cancelling", "_task", "expired", "until")

    def __init__(self, deadlines: Deadlines, until: float) -> None:
        self._all = deadlines
        self.until = until
        self.expired = False

    def __enter__(self) -> Deadline:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("a deadline is a task's")
        self._task, self._cancelling = task, task.cancelling()
        self._all.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._all.remove(self)
        if self.expired and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        self.expired = True
        self._task.cancel()


class Deadlines:
    """Of one event loop. Whoever makes it closes it."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._open: dict[Deadline, None] = {}
        self._timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float) -> Deadline:
        return Deadline(self, self._loop.time() + seconds)

    def add(self, deadline: Deadline) -> None:
        self._open[deadline] = None
        if self._timer is None or deadline.until < self._timer.when():
            self._set(deadline.until)

    def remove(self, deadline: Deadline) -> None:
        """The timer stays: it looks again when it rings."""
        del self._open[deadline]

    def close(self) -> None:
        """What begins after it has its deadline all the same."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, until: float) -> None:
        self.close()
        self._timer = self._loop.call_at(until, self._ring, until)

    def _ring(self, until: float) -> None:
        self._timer = None
        now = max(until, self._loop.time())
        for deadline in self._open:
            if deadline.until <= now and not deadline.expired:
                deadline.expire()
        ahead = [deadline.until for deadline in self._open if not deadline.expired]
        if ahead:
            self._set(min(ahead))
