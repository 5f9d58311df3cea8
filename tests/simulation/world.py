"""A whole run in one event loop: the real core, small parts around it, and a driver that starts, kills and resumes it.

Invariant: what survives a kill is the run folder and the workflow's storage, and nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import warnings
from collections.abc import Awaitable, Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from pipeline.buffer.reader import read_status, run_fence
from pipeline.buffer.schema import create_run
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.evaluator.pool import EvaluatorPool
from pipeline.evaluator.spec import NodeSpec
from pipeline.fetcher.service import Fetcher
from pipeline.paths import RunPaths
from pipeline.records import Batch
from pipeline.teacher.scorer import TeacherScorer
from pipeline.trainer import checkpoints
from pipeline.trainer.service import TrainerService
from tests.simulation.faults import SPLITS, Faults
from tests.simulation.loop import LIFE, Life, SimulationLoop, Stuck
from tests.simulation.parts import InLoop, RemoteTeacher, Tasks, ToyLearner, ToyTeacher, ToyWorker, Vocabulary, Weights, read_model
from tests.simulation.scenario import CPU_A_NODE, NODES, SCENARIOS, Scenario
from tests.simulation.wire import CALLER, Actor, Process, Remote
from tests.simulation.witness import Violation, Witness

WATCHED_S = 120.0
"""A node's call has no deadline; one that is never answered is found by the watchdog after this time."""
MOST_RESUMES = 40
MOST_VIRTUAL_S = 20_000.0
MOST_TICKS = 40_000
MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None


@dataclass(frozen=True, slots=True)
class Result:
    """How a run went. `trained` and `weights` are what an exact scenario must end with, whatever happened to it."""

    trained: dict[int, tuple[int, ...]]
    weights: str
    ticks: int
    resumes: int
    kills: int
    commits: int
    trace: int
    """Digest of the order of calls: equal for two runs of one seed."""


def simulate(seed: int) -> Result:
    """One seed: its scenario with its faults. Raises Violation."""
    scenario = SCENARIOS[seed % len(SCENARIOS)]
    expected = calm(scenario)
    result = run(scenario, Faults.of(seed, expected.ticks))
    if scenario.exact and (result.trained, result.weights) != (expected.trained, expected.weights):
        raise Violation(
            f"trained {result.trained}, without faults {expected.trained}; weights {result.weights}, {expected.weights}"
        )
    return result


@cache
def calm(scenario: Scenario) -> Result:
    return run(scenario, Faults.none())


def run(scenario: Scenario, faults: Faults) -> Result:
    with _silence(), tempfile.TemporaryDirectory(dir=MEMORY) as folder, closing(SimulationLoop()) as loop:
        paths = RunPaths(Path(folder) / "run")
        paths.groups.mkdir(parents=True)
        paths.database.write_bytes(_empty_run())
        world = World(scenario, faults, paths, loop)
        try:
            return loop.run_until_complete(world.main())
        except Stuck as error:
            raise Violation(str(error)) from error
        finally:
            world.bury()


@cache
def _empty_run() -> bytes:
    """A database as `create_run` leaves it."""
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        paths = RunPaths(Path(folder) / "run")
        create_run(paths, {})
        return paths.database.read_bytes()


@contextmanager
def _silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


@dataclass
class Cluster:
    """Of one run or resume."""

    number: int
    life: Life
    """The driver's."""
    over: asyncio.Future[str]
    epoch: int = 0
    actors: dict[str, Actor] = field(default_factory=dict)


