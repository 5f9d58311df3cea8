"""One ordinal of one step: attempts until its group is committed, or the ordinal is dropped.

Invariant: an attempt ends in exactly one of commit, end_attempt and discard; a group is committed only with enough finished
samples, by the attempt that made it; a sample that failed is never given a reward.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.buffer.api import Attempt, AttemptEnd, BufferClient, Outcome
from pipeline.config.schema import RunConfig
from pipeline.errors import AttemptRefused, LateCommit, is_infrastructure
from pipeline.evaluation.summary import versions_of
from pipeline.evaluator.breaker import Breaker
from pipeline.evaluator.evaluator import LocalPool
from pipeline.evaluator.ledger_calls import settled
from pipeline.evaluator.nursery import each_to_its_end
from pipeline.evaluator.saved import NOT_SAVED, SavedTrajectories
from pipeline.evaluator.spec import EvaluatorSpec, PlacementToken
from pipeline.evaluator.workers import NodeGone, WorkerLost, Workers
from pipeline.records import Group, Sample, StepContext, Task

STOP_POLL_S = 0.05

Settled = Literal["committed", "already", "dropped", "displaced"]
"""`already`: written before, or by another attempt. `displaced`: its node is gone; it needs tokens elsewhere."""


@dataclass(frozen=True, slots=True)
class GroupEnd:
    settled: Settled
    reason: str | None = None
    """Of a drop."""
    group: Group | None = None
    """What was committed."""
    attempts: int = 0


class GroupRunner:
    """Shared by all steps. `may_filter(step)` says whether a filtered group may still be replaced; then it is dropped.
    score: adds columns to groups before they are committed (`teacher_stage.mode: inline`)."""

    def __init__(
        self,
        config: RunConfig,
        buffer: BufferClient,
        workers: Workers,
        breaker: Breaker,
        wake: Callable[[], None],
        may_filter: Callable[[int], bool],
        score: Callable[[Sequence[Group]], Awaitable[None]] | None,
    ) -> None:
        self._rollout = config.rollout
        self._durable = config.buffer.durable_samples
        self._buffer = buffer
        self._workers = workers
        self._breaker = breaker
        self._wake = wake
        self._may_filter = may_filter
        self._score = score
        self._dispatching = asyncio.Event()
        self._dispatching.set()
        self.in_flight = 0
        """Attempts that run."""

    async def run(self, context: StepContext, spec: EvaluatorSpec, task: Task, local: LocalPool) -> GroupEnd:
        attempts = 0
        while True:
            first = await local.take(1 if self._keeps_samples(task) else min(task.samples, local.size))
            await self._dispatching.wait()
            self.in_flight += 1
            try:
                ended = await self._attempt(context, spec, task, local, first)
            except AttemptRefused:
                local.give(first)
                return replace(await self._found(context.step, task), attempts=attempts)
            finally:
                self.in_flight -= 1
            attempts += 1
            if isinstance(ended, GroupEnd):
                return replace(ended, attempts=attempts)
            if not ended.again:
                return GroupEnd("dropped" if ended.dropped is not None else "already", ended.dropped, attempts=attempts)
            await asyncio.sleep(ended.wait_s)

    async def replay(self, context: StepContext, task: Task, saved: SavedTrajectories) -> GroupEnd:
        """Commit a saved group instead of rolling out. A task without one is dropped, and counts as a failure."""
        try:
            attempt = await self._start(context, task, "saved")
        except AttemptRefused:
            return await self._found(context.step, task)
        group = saved.group(task, context.step, attempt.number, context.min_version)
        if group is not None:
            return replace(await self._keep(context, task, attempt, group), attempts=1)
        await settled("discard", lambda: self._buffer.discard(task.ordinal, NOT_SAVED))
        self._breaker.failure(f"rollout.reuse {saved.source!r} holds no trajectory of {task.task_id} (ordinal {task.ordinal})")
        return GroupEnd("dropped", NOT_SAVED, attempts=1)

    async def stop(self, grace_s: float) -> int:
        """Start no more attempts, and wait for those that run. Returns how many still ran after `grace_s` seconds."""
        self._dispatching.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(grace_s):
                while self.in_flight:
                    await asyncio.sleep(STOP_POLL_S)
        return self.in_flight

    async def _attempt(
        self, context: StepContext, spec: EvaluatorSpec, task: Task, local: LocalPool, first: list[PlacementToken]
    ) -> GroupEnd | AttemptEnd:
        """AttemptEnd: it came to nothing; the ledger says what follows."""
        attempt = await self._start(context, task, first[0].node)
        try:
            samples = await self._samples(context, spec, task, attempt, local, first)
        except WorkerLost as error:
            return await self._end(attempt, "lost", str(error))
        except NodeGone as error:
            end = await self._end(attempt, "lost", str(error))
            return GroupEnd("displaced") if end.again else end
        outcome, reason = self._judge(samples)
        if outcome is None:
            return await self._keep(context, task, attempt, _group(context, task, attempt, samples))
        end = await self._end(attempt, outcome, reason)
        self._breaker.failure(f"ordinal {task.ordinal}, {reason}: {_first_error(samples)}")
        return end

    async def _samples(
        self,
        context: StepContext,
        spec: EvaluatorSpec,
        task: Task,
        attempt: Attempt,
        local: LocalPool,
        first: list[PlacementToken],
    ) -> list[Sample]:
        """All samples of the task, by index, as many at a time as there are tokens in `first`, which it gives back."""
        keeps, size = self._keeps_samples(task), len(first)
        stored = await settled("stored_samples", lambda: self._buffer.stored_samples(task.ordinal)) if keeps else []
        samples = {sample.index: sample for sample in stored}
        missing = [index for index in range(task.samples) if index not in samples]

        lost = False

        async def chunk(indices: list[int], held: list[PlacementToken] | None) -> None:
            nonlocal lost
            tokens = held if held is not None else await local.take(len(indices))
            try:
                if lost and not keeps:  # nobody would look at these
                    return
                for sample in await self._workers.run(spec, task, indices, attempt, context, tokens[: len(indices)]):
                    samples[sample.index] = sample
                    if keeps and sample.status == "ok":
                        await settled("store_sample", lambda sample=sample: self._buffer.store_sample(attempt, sample))
            except BaseException:
                lost = True
                raise
            finally:
                local.give(tokens)

        if not missing:
            local.give(first)
        chunks = [(missing[start : start + size], None if start else first) for start in range(0, len(missing), size)]
        await each_to_its_end((f"samples {task.ordinal}.{indices[0]}", chunk(indices, held)) for indices, held in chunks)
        return [samples[index] for index in range(task.samples)]

    def _keeps_samples(self, task: Task) -> bool:
        return task.task_type == "swe" if self._durable is None else self._durable

    def _judge(self, samples: list[Sample]) -> tuple[Outcome | None, str]:
        """None when enough samples finished; else how the attempt failed, by the most frequent abort reason."""
        if sum(sample.status == "ok" for sample in samples) >= self._rollout.min_samples_per_group:
            return None, ""
        reasons = Counter(sample.abort_reason or "data" for sample in samples if sample.status == "aborted")
        infra = {reason: count for reason, count in reasons.items() if is_infrastructure(reason)}
        among = infra or reasons
        return ("infra" if infra else "data"), max(sorted(among), key=lambda reason: among[reason])

    async def _keep(self, context: StepContext, task: Task, attempt: Attempt, group: Group) -> GroupEnd:
        self._breaker.success()
        reason = self._filter(group)
        if reason is not None and self._may_filter(context.step):
            await settled("discard", lambda: self._buffer.discard(task.ordinal, reason))
            return GroupEnd("dropped", reason)
        if self._score is not None:
            await self._score([group])
        try:
            await settled("commit", lambda: self._buffer.commit(attempt, group))
        except LateCommit:
            return await self._found(context.step, task)
        if task.needs:
            self._wake()
        return GroupEnd("committed", group=group)

    def _filter(self, group: Group) -> str | None:
        filters = self._rollout.filters
        if not filters.zero_advantage and filters.custom is None:
            return None
        from pipeline.trainer.filters import drop_reason  # the trainer's package is loaded by runs that filter only

        return drop_reason(group, filters)

    async def _start(self, context: StepContext, task: Task, worker: str) -> Attempt:
        version = context.min_version
        return await settled("start_attempt", lambda: self._buffer.start_attempt(task.ordinal, version, worker))

    async def _end(self, attempt: Attempt, outcome: Outcome, reason: str) -> AttemptEnd:
        return await settled("end_attempt", lambda: self._buffer.end_attempt(attempt, outcome, reason))

    async def _found(self, step: int, task: Task) -> GroupEnd:
        """What became of an ordinal that is not ours to roll out (any more). One that left its slot was dropped."""
        slots = await settled("assign", lambda: self._buffer.assign(step, 0, None))
        state = next((slot.state for slot in slots if slot.ordinal == task.ordinal), "dropped")
        if state in ("pending", "running"):
            return GroupEnd("displaced")
        return GroupEnd("dropped" if state == "dropped" else "already")


def _group(context: StepContext, task: Task, attempt: Attempt, samples: list[Sample]) -> Group:
    versions = versions_of(samples)
    return Group(
        ordinal=task.ordinal,
        step=context.step,
        attempt=attempt.number,
        task=task,
        weight_version=versions[0] if versions else context.min_version,
        samples=tuple(samples),
    )


def _first_error(samples: list[Sample]) -> str:
    return next((sample.error for sample in samples if sample.error), "no message")
