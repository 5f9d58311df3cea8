"""Places a run on Ray: the placement group, the stage actors, the workers and the engines, all started together."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import ray
from ray import serve

from deployments.batcher import BatcherActor
from deployments.calls import unwrap
from deployments.engines import StudentEngine, TeacherEngine, replica_options
from deployments.evaluator_pool import EvaluatorPoolActor
from deployments.evaluator_worker import EvaluatorWorkerActor
from deployments.fetcher import FetcherActor
from deployments.hosting import OPTIONS, StageActor
from deployments.names import NAMESPACE, actor_name, student_app, teacher_app, worker_stage
from deployments.placement import in_bundle, on_this_node, place
from deployments.replay_buffer import ReplayBuffer
from deployments.serving import wait_running
from deployments.teacher_scorer import TeacherScorerActor
from deployments.threads import in_thread
from deployments.trainer import TrainerActor
from pipeline.buffer.reader import read_run_epoch
from pipeline.config.schema import RunConfig
from pipeline.errors import StageFailed
from pipeline.evaluator.spec import NodeSpec
from pipeline.paths import RunPaths
from pipeline.teacher.routing import teacher_groups

log = logging.getLogger(__name__)

ACTORS: tuple[type[StageActor], ...] = (
    ReplayBuffer,
    TrainerActor,
    TeacherScorerActor,
    EvaluatorPoolActor,
    FetcherActor,
    BatcherActor,
)
"""In order of how long they take to start."""
WORKER_OPTIONS = {"num_cpus": 0, "max_restarts": -1, "max_task_retries": 0, "lifetime": "detached", "max_concurrency": 1000}


class Launch:
    """What runs for a run. Handles are kept: an actor whose only handle is dropped is lost."""

    def __init__(self, paths: RunPaths, config: RunConfig, nodes: tuple[NodeSpec, ...]) -> None:
        self._paths = paths
        self._config = config
        self._nodes = nodes
        self.handles: dict[str, Any] = {}

    async def start(self) -> None:
        """Returns when the pipeline can roll out. Teachers may still be in the making: `teachers_ready` waits for them."""
        group = await in_thread(place, self._paths.run_id, self._nodes, self._config.run.start_timeout_s)
        own, options = self._own_arguments(), {**OPTIONS, **on_this_node()}
        for actor in ACTORS:
            self.handles[actor.stage] = self._create(actor.stage, actor, options, str(self._paths.root), *own.get(actor, ()))
        for index, node in enumerate(self._nodes):
            stage, options = worker_stage(index), {**WORKER_OPTIONS, **in_bundle(group, index)}
            self.handles[stage] = self._create(stage, EvaluatorWorkerActor, options, str(self._paths.root), node.node, index)
        await in_thread(self._deploy)
        await self._ready([stage for stage in self.handles if stage != TeacherScorerActor.stage])
        log.info("the stages are ready, the student's engine starts")
        await wait_running(student_app(self._paths.run_id), self._config.run.start_timeout_s)
        log.info("the student's engine serves")
        if self._config.algorithm.mixes():
            await self.teachers_ready()

    def _own_arguments(self) -> dict[type[StageActor], tuple[Any, ...]]:
        """What an actor is told beside the run folder. Those who write to the folder know the run epoch that they belong to."""
        epoch = read_run_epoch(self._paths)
        return {ReplayBuffer: (epoch,), TrainerActor: (epoch,), EvaluatorPoolActor: (self._nodes,)}

    async def teachers_ready(self) -> None:
        await self._ready([TeacherScorerActor.stage])
        if self._config.asks_teacher():
            log.info("the teachers serve")

    def _create(self, stage: str, actor: type, options: dict[str, Any], *args: Any) -> Any:
        return ray.remote(actor).options(name=actor_name(self._paths.run_id, stage), namespace=NAMESPACE, **options).remote(*args)

    def _deploy(self) -> None:
        serve.start(proxy_location="Disabled")
        root = str(self._paths.root)
        run_id = self._paths.run_id
        student = StudentEngine.options(**replica_options(self._config.engine.replicas, self._config.engine.launch)).bind(root)
        targets = [serve.RunTarget(student, name=student_app(run_id), route_prefix=None)]
        for group in teacher_groups(self._config):
            deployment = TeacherEngine.options(**replica_options(group.replicas, group.source.launch)).bind(root, group.name)
            targets.append(serve.RunTarget(deployment, name=teacher_app(run_id, group.name), route_prefix=None))
        serve.run_many(targets, wait_for_applications_running=False)

    async def _ready(self, stages: list[str]) -> None:
        timeout_s = self._config.run.start_timeout_s
        waiting = {stage: asyncio.wrap_future(self.handles[stage].ready.remote().future()) for stage in stages}
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.gather(*waiting.values())
        except TimeoutError as error:
            missing = [stage for stage, future in waiting.items() if future.cancelled() or not future.done()]
            raise StageFailed(
                missing[0] if missing else "start", f"not ready within {timeout_s:.0f} s (run.start_timeout_s)"
            ) from error
        except ray.exceptions.RayError as error:
            failed = next((stage for stage, future in waiting.items() if future.done() and future.exception() is error), "start")
            remote = unwrap(error, failed)
            raise remote from remote.__cause__
