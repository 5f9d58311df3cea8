"""A scoring stage: keeps its scorers busy with what the buffer says is missing, and settles every group it took.

Invariant: the backlog is a query, never a memory of what was submitted; a group is in one call at a time, and leaves the stage
produced or dropped with its reason.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pipeline.buffer.api import BacklogItem, BufferClient, StageReport
from pipeline.config.stages import TeacherStage
from pipeline.errors import BreakerTripped, StageFailed, root_cause
from pipeline.records import Column
from pipeline.teacher.acknowledged import acknowledged
from pipeline.teacher.batches import take_batch
from pipeline.teacher.books import Books
from pipeline.teacher.lane import Lane, Outcome, Scorer, loop_time
from pipeline.teacher.reporting import stage_report

log = logging.getLogger(__name__)
Answer = TypeVar("Answer")

CLOCK_S = 1e-3
"""Less than this is now: a wait below the clock's resolution would spin."""
SWEEP_S = 1.0
"""A wake-up that was lost costs this much at most."""


class ScoringStage:
    """Dispatch, failure isolation and settlement for one field. `run` and `drain` are those of a STAGE pump.

    route: the name of the scorer of an item. capacity: groups that can be written at the same time (`buffer.capacity`).
    clock: seconds since the epoch, the buffer's.
    """

    def __init__(
        self,
        field: str,
        scorers: Sequence[Scorer],
        route: Callable[[BacklogItem], str],
        buffer: BufferClient,
        settings: TeacherStage,
        *,
        capacity: int,
        clock: Callable[[], float],
        actor: str = "",
    ) -> None:
        self.field = field
        self._lanes = {scorer.name: Lane(scorer, settings.call_timeout_s) for scorer in scorers}
        self._route, self._buffer, self._settings, self._capacity = route, buffer, settings, capacity
        self._clock, self._actor = clock, actor or field
        self._books = Books()
        self._calls: set[asyncio.Task[None]] = set()
        self._wake, self._ended = asyncio.Event(), asyncio.Event()
        self._failure: BaseException | None = None
        self._draining = self._cancelling = False
        self._urgent: Counter[int] = Counter()
        self._swept_at = -math.inf

    async def start(self) -> None:
        """What must hold before the first call; `run` awaits it."""

    def submit(self) -> None:
        """Wake up: something was written. Losing the call costs at most a second."""
        self._wake.set()

    async def run(self) -> None:
        """Until drained or cancelled. Raises StageFailed, BreakerTripped among them, and what `start` raises."""
        try:
            await self.start()
            while not self._cancelling:
                self._wake.clear()
                linger_s = await self._sweep()
                if self._draining and not self._books.held() and not self._calls:
                    return
                await self._sleep(min(linger_s, SWEEP_S))
                self._raise_failed_call()
            if self._calls:
                await asyncio.wait(self._calls)
                self._raise_failed_call()
        except BaseException as error:
            self._failure = error
            raise
        finally:
            await self._end_calls()
            self._ended.set()

    async def drain(self, step: int | None = None) -> None:
        """step: return when no group of it is pending, running or written. None: take nothing new from upstream, finish the
        backlog and end `run`. Raises what `run` failed with."""
        if step is None:
            self._draining = True
            await self._await_end()
            return
        self._urgent[step] += 1
        self._wake.set()
        try:
            while not await self._ask(lambda: self._buffer.wait_scored(step, SWEEP_S), f"wait_scored({step})"):
                if self._ended.is_set():
                    self._raise_failure()
                    raise StageFailed(self.field, f"ended before all groups of step {step} were scored")
        finally:
            self._urgent -= Counter([step])

    async def cancel(self) -> None:
        """Start nothing more, let running calls end under their deadlines, then end `run`. What waits stays written."""
        self._cancelling = True
        await self._await_end()

    # -- dispatch

    async def _sweep(self) -> float:
        """Query, and start what can start. Returns seconds until a lingering batch is due."""
        idle = any(lane.idle() for lane in self._lanes.values())
        if not idle and not self._draining and loop_time() - self._swept_at < SWEEP_S:
            return math.inf
        books, before = self._books, set(self._books.in_flight)
        items = await self._ask(lambda: self._buffer.backlog(self.field, self._capacity), "backlog")
        self._swept_at = loop_time()
        # A group that was settled while the query ran may still be in its answer: `before` keeps it out until the next one.
        books.observe([item for item in items if item.ordinal not in before and item.ordinal not in books.in_flight], loop_time())
        for item in list(books.waiting.values()):
            if item.stale:
                await self._drop(item.ordinal, "stale")
        return min((self._dispatch(name, lane) for name, lane in self._lanes.items()), default=math.inf)

    def _dispatch(self, name: str, lane: Lane) -> float:
        """Start a call on every idle replica while there is work that is due; seconds until more is due."""
        idle, linger_s = lane.idle(), math.inf
        for count, replica in enumerate(idle):
            items = self._for_replica(name, lane, replica)
            if not items:
                continue
            linger_s = self._linger_s(lane, items)
            if linger_s > CLOCK_S:
                break
            self._start(lane, replica, self._batch(lane, items, len(idle) - count))
            linger_s = math.inf
        lane.metrics.backlog = sum(self._lane_name(item) == name for item in self._books.waiting.values())
        return linger_s

    def _for_replica(self, name: str, lane: Lane, replica: int) -> list[BacklogItem]:
        """What waits for a scorer; a group's last call is not spent on the replica that failed it, if a better one is there."""
        avoid = {ordinal for ordinal, failed_on in self._books.alone.items() if failed_on == replica and lane.has_better(replica)}
        return [item for item in self._books.waiting.values() if self._lane_name(item) == name and item.ordinal not in avoid]

    def _lane_name(self, item: BacklogItem) -> str:
        name = self._route(item)
        if name not in self._lanes:
            raise StageFailed(self.field, f"group {item.ordinal} of dataset {item.dataset!r} asks for the unknown scorer {name!r}")
        return name

    def _batch(self, lane: Lane, items: list[BacklogItem], replicas: int) -> list[BacklogItem]:
        """Of the oldest step alone: rows of a later one would make the step that training waits for take longer."""
        if items[0].ordinal in self._books.alone:
            return items[:1]
        return take_batch(
            [item for item in items if item.step == items[0].step and item.ordinal not in self._books.alone],
            rows=lambda item: item.rows,
            tokens=lane.scorer.tokens,
            max_rows=self._settings.max_batch_rows,
            max_tokens=self._settings.max_batch_tokens,
            replicas=replicas,
        )

    def _linger_s(self, lane: Lane, items: list[BacklogItem]) -> float:
        """How long the oldest item may still wait for company; 0 or less when it is due."""
        if self._settings.linger_ms == 0 or self._draining or items[0].awaited or items[0].step <= max(self._urgent, default=0):
            return 0.0
        if items[0].ordinal in self._books.alone or len(self._batch(lane, items, 1)) < len(items):
            return 0.0
        if items[0].written_at <= lane.freed_at:
            return 0.0  # it waited for a busy scorer already
        return self._settings.linger_ms / 1000 - max(self._books.waited_s(item, loop_time()) for item in items)

    def _start(self, lane: Lane, replica: int, batch: list[BacklogItem]) -> None:
        lane.occupy(replica)
        lane.count_dispatch(batch, sum(self._books.waited_s(item, loop_time()) for item in batch))
        self._books.start(batch)
        name = f"{self.field}:{lane.scorer.name}:{replica}"
        task = asyncio.create_task(self._work(lane, replica, [item.ordinal for item in batch]), name=name)
        self._calls.add(task)
        task.add_done_callback(lambda _: self._wake.set())

    # -- one batch

    async def _work(self, lane: Lane, replica: int, ordinals: list[int]) -> None:
        last = self._books.alone.keys() & set(ordinals)
        try:
            try:
                groups = await self._ask(lambda: self._buffer.read(ordinals, columns=False), "read")
                outcome = await lane.attempt(groups, replica, again=not last) if groups else {}
            finally:
                lane.release(replica, self._clock())
            self._wake.set()  # the next call need not wait for the settlement of this one
            await self._settle(lane, replica, outcome, last)
            if len(groups) < len(ordinals):
                await asyncio.sleep(SWEEP_S)  # dropped meanwhile; if the buffer lists it all the same, do not spin
        finally:
            lane.metrics.in_flight -= len(ordinals)
            for ordinal in ordinals:
                self._books.in_flight.pop(ordinal, None)

    async def _settle(self, lane: Lane, replica: int, outcome: Outcome, last: set[int]) -> None:
        columns = [column for column in outcome.values() if isinstance(column, Column)]
        if columns:
            self._count_marks(await self._ask(lambda: self._buffer.mark_produced(columns), "mark_produced"))
            lane.metrics.groups += len(columns)
            lane.drops_in_a_row = 0
        for ordinal, error in outcome.items():
            if isinstance(error, Column) or self._cancelling:
                continue
            if ordinal in last:
                await self._give_up(lane, ordinal, error)
            else:
                self._books.alone[ordinal] = replica

    def _count_marks(self, marks: dict[int, str]) -> None:
        self._books.marks.update(marks.values())
        for ordinal, mark in marks.items():
            if mark in ("late", "unknown"):
                log.info("%s: the column of group %d came too late to count (%s)", self.field, ordinal, mark)
            self._books.settle(ordinal)

    async def _give_up(self, lane: Lane, ordinal: int, error: Exception) -> None:
        """Drop a group that failed alone; too many in a row are the scorer's own failure."""
        name, bound = lane.scorer.name, self._settings.max_consecutive_scoring_drops
        lane.metrics.drops += 1
        lane.drops_in_a_row += 1
        log.error("%s: group %d is dropped, scorer %s failed on it alone: %s", self.field, ordinal, name, root_cause(error))
        await self._drop(ordinal, f"scoring:{type(error).__name__}")
        if lane.drops_in_a_row >= bound:
            row = f"{lane.drops_in_a_row} groups in a row (teacher_stage.max_consecutive_scoring_drops {bound})"
            raise BreakerTripped(self.field, f"scorer {name!r} failed on {row}: {root_cause(error)}") from error

    async def _drop(self, ordinal: int, reason: str) -> None:
        await self._ask(lambda: self._buffer.discard(ordinal, reason), f"discard({ordinal})")
        self._books.marks["dropped"] += 1
        self._books.settle(ordinal)

    # -- ends

    async def _sleep(self, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(seconds, 0.0)):
                await self._wake.wait()
        except TimeoutError:
            return

    def _raise_failed_call(self) -> None:
        for task in [task for task in self._calls if task.done()]:
            self._calls.discard(task)
            task.result()

    async def _end_calls(self) -> None:
        for task in self._calls:
            task.cancel()
        for result in await asyncio.gather(*self._calls, return_exceptions=True):
            if isinstance(result, Exception):
                log.warning("%s: a call failed too", self.field, exc_info=result)
        self._calls.clear()

    async def _await_end(self) -> None:
        self._wake.set()
        await self._ended.wait()
        self._raise_failure()

    def _raise_failure(self) -> None:
        if isinstance(self._failure, StageFailed):
            raise self._failure
        if self._failure is not None:
            raise StageFailed(self.field, root_cause(self._failure)) from self._failure

    async def _ask(self, call: Callable[[], Awaitable[Answer]], what: str) -> Answer:
        return await acknowledged(call, stage=self.field, what=what)

    def report(self) -> StageReport:
        """See `reporting.stage_report`."""
        by_scorer = {name: [item for item in self._books.held() if self._route(item) == name] for name in self._lanes}
        return stage_report(self.field, self._actor, self._books, self._lanes, by_scorer, self._clock())
