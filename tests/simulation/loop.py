"""An event loop on virtual time in which a process can die at any callback.

Invariant: once a life has ended nothing of it runs any more: no callback, no timer, no `finally`, just as after SIGKILL. Given the
same decisions of the alarm, two runs execute the same callbacks in the same order.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import itertools
import selectors
from collections.abc import Callable, Coroutine
from typing import Any

LIFE: contextvars.ContextVar[Life | None] = contextvars.ContextVar("life", default=None)
"""The process in which a callback runs; None is the world around them, which never dies."""


class Life:
    """One incarnation of one process. Tasks started from its context belong to it, and theirs to it as well."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive = True
        self.tasks: list[Mortal] = []
        self.context = contextvars.Context()
        self.context.run(LIFE.set, self)

    def spawn(self, work: Coroutine[Any, Any, Any], name: str) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(work, name=name, context=self.context.copy())

    def end(self) -> None:
        self.alive = False

    def bury(self) -> None:
        """Free what the dead tasks hold. Their `finally` blocks run only here, when there is nothing left that they could harm."""
        self.alive = False
        for task in self.tasks:
            if not task.done():
                task._log_destroy_pending = False
                with contextlib.suppress(Exception):
                    task.get_coro().close()
        self.tasks.clear()


class Mortal(asyncio.Task):
    """Hashed by its number: sets of tasks are walked in the order of their creation, in every process alike."""

    def __init__(self, work: Coroutine[Any, Any, Any], loop: SimulationLoop, **options: Any) -> None:
        self._number = next(loop.numbers)  # before anybody can ask for the hash
        super().__init__(work, loop=loop, **options)

    def __hash__(self) -> int:
        return self._number

    def __eq__(self, other: object) -> bool:
        return self is other


class Stuck(Exception):
    """Everything waits for something that can never happen: no timer is left."""


class _Clock(selectors.DefaultSelector):
    """Instead of waiting it moves on. There are no threads and no sockets: nothing else could ever arrive."""

    now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Stuck("everything waits for something that can never happen")
        self.now += max(timeout, 0.0)
        return []


class SimulationLoop(asyncio.SelectorEventLoop):
    """ticks: callbacks of processes so far. `alarm` is called when they reach `alarm_at`, before that callback."""

    def __init__(self) -> None:
        self._virtual = _Clock()
        super().__init__(self._virtual)
        self.numbers = itertools.count()
        self.ticks = 0
        self.alarm_at: int | None = None
        self.alarm: Callable[[], None] = lambda: None
        self.set_task_factory(_mortal)

    def time(self) -> float:
        return self._virtual.now

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None) -> asyncio.Handle:
        context = contextvars.copy_context() if context is None else context
        life = context.get(LIFE)
        if life is None:
            return super().call_soon(callback, *args, context=context)
        return super().call_soon(self._live, life, callback, args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        context = contextvars.copy_context() if context is None else context
        life = context.get(LIFE)
        if life is None:
            return super().call_at(when, callback, *args, context=context)
        return super().call_at(when, self._live, life, callback, args, context=context)

    def _live(self, life: Life, callback: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if not life.alive:
            return
        self.ticks += 1
        if self.ticks == self.alarm_at:
            self.alarm()
            if not life.alive:
                return
        callback(*args)


def _mortal(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any], context: Any = None, **options: Any) -> Mortal:
    task = Mortal(work, loop=loop, context=context, **options)
    life = (contextvars.copy_context() if context is None else context).get(LIFE)
    if life is not None:
        life.tasks.append(task)
    return task
