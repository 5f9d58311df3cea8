"""One cluster of a run: its driver, which does what the workflow does, and its actors, which hold the real core.

Invariant: an actor is built from the run folder alone, as often as it dies.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.buffer.reader import run_fence
from pipeline.buffer.service import BufferService
from pipeline.evaluator.pool import EvaluatorPool
from pipeline.evaluator.spec import NodeSpec
from pipeline.fetcher.service import Fetcher
from pipeline.records import Batch
from pipeline.teacher.scorer import TeacherScorer
from pipeline.trainer.service import TrainerService
from tests.simulation.loop import Life
from tests.simulation.parts import InLoop, RemoteTeacher, Tasks, ToyLearner, ToyTeacher, ToyWorker, Vocabulary
from tests.simulation.scenario import CPU_A_NODE, NODES
from tests.simulation.wire import CALLER, Actor, Process, Remote

if TYPE_CHECKING:
    from tests.simulation.world import World

WATCHED_S = 120.0
"""A node's call has no deadline; one that is never answered is found by the watchdog after this time."""


class Cluster:
    """Of one run or resume. `over` says how it ended: finished, failed, killed, stopped, or left behind by its driver."""

    def __init__(self, world: World, number: int) -> None:
        self.number = number
        self.life = Life(f"{number}.driver")
        self.over: asyncio.Future[str] = world.loop.create_future()
        self.epoch = 0
        self.actors: dict[str, Actor] = {}
        self._world = world

    def start(self) -> None:
        self.life.spawn(self.drive(), "drive")

    def end_driver(self, outcome: str) -> None:
        """From now on nothing of the driver runs."""
        self.life.end()
        if not self.over.done():
            self.over.set_result(outcome)

    def end_actors(self) -> None:
        """A cluster that is left behind instead lives on, and its own Ray goes on restarting it."""
        for actor in self.actors.values():
            actor.over = True
            for process in actor.processes:
                actor.end(process, restart=False)

    def bury(self) -> None:
        self.life.bury()
        for process in (process for actor in self.actors.values() for process in actor.processes):
            for close in process.handles:
                close()
            process.life.bury()

    async def drive(self) -> None:
        """What workflows.run and its windows do, one after the other."""
        try:
            await self._take_over()
            self._place()
            for name in [name for name in self.actors if name != "teacher_scorer"]:
                await Remote(self.actors[name], retried=1.0).ready()
            await self._windows()
        except Exception as error:
            self.end_driver(f"failed: {error!r}")
        else:
            self.end_driver("finished")

    async def _take_over(self) -> None:
        service = BufferService(self._world.paths, self._world.settings, clock=self._world.loop.time, threaded=False)
        await service.open(new_run_epoch=True)
        self._world.writers += 1
        self.epoch = self._world.witness.epoch = service.run_epoch
        await asyncio.sleep(0)
        await service.set_run("starting")
        await service.close()

    def _place(self) -> None:
        for name, build in self._builders().items():
            background = TeacherScorer.run if name == "teacher_scorer" else None
            self.actors[name] = Actor(self._world, str(self.number), name, build, background)
        for actor in self.actors.values():
            actor.start()

    async def _windows(self) -> None:
        """As workflows.windows: what the storage still holds is gone on with, else the ledger says where to begin."""
        world, steps = self._world, self._world.config.trainer.steps
        buffer = Remote(self.actors["replay_buffer"], retried=1.0)
        while True:
            recorded = await buffer.steps()
            ended = min((int(step) for step, metrics in recorded["results"].items() if metrics["end_of_data"]), default=steps)
            if recorded["trained_step"] >= ended:
                return
            if world.storage is None or world.storage["last"] < recorded["trained_step"]:
                world.storage = {"first": recorded["first_open"], "last": steps, "results": {}}
            await self._window(world.storage["first"], world.storage["last"])
            world.storage = None

    async def _window(self, first: int, last: int) -> None:
        """The edges of workflows.dag."""
        fetcher, pool, scorer, trainer = (
            Remote(self.actors[name], deadline_s=WATCHED_S, retried=0.95)
            for name in ("fetcher", "evaluator_pool", "teacher_scorer", "trainer")
        )
        nodes: dict[str, asyncio.Task[Any]] = {}

        async def roll_out(step: int) -> None:
            ordinals = nodes[f"fetch[{step}]"].result()
            batches = [Batch(f"{step}.{place}", "single_turn", "single_turn", (o,)) for place, o in enumerate(ordinals)]
            await pool.rollout(step, batches)

        async with asyncio.TaskGroup() as group:

            def node(name: str, after: list[str], work: Callable[[], Awaitable[Any]]) -> None:
                nodes[name] = group.create_task(self._node(name, [nodes[n] for n in after if n in nodes], work), name=name)

            for step in range(first, last + 1):
                train, fetch = f"train[{step}]", f"fetch[{step}]"
                released_by = step - 1 - self._world.scenario.staleness
                in_order = self._world.scenario.sampler == "in_order"
                before = f"{'rollout' if in_order else 'train'}[{released_by}]"
                node(fetch, [before, f"fetch[{step - 1}]"], lambda step=step: fetcher.fetch(step))
                node(f"rollout[{step}]", [fetch, f"train[{released_by}]"], lambda step=step: roll_out(step))
                node(f"score[{step}]", [f"rollout[{step}]"], lambda step=step: scorer.drain(step))
                node(train, [f"train[{step - 1}]"], lambda step=step: trainer.train(step))

    async def _node(self, name: str, after: list[asyncio.Task[Any]], work: Callable[[], Awaitable[Any]]) -> Any:
        storage = self._world.storage
        assert storage is not None
        for task in after:
            await asyncio.shield(task)
        if name not in storage["results"]:
            result = await work()
            storage["results"][name] = result
        return storage["results"][name]

    def _builders(self) -> dict[str, Callable[[Process], Awaitable[Any]]]:
        world, config, now, faults = self._world, self._world.config, self._world.loop.time, self._world.faults

        def stage(name: str, **options: Any) -> Any:
            return Remote(self.actors[name], **options)

        async def replay_buffer(process: Process) -> BufferService:
            service = BufferService(world.paths, world.settings, clock=now, threaded=False)
            await service.open(run_epoch=self.epoch)
            process.handles.append(lambda: _close_files(service))
            world.witness.wrote(self.epoch, "the ledger's writer epoch")
            world.writers += 1
            process.writer = world.writers
            return service

        async def fetcher(process: Process) -> Fetcher:
            return Fetcher(config, Tasks(world.scenario), stage("replay_buffer"), clock=now)

        async def teacher(process: Process) -> ToyTeacher:
            return ToyTeacher(faults.work_s)

        async def evaluator_pool(process: Process) -> EvaluatorPool:
            workers = []
            for node in NODES:
                worker = stage(f"worker_{node}", deadline_s=None, retried=0.0)
                worker.node = node
                workers.append(worker)
            return EvaluatorPool(
                config,
                stage("replay_buffer"),
                stage("fetcher"),
                workers,
                stage("teacher_scorer").submit,
                nodes=tuple(NodeSpec(node, (), float(CPU_A_NODE), 8.0) for node in NODES),
                details_folder=world.paths.details,
                offload=_inline,
            )

        async def teacher_scorer(process: Process) -> TeacherScorer:
            engines = {}
            if world.scenario.teacher:
                engines["big"] = [RemoteTeacher(stage("teacher", deadline_s=30.0, retried=0.0))]
            scorer = TeacherScorer(config, stage("replay_buffer"), engines, {}, Vocabulary(), lambda dataset, count: (), now)
            await scorer.start()
            return scorer

        async def trainer(process: Process) -> TrainerService:
            def saved(checkpoint: Any) -> None:
                world.witness.has_saved(checkpoint)
                world.witness.wrote(self.epoch, f"checkpoint {checkpoint.step}")

            service = TrainerService(
                config,
                world.paths,
                Path("student"),
                stage("replay_buffer"),
                world.weights,
                clock=now,
                fence=run_fence(world.paths, self.epoch, "trainer", await stage("replay_buffer").claim("trainer")),
                epoch=self.epoch,
                die=lambda: world.kill(process),
                learner=lambda found: ToyLearner(world.paths, found, world.witness.learnt, saved),
                worker=InLoop(now, faults.work_s),
            )
            await service.start()
            return service

        def worker(node: str) -> Callable[[Process], Awaitable[ToyWorker]]:
            async def build(process: Process) -> ToyWorker:
                def played(*args: Any) -> Any:
                    return world.witness.played(process.life.name, CALLER.get(), *args)

                return ToyWorker(world.scenario, world.weights, faults.work_s, played)

            return build

        return {
            "replay_buffer": replay_buffer,
            "trainer": trainer,
            "teacher": teacher,
            "teacher_scorer": teacher_scorer,
            **{f"worker_{node}": worker(node) for node in NODES},
            "evaluator_pool": evaluator_pool,
            "fetcher": fetcher,
        }


async def _inline(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _close_files(service: BufferService) -> None:
    """What the kernel does when the buffer's process ends."""
    store = service._store
    if store is None:
        return
    service._reads.close()
    store._db.close()
    if store._segments._file is not None:
        os.close(store._segments._file)
        store._segments._file = None
