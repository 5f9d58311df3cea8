"""Student and teacher engines as Serve deployments. The student's replicas pull published weights; a teacher never changes."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from ray import serve

from deployments.hosting import log_to_file
from deployments.multiplex import answers, pack
from deployments.names import ENGINE_DEPLOYMENT
from deployments.threads import take_turns
from pipeline.config.loading import read_config
from pipeline.config.models import Launch
from pipeline.config.schema import RunConfig
from pipeline.engines.base import Completion, EngineInfo, GenerateRequest, ScoredRow, ScoreRow, Signal, Version
from pipeline.engines.opening import open_student, open_teacher
from pipeline.engines.weights import Published, WeightStore
from pipeline.errors import EngineError
from pipeline.evaluator.admission import INFRASTRUCTURE_CPU
from pipeline.fetcher.catalog import Catalog
from pipeline.heap import tune_collector
from pipeline.paths import RunPaths

OPTIONS: dict[str, Any] = {
    "name": ENGINE_DEPLOYMENT,
    "max_ongoing_requests": 10_000,
    "ray_actor_options": {"num_cpus": INFRASTRUCTURE_CPU},
    "health_check_period_s": 5,
    "health_check_timeout_s": 60,
    "graceful_shutdown_timeout_s": 1,
    "graceful_shutdown_wait_loop_s": 0.1,
}
"""A replica asks for a whole CPU unless told otherwise; the engine itself bounds what runs at the same time."""
POLL_S = 0.1


def replica_options(replicas: int, launch: Launch | None) -> dict[str, Any]:
    """Of a deployment. What a launched server needs stands in a bundle of the replica's own; it sees those GPUs and no others."""
    options: dict[str, Any] = {"num_replicas": replicas}
    if launch is not None and (launch.cpus or launch.gpus):
        cpus = max(launch.cpus, OPTIONS["ray_actor_options"]["num_cpus"])
        options["ray_actor_options"] = {"num_cpus": cpus, "num_gpus": launch.gpus}
        bundle = {"CPU": cpus, "GPU": launch.gpus} if launch.gpus else {"CPU": cpus}
        options["placement_group_bundles"] = [bundle]
    return options


class _EngineReplica:
    """Forwards to the engine that `_open` made."""

    engine: Any

    async def info(self) -> EngineInfo:
        return await self.engine.info()

    async def generate(self, requests: list[GenerateRequest], version: Version) -> list[Completion]:
        return await self.engine.generate(requests, version)

    async def generate_all(self, calls: bytes) -> AsyncIterator[bytes]:
        """Several `generate` at the same time; each is answered when it is done."""
        async for part in answers(pickle.loads(calls), self.engine.generate):
            yield pack(part)

    async def score(self, rows: list[ScoreRow], signal: Signal, top_k: int) -> list[ScoredRow]:
        return await self.engine.score(rows, signal, top_k)

    async def check_health(self) -> None:
        """Serve replaces a replica whose engine is dead."""
        await self.engine.info()


@serve.deployment(**OPTIONS)
class StudentEngine(_EngineReplica):
    async def __init__(self, root: str) -> None:
        paths = RunPaths(Path(root))
        log_to_file(paths, "student_engine")
        take_turns()
        config = read_config(paths.config).config
        weights = WeightStore(paths.weights)
        published = await _first_weights(weights, config.run.start_timeout_s)
        log = paths.log / f"student_server_{os.getpid()}.log"
        self.engine = await asyncio.to_thread(open_student, config, published.path, weights, published.version, log)
        tune_collector()


@serve.deployment(**OPTIONS)
class TeacherEngine(_EngineReplica):
    async def __init__(self, root: str, alias: str) -> None:
        paths = RunPaths(Path(root))
        log_to_file(paths, f"teacher_engine_{alias}")
        take_turns()
        config = read_config(paths.config).config
        self.engine = await asyncio.to_thread(_teacher, config, alias, paths)
        tune_collector()


async def _first_weights(weights: WeightStore, timeout_s: float) -> Published:
    """A replica serves only what was published: it waits for the trainer's first publication."""
    try:
        async with asyncio.timeout(timeout_s):
            while (published := weights.latest()) is None:
                await asyncio.sleep(POLL_S)
    except TimeoutError as error:
        raise EngineError(f"no weights were published within {timeout_s:.0f} s (run.start_timeout_s)") from error
    return published


def _teacher(config: RunConfig, alias: str, paths: RunPaths) -> Any:
    teacher = config.teachers[alias]
    catalog = Catalog(config)
    if teacher.engine == "fixed_cost":
        from pipeline.engines.fixed_cost import FixedCostTeacher
        from pipeline.trainer.assets import tokenizer_folder

        return FixedCostTeacher(teacher, tokenizer_folder(config, catalog, paths.cache))
    if teacher.engine == "openai":
        return open_teacher(config, alias, teacher.path)
    from pipeline.trainer.assets import teacher_folder

    folder = teacher_folder(config, alias, catalog, paths.cache)
    return open_teacher(config, alias, folder, paths.log / f"teacher_server_{alias}_{os.getpid()}.log")
