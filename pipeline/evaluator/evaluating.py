"""Plays all samples of an evaluation as one stream, with one weight version.

Invariant: samples start in interleaved order; a sample is played again only for an infrastructure fault, with the same seed, so the
result does not depend on what runs beside it. Nothing is written to the buffer.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Collection, Sequence

from pipeline.buffer.api import Attempt
from pipeline.config.stages import Retries
from pipeline.errors import AdmissionError, StageFailed, is_infrastructure
from pipeline.evaluation.interleave import Unit, interleave
from pipeline.evaluation.summary import Played
from pipeline.evaluator.nursery import nursery
from pipeline.evaluator.placement import PlacementPool
from pipeline.evaluator.spec import EvaluatorSpec, PlacementToken
from pipeline.evaluator.workers import STAGE, NodeGone, WorkerLost, Workers
from pipeline.records import Sample, StepContext, Task, aborted_sample

POISON_AFTER = 5
"""Workers that may die under one sample before it is given up."""

OnSample = Callable[[Task, Sample], None]


class Evaluation:
    def __init__(self, specs: dict[str, EvaluatorSpec], placement: PlacementPool, workers: Workers, retries: Retries) -> None:
        self._specs = specs
        self._placement = placement
        self._workers = workers
        self._retries = retries

    async def play(
        self,
        tasks: Sequence[Task],
        version: int,
        on_sample: OnSample | None,
        done: Collection[tuple[int, int]] = (),
    ) -> list[Played]:
        """Every sample of every task, in interleaved order. Raises StageFailed when no worker is left.

        done: (ordinal, index) of samples that were played before; they are left out.
        """
        units = [(task, index) for task, index in interleave(tasks) if (task.ordinal, index) not in done]
        context = StepContext(step=version, min_version=version, exact_version=version, phase="eval")
        results: dict[tuple[int, int], Sample] = {}

        async def stream(spec: EvaluatorSpec, queue: deque[Unit]) -> None:
            while queue:
                await self._round(spec, queue, context, results, on_sample)

        async with nursery() as group:
            for task_type in dict.fromkeys(task.task_type for task in tasks):
                queue = deque(unit for unit in units if unit[0].task_type == task_type)
                group.create_task(stream(self._specs[task_type], queue), name=f"evaluate {task_type}")
        return [(task, results[task.ordinal, index]) for task, index in units]

    async def _round(
        self,
        spec: EvaluatorSpec,
        queue: deque[Unit],
        context: StepContext,
        results: dict[tuple[int, int], Sample],
        on_sample: OnSample | None,
    ) -> None:
        """One admission; it ends when the queue is empty, or early for tokens whose node is gone."""
        per_sample = spec.sample_resource
        count = min(spec.tokens_for(len(queue)), self._placement.capacity(per_sample))
        if count < 1:
            raise StageFailed(STAGE, f"no node that is alive holds a sample of spec {spec.evaluator_id!r}: {per_sample}")
        try:
            tokens = await self._placement.acquire(per_sample.times(count), per_sample, count)
        except AdmissionError:  # a node went while we waited; the next round asks for what the others hold
            return

        async def lane(token: PlacementToken) -> None:
            while queue:
                task, index = queue.popleft()
                try:
                    sample = await self._sample(spec, task, index, context, token)
                except NodeGone:
                    queue.appendleft((task, index))
                    return
                results[task.ordinal, index] = sample
                if on_sample is not None:
                    on_sample(task, sample)

        try:
            async with nursery() as group:
                for token in tokens:
                    group.create_task(lane(token), name=f"evaluate on {token.node}")
        finally:
            self._placement.release(tokens)

    async def _sample(self, spec: EvaluatorSpec, task: Task, index: int, context: StepContext, token: PlacementToken) -> Sample:
        failures = lost = 0
        while True:
            attempt = Attempt(task.ordinal, number=1, failures=0, epoch=0)
            try:
                (sample,) = await self._workers.run(spec, task, [index], attempt, context, [token])
            except WorkerLost as error:
                lost += 1
                if lost < POISON_AFTER:
                    continue
                return aborted_sample(
                    task.ordinal, index, [], abort_reason="infra_other", error=f"poison: {error}", phase="run", node=token.node
                )
            failures += 1
            again = sample.abort_reason is not None and is_infrastructure(sample.abort_reason)
            if not again or failures >= self._retries.infra:
                return sample
            await asyncio.sleep(self._retries.backoff_s * 2 ** (failures - 1))
