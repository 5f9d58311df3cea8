"""One evaluator a batch: it holds the batch's tokens, and hands one to each sample from init until cleanup has ended.

Invariant: no more samples run than there are tokens (at most the spec's concurrency); a token goes back to the pool as soon as no
sample of the batch will need it, and all of them do, however the batch ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from pipeline.evaluator.nursery import together
from pipeline.evaluator.placement import PlacementPool
from pipeline.evaluator.spec import PlacementToken
from pipeline.records import Task

R = TypeVar("R")


class LocalPool:
    """The tokens of one admitted batch. Whoever asks first is served first, all or nothing."""

    def __init__(self, tokens: Sequence[PlacementToken], placement: PlacementPool) -> None:
        self._free = list(tokens)
        self._owned = Counter(tokens)
        self._placement = placement
        self._waiting: deque[tuple[int, asyncio.Future[list[PlacementToken]]]] = deque()

    @property
    def size(self) -> int:
        """Tokens of the batch, free or out."""
        return self._owned.total()

    async def take(self, count: int) -> list[PlacementToken]:
        if count > self.size:
            raise ValueError(f"{count} tokens asked of a batch that holds {self.size}")
        future: asyncio.Future[list[PlacementToken]] = asyncio.get_running_loop().create_future()
        self._waiting.append((count, future))
        self._serve()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.give(future.result())
            self._serve()
            raise

    def give(self, tokens: Sequence[PlacementToken]) -> None:
        self._free.extend(tokens)
        self._serve()

    def shrink(self, needed: int) -> None:
        """No more than `needed` tokens will be used from now on: the free ones above that go back to the pool."""
        surplus = min(len(self._free), self.size - needed)
        if surplus > 0:
            back, self._free = self._free[:surplus], self._free[surplus:]
            self._owned.subtract(back)
            self._placement.release(back)

    def close(self) -> None:
        """Everything back to the pool: nothing of the batch runs any more, whether or not it could give its tokens back."""
        back, self._free = list(self._owned.elements()), []
        self._owned.clear()
        self._placement.release(back)

    def _serve(self) -> None:
        while self._waiting and (self._waiting[0][1].done() or self._waiting[0][0] <= len(self._free)):
            count, future = self._waiting.popleft()
            if not future.done():
                future.set_result(self._free[:count])
                self._free = self._free[count:]


class Evaluator:
    """Runs the tasks of one batch at the same time, as far as tokens go."""

    def __init__(self, tokens: Sequence[PlacementToken], placement: PlacementPool) -> None:
        self.local = LocalPool(tokens, placement)

    async def run(
        self,
        tasks: Sequence[Task],
        roll: Callable[[Task, LocalPool], Awaitable[R]],
        on_task_done: Callable[[Task, R], None],
    ) -> None:
        """`on_task_done` is told of each task as soon as it has ended; the first exception of `roll` ends the batch."""
        unfinished = {task.ordinal: task.samples for task in tasks}

        async def one(task: Task) -> None:
            outcome = await roll(task, self.local)
            del unfinished[task.ordinal]
            self.local.shrink(sum(unfinished.values()))
            on_task_done(task, outcome)

        try:
            await together((f"group {task.ordinal}", one(task)) for task in tasks)
        finally:
            self.local.close()
