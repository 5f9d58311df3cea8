"""The evaluator pool: rolls out the batches of a step, and evaluates.

Invariant: rollout(step) can be repeated at any time and does only what the ledger says is missing. Steps and evaluations that
run at the same time share the placement pool and the workers, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pipeline.buffer.api import Assignment, BufferClient, StageReport
from pipeline.config.schema import RunConfig
from pipeline.errors import AdmissionError, RolloutError, StageFailed, root_cause
from pipeline.evaluation import details
from pipeline.evaluation.summary import Played, summarise
from pipeline.evaluator.breaker import Breaker
from pipeline.evaluator.evaluating import Evaluation
from pipeline.evaluator.evaluator import Evaluator
from pipeline.evaluator.groups import GroupEnd, GroupRunner
from pipeline.evaluator.ledger_calls import settled
from pipeline.evaluator.nursery import nursery
from pipeline.evaluator.occupancy import Occupancy
from pipeline.evaluator.placement import PlacementPool
from pipeline.evaluator.rollout_report import RolloutReport
from pipeline.evaluator.saved import SavedTrajectories
from pipeline.evaluator.spec import EvaluatorSpec, NodeSpec, specs_from_config
from pipeline.evaluator.wakeup import WakeUp
from pipeline.evaluator.worker import WorkerClient
from pipeline.evaluator.workers import STAGE, Workers
from pipeline.records import Batch, Group, Sample, StepContext, Task
from pipeline.trainer import schedules

log = logging.getLogger("evaluator")

LOOK_AHEAD = 8
"""Batches of one step that wait for admission at the same time: enough to pack well, few enough to keep every wait short."""


class TaskSource(Protocol):
    """What the pool asks of the fetcher."""

    async def tasks(self, ordinals: Sequence[int]) -> list[Task]: ...

    async def replacement(self, ordinal: int) -> Task | None: ...


class EvaluatorPool:
    """nodes: of the placement pool (`Proof.pool`). workers: at least one; a worker plays the tokens of its node.

    scorer: wakes the teacher stage (best effort). details_folder: where artefacts go. clock: None is the event loop's.
    offload: runs file writes outside the event loop. score: adds columns to groups before their commit (mode `inline`).
    saved: trajectories to commit instead of rolling out (`rollout.reuse`).
    """

    def __init__(
        self,
        config: RunConfig,
        buffer: BufferClient,
        fetcher: TaskSource,
        workers: Sequence[WorkerClient],
        scorer: Callable[[], Awaitable[None]],
        *,
        nodes: Sequence[NodeSpec],
        details_folder: Path,
        clock: Callable[[], float] | None = None,
        offload: Callable[..., Awaitable[Any]] = asyncio.to_thread,
        score: Callable[[Sequence[Group]], Awaitable[None]] | None = None,
        saved: SavedTrajectories | None = None,
    ) -> None:
        clock = clock or asyncio.get_running_loop().time
        self._config = config
        self._buffer = buffer
        self._fetcher = fetcher
        self._specs = specs_from_config(config)
        self._clock = clock
        self._offload = offload
        self._details_folder = details_folder
        self._placement = PlacementPool(nodes, patience_s=config.rollout.admission_patience_s, clock=clock)
        self._workers = Workers(workers, self._placement, config.run.max_actor_restarts, clock)
        self._wake = WakeUp(scorer)
        breaker = Breaker(STAGE, config.rollout.max_consecutive_failures)
        self._groups = GroupRunner(config, buffer, self._workers, breaker, self._wake, self._may_filter, score)
        self._evaluation = Evaluation(self._specs, self._placement, self._workers, config.rollout.retries)
        self._saved = saved
        self._filtered: Counter[int] = Counter()
        self._occupancy = Occupancy(clock)
        self._noting: asyncio.Task[None] | None = None

    async def rollout(self, step: int, batches: Sequence[Batch]) -> RolloutReport:
        """Raises BreakerTripped or StageFailed (with the cause), and the buffer's own errors."""
        with _as_stage_failure(f"rollout of step {step}"):
            return await self._rollout(step, batches)

    async def _rollout(self, step: int, batches: Sequence[Batch]) -> RolloutReport:
        started, report = self._clock(), RolloutReport(step)
        played: dict[int, list[Played]] = {}
        gate = asyncio.Semaphore(LOOK_AHEAD)
        algorithm = self._config.algorithm
        context = StepContext(
            step,
            min_version=max(0, step - 1 - self._config.rollout.max_staleness),
            beta=schedules.value(algorithm.beta, step),
            t_max=schedules.t_max(algorithm.t_max, step),
        )
        slots, batched = await self._slots_and_tasks(step, batches)
        report.already = sum(slot.state not in ("pending", "running", "dropped") for slot in slots)

        async with nursery() as group:

            async def serve(tasks: list[Task]) -> None:
                await self._batch(context, tasks, gate, done)

            def done(task: Task, end: GroupEnd) -> None:
                report.add(end)
                if end.group is not None and self._config.observe.details:
                    played[task.ordinal] = [(task, sample) for sample in end.group.samples]
                if end.settled == "displaced":
                    group.create_task(serve([task]), name=f"again {task.ordinal}")
                elif end.settled == "dropped":
                    group.create_task(replace(task.ordinal), name=f"replace {task.ordinal}")

            async def replace(ordinal: int) -> None:
                task = await settled("replacement", lambda: self._fetcher.replacement(ordinal), "fetcher")
                if task is not None:
                    report.replaced += 1
                    await serve([task])

            for tasks in await self._missing(slots, batches, batched):
                group.create_task(serve(tasks), name=f"batch of {tasks[0].ordinal}")
            for slot in slots:
                if slot.state == "dropped":
                    group.create_task(replace(slot.ordinal), name=f"replace {slot.ordinal}")

        await settled("close_rollout", lambda: self._buffer.close_rollout(step))
        self._filtered.pop(step, None)
        report.seconds = self._clock() - started
        if self._config.observe.details:
            await self._note_details(step, played)
        return report

    async def _note_details(self, step: int, played: dict[int, list[Played]]) -> None:
        """Artefacts are written while the next step is on its way; those of the last step are waited for."""
        await self._noted()
        self._noting = asyncio.create_task(self._write_details(step, played), name=f"details of {step}")
        if step == self._config.trainer.steps:
            await self._noted()

    async def evaluate(
        self,
        evaluation_id: str,
        tasks: Sequence[Task],
        version: int,
        *,
        k: Sequence[int] | None = None,
        min_coverage: float | None = None,
        on_sample: Callable[[Task, Sample], None] | None = None,
        folder: Path | None = None,
    ) -> dict[str, Any]:
        """Play all samples of the tasks with weight version `version` and no other; the summary is returned and written.

        Repeating a complete evaluation returns its summary. Who calls holds the version (`WeightStore.hold`). None: as in `eval`.
        """
        folder = folder or self._details_folder
        found = details.read_summary(folder, evaluation_id)
        if found is not None:
            return found
        started, settings = self._clock(), self._config.eval
        with _as_stage_failure(f"evaluation {evaluation_id}"):
            played = await self._evaluation.play(tasks, version, on_sample)
            summary = summarise(
                evaluation_id,
                played,
                k=settings.k if k is None else k,
                min_coverage=settings.min_coverage if min_coverage is None else min_coverage,
                version=version,
            )
            summary["seconds"] = self._clock() - started
            await self._offload(details.write, folder, evaluation_id, played, summary)
        return summary

    def report(self) -> StageReport:
        work = self._occupancy
        oldest_s, oldest = work.oldest()
        return StageReport(
            stage=STAGE,
            actor="EvaluatorPool",
            pid=os.getpid(),
            node=os.uname().nodename,
            started=work.started,
            finished=work.finished,
            backlog=work.backlog,
            oldest_s=oldest_s,
            busy_s=work.busy_s(),
            detail={
                "samples_running": self._workers.running,
                "heartbeat": self._workers.played + self._workers.deaths,
                "bound_s": self._workers.bound_s,
                "tokens_held": self._placement.held,
                "batches_waiting": self._placement.waiting,
                "nodes": self._placement.used(),
                "workers_alive": self._workers.alive,
                "worker_deaths": self._workers.deaths,
                "oldest": oldest,
            },
        )

    async def stop(self, grace_s: float) -> int:
        """Dispatch nothing new and let what runs end; returns how many groups still ran after `grace_s` seconds."""
        running = await self._groups.stop(grace_s)
        await self._noted()
        return running

    async def close(self) -> None:
        await self._wake.close()
        await self._noted()

    async def _noted(self) -> None:
        """The artefacts of the steps so far are written."""
        if self._noting is not None:
            await self._noting

    async def _slots(self, step: int, count: int) -> list[Assignment]:
        """The newest ordinal of each slot of the step, and its state. The step was assigned by the fetcher: this only reads."""
        return await settled("assign", lambda: self._buffer.assign(step, count, None))

    async def _slots_and_tasks(self, step: int, batches: Sequence[Batch]) -> tuple[list[Assignment], dict[int, Task]]:
        """The slots of the step, and the tasks of its batches by ordinal: asked for at the same time."""
        ordinals = [ordinal for batch in batches for ordinal in batch.ordinals]
        async with nursery() as group:
            slots = group.create_task(self._slots(step, len(ordinals)), name=f"slots of {step}")
            tasks = group.create_task(self._tasks(ordinals), name=f"tasks of {step}")
        return slots.result(), tasks.result()

    async def _tasks(self, ordinals: list[int]) -> dict[int, Task]:
        found = await settled("tasks", lambda: self._fetcher.tasks(ordinals), "fetcher") if ordinals else []
        return {task.ordinal: task for task in found}

    async def _missing(self, slots: list[Assignment], batches: Sequence[Batch], tasks: dict[int, Task]) -> list[list[Task]]:
        """Tasks to roll out, batch by batch; replacements drawn before a restart come as batches of their own."""
        wanted = {slot.ordinal for slot in slots if slot.state in ("pending", "running")}
        rows = [[ordinal for ordinal in batch.ordinals if ordinal in wanted] for batch in batches]
        drawn = sorted(wanted - tasks.keys())
        tasks = tasks | await self._tasks(drawn)
        return [[tasks[ordinal] for ordinal in row] for row in [*rows, *([ordinal] for ordinal in drawn)] if row]

    async def _batch(
        self, context: StepContext, tasks: list[Task], gate: asyncio.Semaphore, done: Callable[[Task, GroupEnd], None]
    ) -> None:
        """Admit, run, give everything back."""
        if self._saved is not None:
            for task in tasks:
                done(task, await self._groups.replay(context, task, self._saved))
            return
        spec = self._specs[tasks[0].task_type]
        async with gate:
            evaluator = await self._admit(spec, sum(task.samples for task in tasks))
        for task in tasks:
            self._occupancy.begin(context.step, task.ordinal)

        def ended(task: Task, end: GroupEnd) -> None:
            self._occupancy.end(context.step, task.ordinal)
            done(task, end)

        try:
            await evaluator.run(tasks, lambda task, local: self._groups.run(context, spec, task, local), ended)
        finally:
            for task in tasks:
                self._occupancy.end(context.step, task.ordinal)

    async def _admit(self, spec: EvaluatorSpec, samples: int) -> Evaluator:
        per_sample = spec.sample_resource
        while True:
            count = min(spec.tokens_for(samples), self._placement.capacity(per_sample))
            if count < 1:
                raise StageFailed(STAGE, f"no node that is alive holds a sample of spec {spec.evaluator_id!r}: {per_sample}")
            try:
                tokens = await self._placement.acquire(per_sample.times(count), per_sample, count)
            except AdmissionError:  # a node went while we waited; ask for what the others hold
                continue
            return Evaluator(tokens, self._placement)

    def _may_filter(self, step: int) -> bool:
        """A filtered group is dropped, and another drawn, up to the bound; after that it is kept, so that the step is not short."""
        rollout = self._config.rollout
        if rollout.on_dropped == "shrink":
            return True
        self._filtered[step] += 1
        return self._filtered[step] <= rollout.filters.max_refill * rollout.tasks_per_step

    async def _write_details(self, step: int, played: dict[int, list[Played]]) -> None:
        """Artefacts of a training step; what was committed before a restart is read back."""
        slots = await self._slots(step, 0)
        missing = [slot.ordinal for slot in slots if slot.state != "dropped" and slot.ordinal not in played]
        if missing:
            for group in await settled("read", lambda: self._buffer.read(missing, False)):
                played[group.ordinal] = [(group.task, sample) for sample in group.samples]
        entries = [entry for ordinal in sorted(played) for entry in played[ordinal]]
        name = f"train_{step}"
        await self._offload(details.write, self._details_folder, name, entries, summarise(name, entries))


@contextmanager
def _as_stage_failure(what: str) -> Iterator[None]:
    """Errors that the pipeline raises on purpose pass; anything else is this stage's failure, with its cause."""
    try:
        yield
    except RolloutError:
        raise
    except Exception as error:
        raise StageFailed(STAGE, f"{what}: {root_cause(error)}") from error
