"""The workers that are alive, and which of them runs what.

Invariant: a worker's death costs only what it was running; a worker that dies again and again without finishing anything in
between is given up, its node leaves the placement pool, and when all are given up the stage fails within bounded time.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.buffer.api import Attempt
from pipeline.errors import StageFailed
from pipeline.evaluator.nursery import each_to_its_end
from pipeline.evaluator.placement import PlacementPool
from pipeline.evaluator.spec import EvaluatorSpec, PlacementToken
from pipeline.evaluator.worker import GRACE_S, WorkerClient
from pipeline.records import Sample, StepContext, Task

log = logging.getLogger("evaluator")

STAGE = "evaluator_pool"
REVIVAL_S = 1.0
"""Before a worker that died is asked again; doubles with each death in a row."""
ANSWER_S = 30.0
"""For a worker's answer to arrive after the last deadline of what it runs."""


class WorkerLost(ConnectionError):
    """The worker died while it ran this; the attempt is lost, not failed."""


class NodeGone(ConnectionError):
    """The worker of the token's node was given up: the token is worth nothing any more."""


@dataclass(slots=True, eq=False)
class _Member:
    client: WorkerClient
    running: int = 0
    deaths: int = 0
    """In a row."""
    life: int = 0
    """Raised at each death, so that calls that fail together count as one."""
    not_before: float = 0.0
    given_up: bool = False


class Workers:
    """max_deaths: deaths in a row that a worker may have (`run.max_actor_restarts`)."""

    def __init__(
        self, clients: Sequence[WorkerClient], placement: PlacementPool, max_deaths: int, clock: Callable[[], float]
    ) -> None:
        self._members = [_Member(client) for client in clients]
        self._placement = placement
        self._max_deaths = max_deaths
        self._clock = clock
        self._last: BaseException | None = None
        self._bounds: Counter[float] = Counter()
        self.deaths = 0
        self.played = 0
        """Samples that came back, those of evaluations too."""

    @property
    def alive(self) -> int:
        return sum(not member.given_up for member in self._members)

    @property
    def running(self) -> int:
        return sum(member.running for member in self._members)

    @property
    def bound_s(self) -> float:
        """Seconds within which one of the calls that run comes back, whatever its samples do; 0 when none runs."""
        return max(+self._bounds, default=0.0)

    async def run(
        self,
        spec: EvaluatorSpec,
        task: Task,
        indices: Sequence[int],
        attempt: Attempt,
        context: StepContext,
        tokens: Sequence[PlacementToken],
    ) -> list[Sample]:
        """Samples in the order of the indices, each played where its token is.

        Raises WorkerLost, NodeGone, StageFailed (no worker is left), or what the worker raised.
        """
        by_node: dict[str | None, list[tuple[int, PlacementToken]]] = {}
        for index, token in zip(indices, tokens, strict=True):
            # what asks for nothing is bound to no node, and one group is best played by one worker
            bound = token.gpu or token.cpu or token.memory_gb or token.custom
            by_node.setdefault(token.node if bound else None, []).append((index, token))
        parts = [(self._least_busy(node), units) for node, units in by_node.items()]
        samples: dict[int, Sample] = {}

        async def part(member: _Member, units: list[tuple[int, PlacementToken]]) -> None:
            for sample in await self._ask(member, spec, task, units, attempt, context):
                samples[sample.index] = sample

        await each_to_its_end(
            (f"samples of {task.ordinal} on {member.client.node}", part(member, units)) for member, units in parts
        )
        missing = [index for index in indices if index not in samples]
        if missing:
            raise RuntimeError(f"the worker returned no sample {missing} of ordinal {task.ordinal}")
        return [samples[index] for index in indices]

    def _least_busy(self, node: str | None) -> _Member:
        """Of the node, or of all."""
        alive = [member for member in self._members if not member.given_up]
        if not alive:
            deaths = f"every evaluator worker died more than {self._max_deaths} times in a row (run.max_actor_restarts)"
            raise StageFailed(STAGE, f"{deaths}; the last one: {self._last}") from self._last
        here = alive if node is None else [member for member in alive if member.client.node == node]
        if not here:
            raise NodeGone(f"node {node} has no evaluator worker any more")
        return min(here, key=lambda member: member.running)

    async def _ask(
        self,
        member: _Member,
        spec: EvaluatorSpec,
        task: Task,
        units: list[tuple[int, PlacementToken]],
        attempt: Attempt,
        context: StepContext,
    ) -> list[Sample]:
        wait_s = member.not_before - self._clock()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        life, bound_s = member.life, spec.timeouts.total_s + spec.timeouts.cleanup_s + 2 * GRACE_S + ANSWER_S
        indices, tokens = [index for index, _ in units], [token for _, token in units]
        member.running += len(units)
        self._bounds[bound_s] += 1
        try:
            async with asyncio.timeout(bound_s):
                samples = await member.client.run_samples(task, indices, attempt, context, tokens)
        except (ConnectionError, TimeoutError) as error:
            self._died(member, life, error)
            raise WorkerLost(f"the evaluator worker on {member.client.node} is gone: {error!r}") from error
        finally:
            member.running -= len(units)
            self._bounds[bound_s] -= 1
        member.deaths = 0
        self.played += len(samples)
        return samples

    def _died(self, member: _Member, life: int, error: BaseException) -> None:
        if member.life != life or member.given_up:
            return
        member.life += 1
        member.deaths += 1
        self.deaths += 1
        self._last = error
        member.not_before = self._clock() + REVIVAL_S * 2 ** (member.deaths - 1)
        log.error("evaluator worker on %s died (%d in a row)", member.client.node, member.deaths, exc_info=error)
        if member.deaths > self._max_deaths:
            member.given_up = True
            if not any(other.client.node == member.client.node and not other.given_up for other in self._members):
                self._placement.set_up(member.client.node, False)