class World:
    def __init__(self, scenario: Scenario, faults: Faults, paths: RunPaths, loop: SimulationLoop) -> None:
        self.scenario, self.faults, self.paths, self.loop = scenario, faults, paths, loop
        self.config = scenario.config
        self.settings = BufferSettings.from_config(self.config)
        self.witness = Witness(scenario, paths, self._break)
        self.weights = Weights(self._published)
        self.clusters: list[Cluster] = []
        self.storage: dict[str, Any] | None = None
        """Workflow storage: the window and the results of completed nodes."""
        self.broken: Violation | None = None
        self.kills = 0
        self.trace = 0
        self._writers = 0
        self._kills = list(faults.kills)
        loop.alarm = self._alarm
        self._set_alarm()
        loop.set_exception_handler(self._fault_in_callback)

    # from beginning to end

    async def main(self) -> Result:
        deadline = self.loop.call_later(MOST_VIRTUAL_S, self._break, Violation(f"not finished after {MOST_VIRTUAL_S:g} virtual s"))
        resumes = -1
        outcome = ""
        while outcome != "finished":
            resumes += 1
            if resumes > MOST_RESUMES:
                raise Violation(f"not finished after {resumes} resumes; the last: {outcome}")
            cluster = Cluster(len(self.clusters), Life(f"{len(self.clusters)}.driver"), self.loop.create_future())
            self.clusters.append(cluster)
            cluster.life.spawn(self._drive(cluster), "drive")
            outcome = await cluster.over
            if self.broken is not None:
                raise self.broken
            if outcome != "finished":
                zombies = outcome == "left behind"
                if not zombies:
                    self._end_cluster(cluster)
                self._damage(torn=not zombies and self.faults.chance(0.3))
            self.witness.check()
            await asyncio.sleep(self.faults.restart_s())
        deadline.cancel()
        return self._finished(cluster, resumes)

    def _finished(self, cluster: Cluster, resumes: int) -> Result:
        status = read_status(self.paths)
        counts = status["ordinals"]
        left = {state: counts[state] for state in ("pending", "running", "written", "ready", "consumed") if counts[state]}
        if left or status["attempts"]["regenerated"] or self.witness.regenerated:
            raise Violation(f"at the end {left} are left, regenerated {status['attempts']['regenerated']}")
        newest = next(checkpoints.complete(self.paths))
        held = read_model(newest.path)
        trained = {step: tuple(ordinals) for step, (ordinals, _) in sorted(self.witness.learned.items())}
        if held["trained"] != [ordinal for ordinals in trained.values() for ordinal in ordinals]:
            raise Violation(f"the last checkpoint was trained on {held['trained']}, the learner was given {trained}")
        if counts["trained"] != len(held["trained"]):
            raise Violation(f"{counts['trained']} groups are trained, the parameters have seen {len(held['trained'])}")
        pool = cluster.actors["evaluator_pool"].process
        if pool is not None and pool.service is not None and (held_tokens := pool.service.report().detail["tokens_held"]):
            raise Violation(f"{held_tokens} placement tokens are still held")
        return Result(trained, held["weights"], self.loop.ticks, resumes, self.kills, len(self.witness.commits), self.trace)

    # a cluster

    async def _drive(self, cluster: Cluster) -> None:
        """What workflows.run and its windows do, one after the other."""
        try:
            await self._take_over(cluster)
            self._place(cluster)
            for name in [name for name in cluster.actors if name != "teacher_scorer"]:
                await Remote(cluster.actors[name], retried=1.0).ready()
            await self._windows(cluster)
        except Exception as error:
            self._over(cluster, f"failed: {error!r}")
        else:
            self._over(cluster, "finished")

    async def _take_over(self, cluster: Cluster) -> None:
        service = BufferService(self.paths, self.settings, clock=self.loop.time, threaded=False)
        await service.open(new_run_epoch=True)
        self._writers += 1
        cluster.epoch = self.witness.epoch = service.run_epoch
        await asyncio.sleep(0)
        await service.set_run("starting")
        await service.close()

    def _place(self, cluster: Cluster) -> None:
        for name, build in self._builders(cluster).items():
            background = TeacherScorer.run if name == "teacher_scorer" else None
            cluster.actors[name] = Actor(self, str(cluster.number), name, build, background)
        for actor in cluster.actors.values():
            actor.start()

    def _builders(self, cluster: Cluster) -> dict[str, Callable[[Process], Awaitable[Any]]]:
        def stage(name: str, **options: Any) -> Any:
            return Remote(cluster.actors[name], **options)

        async def replay_buffer(process: Process) -> BufferService:
            service = BufferService(self.paths, self.settings, clock=self.loop.time, threaded=False)
            await service.open(run_epoch=cluster.epoch)
            process.handles.append(lambda: _close_files(service))
            self.witness.wrote(cluster.epoch, "the ledger's writer epoch")
            self._writers += 1
            process.writer = self._writers
            return service

        async def fetcher(process: Process) -> Fetcher:
            return Fetcher(self.config, Tasks(self.scenario), stage("replay_buffer"), clock=self.loop.time)

        async def teacher(process: Process) -> ToyTeacher:
            return ToyTeacher(self.faults.work_s)

        async def evaluator_pool(process: Process) -> EvaluatorPool:
            workers = []
            for node in NODES:
                worker = stage(f"worker_{node}", deadline_s=None, retried=0.0)
                worker.node = node
                workers.append(worker)
            nodes = tuple(NodeSpec(node, (), float(CPU_A_NODE), 8.0) for node in NODES)
            return EvaluatorPool(
                self.config, stage("replay_buffer"), stage("fetcher"), workers, stage("teacher_scorer").submit,
                nodes=nodes, details_folder=self.paths.details, offload=_inline,
            )  # fmt: skip

        async def teacher_scorer(process: Process) -> TeacherScorer:
            engines = {"big": [RemoteTeacher(stage("teacher", deadline_s=30.0, retried=0.0))]} if self.scenario.teacher else {}
            scorer = TeacherScorer(
                self.config, stage("replay_buffer"), engines, {}, Vocabulary(), lambda dataset, count: (), self.loop.time
            )
            await scorer.start()
            return scorer

        async def trainer(process: Process) -> TrainerService:
            def saved(checkpoint: Any) -> None:
                self.witness.has_saved(checkpoint)
                self.witness.wrote(cluster.epoch, f"checkpoint {checkpoint.step}")

            def learner(found: Any) -> ToyLearner:
                return ToyLearner(self.paths, found, self.witness.learnt, saved)

            service = TrainerService(
                self.config, self.paths, Path("student"), stage("replay_buffer"), self.weights, clock=self.loop.time,
                fence=run_fence(self.paths, cluster.epoch), epoch=cluster.epoch, die=lambda: self.kill(process),
                learner=learner, worker=InLoop(self.loop.time, self.faults.work_s),
            )  # fmt: skip
            await service.start()
            return service

        def worker(node: str) -> Callable[[Process], Awaitable[ToyWorker]]:
            async def build(process: Process) -> ToyWorker:
                def played(*args: Any) -> Any:
                    return self.witness.played(process.life.name, CALLER.get(), *args)

                return ToyWorker(self.scenario, self.weights, self.faults.work_s, played)

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

    def _published(self, version: int) -> None:
        life = LIFE.get()
        if life is not None:
            self.witness.published(self.clusters[int(life.name.partition(".")[0])].epoch, version)

    # the workflow

    async def _windows(self, cluster: Cluster) -> None:
        buffer = Remote(cluster.actors["replay_buffer"], retried=1.0)
        while True:
            recorded = await buffer.steps()
            done, first = recorded["trained_step"], recorded["first_open"]
            ended = min((int(step) for step, metrics in recorded["results"].items() if metrics["end_of_data"]), default=None)
            if done >= min(self.config.trainer.steps, ended or self.config.trainer.steps):
                return
            if self.storage is None or self.storage["last"] < done:
                self.storage = {"first": first, "last": self.config.trainer.steps, "results": {}}
            await self._window(cluster, self.storage["first"], self.storage["last"])
            self.storage = None

    async def _window(self, cluster: Cluster, first: int, last: int) -> None:
        """The edges of workflows.dag."""
        fetcher, pool, scorer, trainer = (
            Remote(cluster.actors[name], deadline_s=WATCHED_S, retried=0.95)
            for name in ("fetcher", "evaluator_pool", "teacher_scorer", "trainer")
        )
        nodes: dict[str, asyncio.Task[Any]] = {}

        async def batched(step: int) -> list[Batch]:
            ordinals = nodes[f"fetch[{step}]"].result()
            return [Batch(f"{step}.{place}", "single_turn", "single_turn", (o,)) for place, o in enumerate(ordinals)]

        async def rolled(step: int) -> None:
            await pool.rollout(step, await batched(step))

        async with asyncio.TaskGroup() as group:

            def node(name: str, after: list[str], work: Callable[[], Awaitable[Any]]) -> None:
                nodes[name] = group.create_task(self._node(name, [nodes[n] for n in after if n in nodes], work), name=name)

            for step in range(first, last + 1):
                train, fetch = f"train[{step}]", f"fetch[{step}]"
                release = f"train[{step - 1 - self.scenario.staleness}]"
                node(fetch, [release, f"fetch[{step - 1}]"], lambda step=step: fetcher.fetch(step))
                node(f"rollout[{step}]", [fetch], lambda step=step: rolled(step))
                node(f"score[{step}]", [f"rollout[{step}]"], lambda step=step: scorer.drain(step))
                scored = [f"score[{step}]"] if self.scenario.sampler == "in_order" else []
                node(train, [f"train[{step - 1}]", *scored], lambda step=step: trainer.train(step))

    async def _node(self, name: str, after: list[asyncio.Task[Any]], work: Callable[[], Awaitable[Any]]) -> Any:
        storage = self.storage
        assert storage is not None
        for task in after:
            await asyncio.shield(task)
        if name not in storage["results"]:
            result = await work()
            storage["results"][name] = result
        return storage["results"][name]

    # what goes wrong

    def _alarm(self) -> None:
        if self.loop.ticks >= MOST_TICKS:
            self._break(Violation(f"not finished after {MOST_TICKS} callbacks"))
            return
        _, victim = self._kills.pop(0)
        self._set_alarm()
        self.kills += 1
        self._strike(victim)

    def _set_alarm(self) -> None:
        self.loop.alarm_at = max(self._kills[0][0], self.loop.ticks + 1) if self._kills else MOST_TICKS

    def _strike(self, victim: str) -> None:
        cluster = self.clusters[-1]
        if cluster.over.done():
            return
        if victim in ("everything", "driver") or not cluster.actors:
            self._over(cluster, "left behind" if victim == "driver" else "killed")
        elif victim == "stop":
            cluster.life.spawn(self._stop(cluster), "stop")
        elif victim in SPLITS:
            cluster.actors[victim.removeprefix("split ")].split(self.faults.random.choice(SPLITS[victim]))
        else:
            process = cluster.actors[victim].process
            if process is not None:
                self.kill(process)
        self._check_now()

    async def _stop(self, cluster: Cluster) -> None:
        """SIGTERM, as the driver takes it."""
        with contextlib.suppress(Exception):
            await Remote(cluster.actors["evaluator_pool"], 40.0).stop(5.0)
            await Remote(cluster.actors["trainer"], 60.0).save()
        self._over(cluster, "stopped")

    def kill(self, process: Process) -> None:
        process.actor.end(process, restart=True)

    def _over(self, cluster: Cluster, outcome: str) -> None:
        """From now on nothing of the driver runs."""
        cluster.life.end()
        if not cluster.over.done():
            cluster.over.set_result(outcome)

    def _end_cluster(self, cluster: Cluster) -> None:
        """One that is left behind instead lives on, and its own Ray goes on restarting it."""
        for actor in cluster.actors.values():
            actor.over = True
            for process in actor.processes:
                actor.end(process, restart=False)

    def _damage(self, torn: bool) -> None:
        """What else may have happened until the resume."""
        faults = self.faults
        if faults.chance(0.4):
            self.storage = None
        if faults.chance(0.2):
            self.weights.newest = None
        if faults.chance(0.3):
            debris = self.paths.checkpoints / ".tmp-left"
            debris.mkdir(parents=True, exist_ok=True)
            (debris / "half").write_bytes(b"half")
        if torn:
            self._tear_newest()

    def _tear_newest(self) -> None:
        """Only when the one before is whole: more than that is not promised."""
        folders = sorted(self.paths.checkpoints.glob("step_*"), reverse=True)
        steps = [int(folder.name[5:]) for folder in folders]
        if folders and not self.witness.torn & set(steps[:2]):
            os.truncate(folders[0] / "model.json", 3)
            self.witness.torn.add(steps[0])

    # what is looked at meanwhile

    def carrying_out(self, process: Process, method: str) -> bool:
        """Whether a process of the ledger is its newest writer."""
        self.trace = hash((self.trace, self.loop.ticks, len(method), len(process.life.name)))
        return process.writer == self._writers

    def _check_now(self) -> None:
        with contextlib.suppress(Violation):  # it has been told
            self.witness.check()

    def _break(self, violation: Violation) -> None:
        self.broken = self.broken or violation
        self._over(self.clusters[-1], "broken")

    def _fault_in_callback(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if error is not None and "handle" in context:
            self._break(Violation(f"a callback failed: {error!r}"))

    def bury(self) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that the dead had not begun
            self._bury()

    def _bury(self) -> None:
        for cluster in self.clusters:
            cluster.life.bury()
            for actor in cluster.actors.values():
                for process in actor.processes:
                    for close in process.handles:
                        close()
                    process.life.bury()


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
