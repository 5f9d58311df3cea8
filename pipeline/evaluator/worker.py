"""Plays samples where its node is. Holds nothing that outlives a call, so its death costs only what it was playing.

Invariant: a call returns one sample for each index, in the order of the indices, within the sum of the phases' deadlines.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from pipeline.agents.base import Agent, Episode, Generator, Renderer
from pipeline.agents.loading import load_agent
from pipeline.agents.mixing import executors
from pipeline.agents.reference import ReferenceTeacher
from pipeline.buffer.api import Attempt
from pipeline.config.schema import RunConfig
from pipeline.engines.base import Engine, Version
from pipeline.errors import AgentTimeout, ConfigError
from pipeline.evaluator.deadlines import Deadlines
from pipeline.evaluator.episode import cut_off, play
from pipeline.evaluator.generation import CallPolicy, GroupGenerator, SampleGenerator
from pipeline.evaluator.spec import EvaluatorSpec, PhaseTimeouts, PlacementToken
from pipeline.records import Sample, StepContext, Task, sample_seed
from pipeline.sandboxes.base import Contents, Limits, Sandbox, Sandboxes
from pipeline.sandboxes.kinds import sandboxes_by_type
from pipeline.sandboxes.leases import sandbox_name

log = logging.getLogger("evaluator")

GRACE_S = 5.0
"""For an agent to end after its last deadline; after that it is left behind, and its sample is aborted without it."""


class WorkerClient(Protocol):
    """`EvaluatorWorker` in one process, a proxy of its actor across processes.

    Raises ConnectionError when the worker's process is gone.
    """

    node: str

    async def run_samples(
        self, task: Task, indices: Sequence[int], attempt: Attempt, context: StepContext, tokens: Sequence[PlacementToken]
    ) -> list[Sample]: ...


class EvaluatorWorker:
    """Implements `WorkerClient`. Raises ConfigError for a spec whose agent cannot be loaded.

    offload: runs blocking work (verifiers) outside the event loop. teachers: by alias, the engines of teachers that act.
    sandboxes: by task type. run: names sandboxes; two workers that play at the same time have different ones.
    """

    def __init__(
        self,
        config: RunConfig,
        renderer: Renderer,
        engine: Engine,
        specs: dict[str, EvaluatorSpec],
        node: str,
        *,
        offload: Callable[..., Awaitable[Any]] = asyncio.to_thread,
        teachers: Mapping[str, Engine] | None = None,
        sandboxes: Mapping[str, Sandboxes] | None = None,
        run: str = "",
    ) -> None:
        self.node = node
        self._config = config
        self._teachers = teachers or {}
        self._sandboxes = sandboxes or sandboxes_by_type({name: spec.sandbox for name, spec in specs.items()})
        self._run = run or f"process{os.getpid()}"
        self._renderer = renderer
        self._engine = engine
        self._specs = specs
        self._offload = offload
        self._makers: dict[str, Callable[[], Agent]] = {spec.task_type: load_agent(spec.agent) for spec in specs.values()}
        self._policy = CallPolicy(config.rollout.retries.infra, config.rollout.retries.backoff_s, config.engine.call_timeout_s)
        self._left_behind: set[asyncio.Task[Sample]] = set()

    async def run_samples(
        self, task: Task, indices: Sequence[int], attempt: Attempt, context: StepContext, tokens: Sequence[PlacementToken]
    ) -> list[Sample]:
        """tokens: one for each index; the caller holds them until this returns."""
        timeouts = self._timeouts(task)
        deadlines = Deadlines()
        group = GroupGenerator(self._engine, Version(context.min_version, context.exact_version), self._policy)
        acting = self._acting(task)
        make_agent = self._makers[task.task_type]
        clock = asyncio.get_running_loop().time
        started, lives, plays = clock(), [], []
        for index, token in zip(indices, tokens, strict=True):
            generator = self._generator(task, index, attempt, group, timeouts, deadlines)
            episode = self._episode(task, index, attempt, context, token, generator, acting)
            lives.append((episode, token, generator.turns))
            playing = play(make_agent, episode, timeouts, token=token, turns=generator.turns, deadlines=deadlines)
            plays.append(asyncio.create_task(playing, name=f"{task.ordinal}.{index}"))
        try:
            await asyncio.wait(plays, timeout=timeouts.total_s + GRACE_S)
        finally:
            await self._end(plays, timeouts.cleanup_s)
            deadlines.close()
            await group.close()
            if acting is not None:
                await acting.close()
        seconds = clock() - started
        return [self._sample(playing, *life, seconds) for playing, life in zip(plays, lives, strict=True)]

    def aborted(
        self,
        task: Task,
        index: int,
        attempt: Attempt,
        context: StepContext,
        token: PlacementToken,
        fault: BaseException,
        seconds: float,
    ) -> Sample:
        """The sample of an episode whose process was lost after so many seconds, its turns with it: its siblings go on."""
        group = GroupGenerator(self._engine, Version(context.min_version, context.exact_version), self._policy)
        generator = self._generator(task, index, attempt, group, self._timeouts(task), Deadlines())
        return cut_off(self._episode(task, index, attempt, context, token, generator, None), fault, token, [], seconds)

    def bound_s(self, task: Task) -> float:
        """Seconds within which `run_samples` returns."""
        timeouts = self._timeouts(task)
        return timeouts.total_s + timeouts.cleanup_s + 2 * GRACE_S

    def _timeouts(self, task: Task) -> PhaseTimeouts:
        spec = self._specs.get(task.task_type)
        if spec is None:
            raise ConfigError(f"task type {task.task_type!r} has no spec; specs cover {sorted(self._specs)}")
        limit = task.stopping.max_seconds
        return spec.timeouts if limit is None else replace(spec.timeouts, run_s=min(limit, spec.timeouts.run_s))

    def _generator(
        self, task: Task, index: int, attempt: Attempt, group: GroupGenerator, timeouts: PhaseTimeouts, deadlines: Deadlines
    ) -> SampleGenerator:
        seed = sample_seed(task, index, attempt.failures)
        return SampleGenerator(group, f"{task.ordinal}.{index}", task.sampling, seed, timeouts.turn_s, deadlines)

    def _acting(self, task: Task) -> GroupGenerator | None:
        """Of a teacher that acts and has an engine."""
        alias = task.teacher if self._config.algorithm.mixes() else None
        if alias is None or not self._config.teachers[alias].has_engine():
            return None
        if alias not in self._teachers:
            raise ConfigError(f"teachers.{alias} acts in {task.dataset}, and no engine serves it here")
        return GroupGenerator(self._teachers[alias], Version(), self._policy)

    def _episode(
        self,
        task: Task,
        index: int,
        attempt: Attempt,
        context: StepContext,
        token: PlacementToken,
        student: SampleGenerator,
        acting: GroupGenerator | None,
    ) -> Episode:
        """With a teacher, where one acts, and with sandboxes within the token."""
        spec, failures = self._specs[task.task_type], attempt.failures

        async def open_sandbox(part: str, contents: Contents) -> Sandbox:
            name = sandbox_name(self._run, context.phase, context.step, task.ordinal, index, failures)
            limits = Limits(token.cpu or 1.0, int((token.memory_gb or 1.0) * 1024), spec.sandbox.processes, spec.sandbox.file_mb)
            return await self._sandboxes[task.task_type].open(f"{name}-{part}", contents, limits)

        return Episode(
            task,
            index,
            context,
            student,
            self._renderer,
            failures,
            self._offload,
            teacher=self._teacher(task, student, acting),
            executor_of=executors(self._config, task, index, failures, context),
            open_sandbox=open_sandbox,
            sandbox=spec.sandbox,
        )

    def _teacher(self, task: Task, student: SampleGenerator, acting: GroupGenerator | None) -> Generator | None:
        if task.teacher is None or not self._config.algorithm.mixes():
            return None
        return student.beside(acting or ReferenceTeacher(task, self._renderer), "teacher")

    async def _end(self, plays: list[asyncio.Task[Sample]], cleanup_s: float) -> None:
        """Cancel what still runs and wait for its cleanup; an agent that ignores this is kept, and named in the log."""
        running = [playing for playing in plays if not playing.done()]
        if not running:
            return
        for playing in running:
            playing.cancel()
        await asyncio.wait(running, timeout=cleanup_s + GRACE_S)
        for playing in running:
            if not playing.done():
                log.error("sample %s ignores its cancellation", playing.get_name())
                self._left_behind.add(playing)
                playing.add_done_callback(self._forget)

    def _forget(self, playing: asyncio.Task[Sample]) -> None:
        self._left_behind.discard(playing)
        if not playing.cancelled() and (error := playing.exception()) is not None:
            log.error("sample %s ended late", playing.get_name(), exc_info=error)

    def _sample(
        self, playing: asyncio.Task[Sample], episode: Episode, token: PlacementToken, turns: list[dict[str, Any]], seconds: float
    ) -> Sample:
        if not playing.done():
            fault: BaseException = AgentTimeout("the agent ignored its cancellation at the deadline")
        elif playing.cancelled():
            fault = asyncio.CancelledError("the agent cancelled its own task")
        elif (error := playing.exception()) is not None:
            log.error("sample %s", playing.get_name(), exc_info=error)
            fault = error
        else:
            return playing.result()
        return cut_off(episode, fault, token, turns, seconds)
