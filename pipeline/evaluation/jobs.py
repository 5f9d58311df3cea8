"""Evaluations as durable jobs: submitted, queued, played, watched and cancelled.

Invariant: what a client was told about is on disk first. A job outlives its client and this process: `start` takes up every job
that is not finished, and plays only the samples that are not there. At most `running` are played and `waiting` more are queued.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from pipeline.errors import RequestRefused, root_cause
from pipeline.evaluation.job import FINISHED, Job
from pipeline.evaluation.lines import done_units, full_line
from pipeline.evaluation.plan import EvalRequest, Plan
from pipeline.evaluation.store import JobStore
from pipeline.records import Sample, Task

log = logging.getLogger("evaluations")

RETRY_AFTER_S = 5.0
CANCEL_S = 60.0
"""For the samples of a cancelled job to clean up."""
EVENTS_AT_ONCE = 500
OnSample = Callable[[Task, Sample], None]


class Player(Protocol):
    """What plays samples."""

    def link(self, model: str, target: Path) -> tuple[str, int]:
        """Put the model's files under `target` so that they stay; returns its full name and weight version. Blocks.

        Raises RequestRefused for a model that is not there.
        """
        ...

    async def play(
        self, model: Path, version: int, tasks: Sequence[Task], done: Collection[tuple[int, int]], on_sample: OnSample
    ) -> None:
        """Every sample of the tasks but those of `done`, all by this weight version."""
        ...


class Jobs:
    """clock: seconds since the epoch. new_id: from the creation time. offload: runs blocking work outside the event loop."""

    def __init__(
        self,
        store: JobStore,
        player: Player,
        plan: Callable[[EvalRequest], Plan],
        min_coverage: float,
        *,
        running: int = 1,
        waiting: int = 16,
        clock: Callable[[], float] = time.time,
        new_id: Callable[[float], str] | None = None,
        offload: Callable[..., Awaitable[Any]] = asyncio.to_thread,
    ) -> None:
        self._store, self._player, self._plan, self._min_coverage = store, player, plan, min_coverage
        self._running, self._waiting = running, waiting
        self._clock, self._new_id, self._offload = clock, new_id or job_id, offload
        self._jobs: dict[str, Job] = {}
        """Oldest first."""
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._submitting = asyncio.Lock()

    async def start(self) -> None:
        """Read what is there, and go on with it."""
        self._store.sweep()
        found = [await self._offload(Job.read, self._store, name) for name in self._store.ids()]
        for job in sorted(found, key=lambda job: (job.created_at, job.id)):
            self._jobs[job.id] = job
        self._dispatch()

    async def close(self) -> None:
        """Stop playing; the jobs stay as they are on disk, to be taken up again."""
        tasks = list(self._tasks.values())
        self._tasks.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def submit(self, request: EvalRequest, key: str | None = None) -> dict[str, Any]:
        """The job's view; the same key and body give the same job. Raises RequestRefused (400, 404, 409, 429)."""
        async with self._submitting:
            digest = request.digest()
            known = next((job for job in self._jobs.values() if key is not None and job.key == key), None)
            if known is not None:
                if known.digest == digest:
                    return known.view()
                message = f"Idempotency-Key {key!r} was used for {known.id} with another body"
                raise RequestRefused(409, "idempotency_key_reused", message, "Idempotency-Key")
            unfinished = sum(job.status not in FINISHED for job in self._jobs.values())
            if unfinished >= self._running + self._waiting:
                message = f"{unfinished} evaluations are running or queued, which is the most; try again later"
                raise RequestRefused(429, "queue_full", message, retry_after_s=RETRY_AFTER_S)
            plan = await self._offload(self._plan, request)
            job = await self._create(request, plan, key, digest)
            self._jobs[job.id] = job
        self._dispatch()
        return job.view()

    def views(self) -> list[dict[str, Any]]:
        """The newest first."""
        return [job.view() for job in reversed(self._jobs.values())]

    def view(self, name: str) -> dict[str, Any]:
        return self._job(name).view()

    def sample(self, name: str, sample_id: str) -> dict[str, Any]:
        """One sample with its conversation."""
        found = next((line for line in self._job(name).lines() if line["sample_id"] == sample_id), None)
        if found is None:
            raise RequestRefused(404, "not_found", f"evaluation {name!r} has no sample {sample_id!r}")
        return found

    async def events(self, name: str, after: int, wait_s: float) -> list[dict[str, Any]]:
        """`{id, event, data}` of the events after `after`, oldest first; waits for one for `wait_s` seconds at most.

        The sequence is the same however often and from wherever it is read; `done` or `error` is its last.
        """
        job = self._job(name)
        try:
            async with asyncio.timeout(wait_s):
                while not (found := job.events(after, EVENTS_AT_ONCE)):
                    if job.status in FINISHED:
                        return []
                    await job.changed()
        except TimeoutError:
            return []
        return found

    async def cancel(self, name: str) -> dict[str, Any]:
        """Raises RequestRefused 409 when it has ended already."""
        job = self._job(name)
        if job.status in FINISHED:
            raise RequestRefused(409, "already_finished", f"evaluation {name} is {job.status} already")
        task = self._tasks.get(name)
        job.end("cancelled", self._clock())
        if task is not None:
            task.cancel()
            await asyncio.wait({task}, timeout=CANCEL_S)
        self._store.drop_model(name)
        return job.view()

    def counts(self) -> dict[str, int]:
        """Jobs by status."""
        found: dict[str, int] = {}
        for job in self._jobs.values():
            found[job.status] = found.get(job.status, 0) + 1
        return found

    async def _create(self, request: EvalRequest, plan: Plan, key: str | None, digest: str) -> Job:
        now = self._clock()
        name = self._new_id(now)
        record = {"request": request.model_dump(mode="json"), "key": key, "digest": digest, "k": list(plan.k), "total": plan.total}

        def fill(target: Path) -> dict[str, Any]:
            model, version = self._player.link(request.model, target)
            return {"status": "queued", "created_at": now, "model": model, "weight_version": version}

        await self._offload(self._store.create, name, record, plan.tasks, fill)
        return await self._offload(Job.read, self._store, name)

    def _job(self, name: str) -> Job:
        if name not in self._jobs:
            raise RequestRefused(404, "not_found", f"there is no evaluation {name!r}")
        return self._jobs[name]

    def _dispatch(self) -> None:
        """Start queued jobs, oldest first, while there is room."""
        for job in self._jobs.values():
            if len(self._tasks) >= self._running:
                return
            if job.status not in FINISHED and job.id not in self._tasks:
                task = asyncio.create_task(self._run(job), name=job.id)
                self._tasks[job.id] = task
                task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if self._tasks.pop(task.get_name(), None) is None:
            return  # close: nothing new is started
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("evaluation %s could not be written", task.get_name(), exc_info=error)
        self._dispatch()

    async def _run(self, job: Job) -> None:
        try:
            tasks = await self._offload(self._store.tasks, job.id)
            job.begin(self._clock(), tasks, self._store.appending(job.id))
            model = self._store.model(job.id)
            await self._player.play(
                model, job.weight_version, tasks, done_units(job.lines()), lambda t, s: job.add(full_line(t, s))
            )
        except Exception as error:
            log.exception("evaluation %s failed", job.id)
            job.end("failed", self._clock(), root_cause(error))
        else:
            if job.status == "running":  # a cancellation may have come with the last sample
                job.finish(self._clock(), self._min_coverage)
        self._store.drop_model(job.id)


def job_id(now: float) -> str:
    return f"eval-{datetime.fromtimestamp(now, UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"
