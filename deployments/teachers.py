"""Teachers seen from an actor: their Serve applications as engines, and, outside the stage, connected when first needed."""

from __future__ import annotations

import asyncio

from deployments.calls import RemoteEngine
from deployments.names import ENGINE_DEPLOYMENT, teacher_app
from deployments.serving import wait_running
from pipeline.config.schema import RunConfig
from pipeline.engines.renderer import ChatRenderer
from pipeline.fetcher.catalog import Catalog
from pipeline.paths import RunPaths
from pipeline.teacher.on_demand import ScoreOnDemand
from pipeline.teacher.routing import teacher_groups
from pipeline.teacher.scorer import start_teachers
from pipeline.teacher.teacher import Teacher, make_teachers
from pipeline.trainer.assets import tokenizer_folder


async def teacher_engines(config: RunConfig, run_id: str) -> dict[str, list[RemoteEngine]]:
    """One alias of each group -> its replicas, once they serve, which takes as long as making the teachers."""
    engines = {}
    for group in teacher_groups(config):
        app = teacher_app(run_id, group.name)
        await wait_running(app, config.run.start_timeout_s)
        engine = RemoteEngine(app, ENGINE_DEPLOYMENT, config.teacher_stage.call_timeout_s)
        engines[group.name] = [engine] * group.replicas
    return engines


def on_demand(config: RunConfig, paths: RunPaths, mode: str) -> ScoreOnDemand | None:
    """What scores for an actor in this `teacher_stage.mode`; None in the others."""
    if config.teacher_stage.mode != mode or not teacher_groups(config):
        return None
    return ScoreOnDemand(_Connection(config, paths).teachers, config.teacher_stage)


class _Connection:
    def __init__(self, config: RunConfig, paths: RunPaths) -> None:
        self._config, self._paths = config, paths
        self._connecting = asyncio.Lock()
        self._teachers: dict[str, Teacher] | None = None

    async def teachers(self) -> dict[str, Teacher]:
        async with self._connecting:
            if self._teachers is None:
                self._teachers = await self._connect()
            return self._teachers

    async def _connect(self) -> dict[str, Teacher]:
        config = self._config
        catalog = await asyncio.to_thread(Catalog, config)
        renderer = ChatRenderer.load(await asyncio.to_thread(tokenizer_folder, config, catalog, self._paths.cache))
        engines = await teacher_engines(config, self._paths.run_id)
        teachers = make_teachers(config, engines, dict.fromkeys(config.teachers, renderer), catalog.shots)
        await start_teachers(teachers, renderer)
        return teachers
