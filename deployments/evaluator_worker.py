"""An EvaluatorWorker: one a bundle of the run's placement group. It plays samples, and holds nothing that must survive it.

A sample that holds a share of a GPU is played by a process of its own inside the bundle, which sees that GPU and no other.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import ray

from deployments.calls import EngineCalls, unwrap
from deployments.channel import Door
from deployments.hosting import log_to_file
from deployments.multiplex import Answer, Call, answers, pack
from deployments.names import ENGINE_DEPLOYMENT, door, student_app, teacher_app, worker_stage
from deployments.placement import demand, in_bundle
from deployments.threads import take_turns
from deployments.witness import append_lines
from pipeline.buffer.api import Attempt
from pipeline.config.loading import read_config
from pipeline.config.schema import RunConfig
from pipeline.engines.renderer import ChatRenderer
from pipeline.evaluator.offload import Offload
from pipeline.evaluator.spec import PlacementToken, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.fetcher.catalog import Catalog
from pipeline.heap import tune_collector
from pipeline.paths import RunPaths
from pipeline.records import Sample, StepContext, Task
from pipeline.sandboxes.kinds import sandboxes_by_type
from pipeline.teacher.routing import teacher_groups

CHILD_START_S = 20.0
"""For the process of one sample to start; less than `workers.ANSWER_S`, which the pool grants."""


class EvaluatorWorkerActor:
    """Not retried by Ray: a call that its death ends is a lost attempt, and the pool starts another."""

    of_one_sample = False
    """Such a process plays what it is given by itself."""

    def __init__(self, root: str, node: str, bundle: int) -> None:
        self.paths = RunPaths(Path(root))
        self.node = node
        self.bundle = bundle
        log_to_file(self.paths, f"evaluator_worker_{node}")
        take_turns()
        self.log = logging.getLogger("evaluator_worker")
        self._playing: set[asyncio.Task[Any]] = set()
        self._door: Door | None = None
        self._started = asyncio.ensure_future(self._build())

    async def _build(self) -> dict[str, EvaluatorWorker]:
        """A player of the student's tasks, and one for each teacher (for the teachers' own evaluation): one without an engine acts
        in every turn of it."""
        config = read_config(self.paths.config).config
        catalog = await asyncio.to_thread(Catalog, config)
        folder = await asyncio.to_thread(_tokenizer, config, catalog, self.paths.cache)
        renderer = ChatRenderer.load(folder)
        deadline_s = config.engine.call_timeout_s
        student = EngineCalls(student_app(self.paths.run_id), ENGINE_DEPLOYMENT, deadline_s, config.engine.replicas)
        teachers: dict[str, EngineCalls] = {}
        for group in teacher_groups(config):
            engine = EngineCalls(teacher_app(self.paths.run_id, group.name), ENGINE_DEPLOYMENT, deadline_s, group.replicas)
            teachers |= dict.fromkeys(group.aliases, engine)
        specs = specs_from_config(config)
        sandboxes = sandboxes_by_type({name: spec.sandbox for name, spec in specs.items()})
        for place in set(sandboxes.values()):
            await place.start()
        tune_collector()
        offload = Offload()

        def player(name: str, engine: EngineCalls, played: RunConfig) -> EvaluatorWorker:
            run = f"{self.paths.run_id}.{name}"
            return EvaluatorWorker(
                played, renderer, engine, specs, self.node, offload=offload, teachers=teachers, sandboxes=sandboxes, run=run
            )

        players = {name: player(name, engine, config) for name, engine in {"student": student, **teachers}.items()}
        acting = config.model_copy(update={"eval": config.eval.model_copy(update={"beta": 1.0})})
        alone = [alias for alias, teacher in config.teachers.items() if not teacher.has_engine()]
        return players | {alias: player(alias, student, acting) for alias in alone}

    async def ready(self) -> int:
        await asyncio.shield(self._started)
        return os.getpid()

    async def ping(self) -> int:
        return os.getpid()

    async def clear(self) -> None:
        """End what an earlier pool left playing: its successor counts the node as free."""
        left = list(self._playing)
        for play in left:
            play.cancel()
        await asyncio.gather(*left, return_exceptions=True)

    async def channel(self) -> Path:
        """Where the pool asks beside Ray, on this machine. What it asked for ends with it."""
        if self._door is None:
            self._door = Door(door(self.paths, worker_stage(self.bundle)), self._plays, gives_up=True)
        return self._door.path

    async def play_all(self, calls: bytes) -> AsyncIterator[bytes]:
        async for part in self._plays(pickle.loads(calls)):
            yield pack(part)

    async def _plays(self, asked: Sequence[Call]) -> AsyncIterator[list[Answer]]:
        """Several `run_samples` at the same time; each is answered when it is done."""
        played = [attempt for _, _, attempt, context, *_ in asked if context.phase == "train"]
        facts = [{"ordinal": attempt.ordinal, "attempt": attempt.number, "epoch": attempt.epoch} for attempt in played]
        append_lines(self.paths.plays, facts)
        async with aclosing(answers(asked, self._kept)) as parts:
            async for part in parts:
                yield part

    async def _kept(self, *call: Any) -> list[Sample]:
        play = asyncio.current_task()
        assert play is not None
        self._playing.add(play)
        try:
            return await self.run_samples(*call)
        finally:
            self._playing.discard(play)

    async def run_samples(
        self,
        task: Task,
        indices: Sequence[int],
        attempt: Attempt,
        context: StepContext,
        tokens: Sequence[PlacementToken],
        player: str = "student",
    ) -> list[Sample]:
        worker = (await asyncio.shield(self._started))[player]
        if self.of_one_sample or not any(token.gpu for token in tokens):
            return await worker.run_samples(task, indices, attempt, context, tokens)
        async with asyncio.TaskGroup() as group:
            plays = [
                group.create_task(self._in_child(worker, task, index, attempt, context, token, player))
                for index, token in zip(indices, tokens, strict=True)
            ]
        return [play.result() for play in plays]

    async def _in_child(
        self,
        worker: EvaluatorWorker,
        task: Task,
        index: int,
        attempt: Attempt,
        context: StepContext,
        token: PlacementToken,
        player: str,
    ) -> Sample:
        """One sample in a process that holds its token. The death of the process is the sample's fault alone."""
        options = {**demand(token), **in_bundle(ray.util.get_current_placement_group(), self.bundle), "max_concurrency": 10}
        child = ray.remote(SampleActor).options(**options).remote(str(self.paths.root), self.node, self.bundle, token.gpu_id)
        clock = asyncio.get_running_loop().time
        started = clock()
        reference = child.run_samples.remote(task, [index], attempt, context, [token], player)
        try:
            async with asyncio.timeout(CHILD_START_S + worker.bound_s(task)):
                return (await asyncio.wrap_future(reference.future()))[0]
        except (ray.exceptions.RayError, TimeoutError) as error:
            self.log.warning("the process of sample %d.%d is lost", task.ordinal, index, exc_info=error)
            fault = unwrap(error, "the sample's process")
            return worker.aborted(task, index, attempt, context, token, fault, clock() - started)
        finally:
            ray.kill(child)


class SampleActor(EvaluatorWorkerActor):
    """Plays one sample on one GPU: the token's, which the pool has counted."""

    of_one_sample = True

    def __init__(self, root: str, node: str, bundle: int, gpu_id: int | None) -> None:
        if gpu_id is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu_id)
        super().__init__(root, node, bundle)


def _tokenizer(config: Any, catalog: Catalog, cache: Path) -> Path:
    from pipeline.trainer.assets import tokenizer_folder

    return tokenizer_folder(config, catalog, cache)
