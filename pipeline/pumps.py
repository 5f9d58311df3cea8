"""Pumps: long-lived asyncio tasks with a role, and the one place that decides whose end or failure counts.

Invariant: `supervise` leaves no task behind, and what it raises is the diagnosis: a monitor's before a downstream symptom.
"""

from __future__ import annotations

import asyncio
import enum
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.errors import StageFailed, root_cause

log = logging.getLogger(__name__)


class PumpKind(enum.Enum):
    MONITOR = "monitor"
    """Loops for ever; ending at all means that it failed."""
    PRODUCER = "producer"
    """May end; once all producers ended, the stages drain."""
    STAGE = "stage"
    """Ends when upstream ended and its backlog is empty."""
    TERMINAL = "terminal"
    """Awaited last; its return ends the supervision."""


@dataclass(frozen=True, slots=True)
class Pump:
    name: str
    kind: PumpKind
    run: Callable[[], Awaitable[Any]]
    drain: Callable[[], Awaitable[Any]] | None = None
    """STAGE: take nothing new, finish the backlog; `run` returns soon after."""


async def supervise(pumps: Sequence[Pump], *, cancel_s: float = 10.0, drain_s: float = 60.0) -> Any:
    """Run the pumps together and return the terminal pump's result.

    Without a terminal pump the end of all producers and stages is the end, and the result is None. Of what ended in one moment,
    monitors count first, then the terminal pump, then stages and producers in the order given. When all producers ended, the
    stages are drained, with the monitors armed; `drain_s` bounds what is left of it once the terminal pump has ended. When the
    terminal pump ends before its producers do, nobody wants their work any more: everything else is cancelled.

    Raises StageFailed (or a subclass that the pump raised itself) with the pump's own exception as its cause. Whatever
    happens, every task is cancelled and awaited for at most `cancel_s` seconds.
    """
    supervision = _Supervision(pumps, drain_s)
    try:
        return await supervision.watch()
    finally:
        await supervision.clear(cancel_s)


class _Supervision:
    def __init__(self, pumps: Sequence[Pump], drain_s: float) -> None:
        terminals = [pump for pump in pumps if pump.kind is PumpKind.TERMINAL]
        if not pumps or len(terminals) > 1:
            raise ValueError(f"supervise takes at least one pump and at most one terminal; got {[pump.name for pump in pumps]}")
        rank = {PumpKind.MONITOR: 0, PumpKind.TERMINAL: 1, PumpKind.STAGE: 2, PumpKind.PRODUCER: 2}
        self._pumps = sorted(pumps, key=lambda pump: rank[pump.kind])
        self._terminal = terminals[0] if terminals else None
        self._drain_s = drain_s
        self._tasks = {pump: asyncio.create_task(_run(pump.run), name=f"pump:{pump.name}") for pump in self._pumps}
        self._drains: dict[Pump, asyncio.Task[Any]] = {}
        self._deadline: float | None = None
        self._diagnosed: BaseException | None = None

    async def watch(self) -> Any:
        while True:
            for pump in self._pumps:
                self._raise_failure(pump)
            if self._upstream_ended() and not self._drains:
                self._start_draining()
            if self._finished():
                return self._tasks[self._terminal].result() if self._terminal else None
            await self._next_end()

    def _raise_failure(self, pump: Pump) -> None:
        for task in (self._tasks[pump], self._drains.get(pump)):
            if task is None or not task.done():
                continue
            if task.cancelled():
                raise StageFailed(pump.name, "cancelled itself") from asyncio.CancelledError(pump.name)
            error = task.exception()
            if error is not None:
                self._diagnosed = error
            if isinstance(error, StageFailed):
                raise error
            if error is not None:
                raise StageFailed(pump.name, root_cause(error)) from error
        if self._ended(pump) and pump.kind is PumpKind.MONITOR:
            raise StageFailed(pump.name, "a monitor ended, which it never may")
        if self._ended(pump) and pump.kind is PumpKind.STAGE and self._of(PumpKind.PRODUCER) and not self._upstream_ended():
            raise StageFailed(pump.name, "ended before its producers did")

    def _ended(self, pump: Pump) -> bool:
        return self._tasks[pump].done()

    def _of(self, *kinds: PumpKind) -> list[Pump]:
        return [pump for pump in self._pumps if pump.kind in kinds]

    def _upstream_ended(self) -> bool:
        producers = self._of(PumpKind.PRODUCER)
        return bool(producers) and all(self._ended(pump) for pump in producers)

    def _start_draining(self) -> None:
        for pump in self._of(PumpKind.STAGE):
            if pump.drain is not None:
                self._drains[pump] = asyncio.create_task(_run(pump.drain), name=f"drain:{pump.name}")

    def _finished(self) -> bool:
        """The terminal pump ended, and what drains has drained."""
        workers = self._of(PumpKind.PRODUCER, PumpKind.STAGE)
        if self._terminal is None:
            return (
                bool(workers) and all(self._ended(pump) for pump in workers) and all(task.done() for task in self._drains.values())
            )
        if not self._ended(self._terminal):
            return False
        draining = [pump for pump, task in self._drains.items() if not (task.done() and self._ended(pump))]
        if not draining or not self._upstream_ended():
            return True
        now = asyncio.get_running_loop().time()
        if self._deadline is None:
            self._deadline = now + self._drain_s
        if now >= self._deadline:
            raise StageFailed(draining[0].name, f"did not drain within {self._drain_s:g} s after the last pump had ended")
        return False

    async def _next_end(self) -> None:
        active = [task for task in self._all() if not task.done()]
        loop = asyncio.get_running_loop()
        timeout = None if self._deadline is None else max(0.0, self._deadline - loop.time())
        await asyncio.wait(active, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    def _all(self) -> Iterable[asyncio.Task[Any]]:
        return [*self._drains.values(), *self._tasks.values()]

    async def clear(self, cancel_s: float) -> None:
        """Cancel and await all; a failure beside the diagnosis is not raised, but it is not lost either."""
        active = [task for task in self._all() if not task.done()]
        for task in active:
            task.cancel()
        if active:
            _, stuck = await asyncio.wait(active, timeout=cancel_s)
            for task in stuck:
                log.error("%s did not end within %g s of its cancellation", task.get_name(), cancel_s)
        for task in self._all():
            error = task.exception() if task.done() and not task.cancelled() else None
            if error is not None and error is not self._diagnosed:
                log.warning("%s failed too", task.get_name(), exc_info=error)


async def _run(call: Callable[[], Awaitable[Any]]) -> Any:
    """As a coroutine, so that a `run` that raises before its first await still fails inside its task."""
    return await call()
