"""One scorer of a stage: its replicas, its calls with their deadlines, and what is counted of them.

Invariant: a replica has one call at a time, and a call ends within its deadline with an answer for every group.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

from pipeline.buffer.api import BacklogItem
from pipeline.errors import BadReply, EngineError, abort_reason, is_infrastructure
from pipeline.records import Column, Group

log = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Before the second try of a batch, and the first rest of a replica that failed twice; a rest doubles up to MAX_REST_S."""
MAX_REST_S = 30.0

Outcome = dict[int, Column | Exception]
"""ordinal -> its column, or why it has none."""


class Scorer(Protocol):
    """What turns groups into columns of one field: a teacher, a reward model."""

    name: str
    replicas: int

    def tokens(self, item: BacklogItem) -> int: ...

    async def score(self, groups: list[Group], replica: int) -> Outcome:
        """Raises what is the fault of the whole call; a group's own fault is its value in the outcome."""
        ...


@dataclass(slots=True)
class LaneMetrics:
    """Sums since the process started; rates and means are their differences."""

    calls: int = 0
    failed_calls: int = 0
    groups: int = 0
    """Groups whose column was produced."""
    batch_rows: int = 0
    batch_tokens: int = 0
    call_s: float = 0.0
    queue_wait_s: float = 0.0
    """Summed over dispatched groups."""
    dispatched: int = 0
    drops: int = 0
    backlog: int = 0
    """Groups that wait now."""
    in_flight: int = 0


class Lane:
    def __init__(self, scorer: Scorer, call_timeout_s: float) -> None:
        self.scorer = scorer
        self.metrics = LaneMetrics()
        self.drops_in_a_row = 0
        self.freed_at = -math.inf
        """When a call ended last, by the buffer's clock."""
        self._call_timeout_s = call_timeout_s
        self._busy_since: dict[int, float] = {}
        self._rests_until = dict.fromkeys(range(scorer.replicas), 0.0)
        self._faults = dict.fromkeys(range(scorer.replicas), 0)

    def idle(self) -> list[int]:
        """Replicas that may be called now: neither in a call nor at rest after a fault."""
        now = loop_time()
        return [replica for replica, until in self._rests_until.items() if replica not in self._busy_since and until <= now]

    def has_better(self, replica: int) -> bool:
        """Another replica whose last call did not end in an infrastructure fault, while this one's did."""
        return self._faults[replica] > 0 and any(faults == 0 for faults in self._faults.values())

    def busy(self) -> list[int]:
        return sorted(self._busy_since)

    def busy_s(self) -> float:
        """Seconds of work of all replicas together, the running calls included."""
        return self.metrics.call_s + sum(loop_time() - since for since in self._busy_since.values())

    def occupy(self, replica: int) -> None:
        self._busy_since[replica] = loop_time()

    def release(self, replica: int, clock_s: float) -> None:
        self.freed_at = clock_s
        self.metrics.call_s += loop_time() - self._busy_since.pop(replica)

    def count_dispatch(self, batch: Sequence[BacklogItem], waited_s: float) -> None:
        self.metrics.queue_wait_s += waited_s
        self.metrics.dispatched += len(batch)
        self.metrics.in_flight += len(batch)
        self.metrics.batch_rows += sum(item.rows for item in batch)
        self.metrics.batch_tokens += sum(self.scorer.tokens(item) for item in batch)

    async def attempt(self, groups: list[Group], replica: int, *, again: bool) -> Outcome:
        """One call, and one more of the same batch when an infrastructure fault ended the first and `again` allows it."""
        outcome, fault = await self._call(groups, replica)
        if fault is not None and again:
            await asyncio.sleep(PAUSE_S)
            outcome, fault = await self._call(groups, replica)
        self._faults[replica] = 0 if fault is None else self._faults[replica] + 1
        if fault is not None:
            self._rests_until[replica] = loop_time() + min(PAUSE_S * 2.0 ** (self._faults[replica] - 1), MAX_REST_S)
        return outcome

    async def _call(self, groups: list[Group], replica: int) -> tuple[Outcome, Exception | None]:
        """The outcome, and the infrastructure fault if that is what ended the call."""
        ordinals = [group.ordinal for group in groups]
        self.metrics.calls += 1
        try:
            outcome = await self._bounded(groups, replica)
        except Exception as error:
            self.metrics.failed_calls += 1
            log.warning("scorer %s, replica %d: the call for groups %s failed: %r", self.scorer.name, replica, ordinals, error)
            return dict.fromkeys(ordinals, error), error if is_infrastructure(abort_reason(error)) else None
        silence = BadReply(f"scorer {self.scorer.name} gave no answer for the group")
        return {ordinal: outcome.get(ordinal, silence) for ordinal in ordinals}, None

    async def _bounded(self, groups: list[Group], replica: int) -> Outcome:
        deadline = asyncio.timeout(self._call_timeout_s)
        try:
            async with deadline:
                return await self.scorer.score(groups, replica)
        except TimeoutError:
            if not deadline.expired():
                raise
        except asyncio.CancelledError as leaked:
            if _being_cancelled():
                raise
            raise EngineError("the engine cancelled the call by itself") from leaked
        raise TimeoutError(f"no answer within teacher_stage.call_timeout_s {self._call_timeout_s:g}")

    def report(self) -> dict[str, Any]:
        return asdict(self.metrics)


def loop_time() -> float:
    return asyncio.get_running_loop().time()


def _being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
