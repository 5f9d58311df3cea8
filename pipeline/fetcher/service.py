"""The fetcher: gives a step its ordinals, and an ordinal its task. Keeps no cursor: what was assigned is in the ledger."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from pipeline.buffer.api import BufferClient, StageReport
from pipeline.config.schema import RunConfig
from pipeline.errors import CapacityFull
from pipeline.fetcher.catalog import Catalog
from pipeline.records import Task

CAPACITY_WAIT_S = 5.0
"""One wait for room in the buffer; the stall watchdog, and not this stage, says when waiting lasts too long."""


class Fetcher:
    """Every call can be repeated: the same step has the same ordinals, the same ordinal the same task."""

    def __init__(
        self,
        config: RunConfig,
        catalog: Catalog,
        buffer: BufferClient,
        *,
        call_timeout_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config = config
        self._catalog = catalog
        self._buffer = buffer
        self._call_timeout_s = call_timeout_s
        self._clock = clock
        self._assigned, self._given = _FirstSeen(), _FirstSeen()
        self._served: Counter[str] = Counter()
        self._waiting_since: float | None = None
        self._waiting_for: str | None = None
        self._busy_s = 0.0

    async def fetch(self, step: int) -> list[int]:
        """Ordinals of a step, in slot order; fewer than `tasks_per_step`, or none, mean that the data ends here."""
        count = self._config.rollout.tasks_per_step
        self._waiting_since = self._clock()
        try:
            while True:
                try:
                    async with asyncio.timeout(self._call_timeout_s):
                        assignments = await self._buffer.assign(step, count, self._catalog.limit)
                    break
                except CapacityFull:
                    self._waiting_for = "a training step to make room in the buffer"
                    async with asyncio.timeout(CAPACITY_WAIT_S + self._call_timeout_s):
                        await self._buffer.wait_capacity(count, CAPACITY_WAIT_S)
        finally:
            self._waiting_since = self._waiting_for = None
        ordinals = [assignment.ordinal for assignment in sorted(assignments, key=lambda assignment: assignment.slot)]
        self._assigned.note(ordinals)
        return ordinals

    def tasks(self, ordinals: Sequence[int]) -> list[Task]:
        """Tasks in the order of the ordinals."""
        started = self._clock()
        tasks = [self._catalog.task(ordinal) for ordinal in ordinals]
        first_seen = self._given.note(ordinals)
        self._served.update(task.dataset for task in tasks if task.ordinal in first_seen)
        self._busy_s += self._clock() - started
        return tasks

    async def replacement(self, ordinal: int) -> Task | None:
        """The task that takes a dropped ordinal's slot; None when its step is closed or the data ended."""
        async with asyncio.timeout(self._call_timeout_s):
            assignment = await self._buffer.replace(ordinal, self._catalog.limit)
        if assignment is None:
            return None
        self._assigned.note([assignment.ordinal])
        return self.tasks([assignment.ordinal])[0]

    def eval_tasks(self, reader: str | None = None) -> list[Task]:
        """Held-out tasks; reader: a teacher's alias, whose prompt holds its own solved examples before the task."""
        tasks = self._catalog.eval_tasks()
        shots = self._config.teachers[reader].shots if reader is not None else 0
        return [self._with_examples(task, shots) for task in tasks] if shots else tasks

    def _with_examples(self, task: Task, shots: int) -> Task:
        systems = tuple(message for message in task.messages if message[0] == "system")
        examples = self._catalog.shots(task.dataset, shots)
        return replace(task, messages=systems + examples + task.messages[len(systems) :])

    def report(self) -> StageReport:
        waited = 0.0 if self._waiting_since is None else self._clock() - self._waiting_since
        return StageReport(
            stage="fetcher",
            actor="Fetcher",
            pid=os.getpid(),
            node=os.uname().nodename,
            started=self._assigned.count,
            finished=sum(self._served.values()),
            backlog=int(self._waiting_since is not None),
            oldest_s=waited,
            busy_s=self._busy_s,
            detail={"limit": self._catalog.limit, "served": dict(self._served), "waiting_for": self._waiting_for},
        )


class _FirstSeen:
    """Counts ordinals once. The ledger gives them out in rising order, so the highest one tells: nothing is kept of each. One that
    two concurrent calls bring in the other order is left out, of a figure for people."""

    def __init__(self) -> None:
        self._highest = -1
        self.count = 0

    def note(self, ordinals: Iterable[int]) -> set[int]:
        """Those that are new."""
        new = {ordinal for ordinal in ordinals if ordinal > self._highest}
        self._highest = max(new, default=self._highest)
        self.count += len(new)
        return new
