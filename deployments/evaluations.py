"""The Evaluations deployment: the durable jobs, and the one process that plays them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from ray import serve

from deployments.calls import EngineCalls, RemoteDeployment
from deployments.engines import OPTIONS
from deployments.hosting import log_to_file
from deployments.names import EVALUATIONS_DEPLOYMENT, MODELS_DEPLOYMENT
from pipeline.engines.renderer import ChatRenderer
from pipeline.evaluation.jobs import Jobs, OnSample
from pipeline.evaluation.plan import EvalRequest, make_plan
from pipeline.evaluation.store import JobStore
from pipeline.evaluator.playing import play_here
from pipeline.fetcher.catalog import Catalog
from pipeline.importing import add_code_folder
from pipeline.records import Task
from pipeline.service.arguments import Settings
from pipeline.service.models import Model, Models


class RemotePlayer:
    """Implements `pipeline.evaluation.jobs.Player` over the Models deployment."""

    def __init__(self, settings: Settings, models: Models, app: str) -> None:
        self._config, self._models, self._app = settings.config, models, app

    def link(self, model: str, target: Path) -> tuple[str, int]:
        linked = self._models.link(model, target)
        return linked.name, linked.version

    async def play(
        self, model: Path, version: int, tasks: Sequence[Task], done: Collection[tuple[int, int]], on_sample: OnSample
    ) -> None:
        settings, linked = self._config.engine, Model(model.parent.name, model, version)
        engine = EngineCalls(self._app, MODELS_DEPLOYMENT, settings.call_timeout_s, settings.replicas, linked)
        await play_here(self._config, engine, ChatRenderer.load(model), tasks, version, on_sample, done)


@serve.deployment(**OPTIONS | {"name": EVALUATIONS_DEPLOYMENT})
class Evaluations:
    """One replica. Its death costs the samples that were being played; the next one plays them again."""

    async def __init__(self, settings: Settings) -> None:
        log_to_file(settings.runs.service, "evaluations")
        for folder in settings.code:
            add_code_folder(Path(folder))
        config, catalog = settings.config, Catalog(settings.config)
        app = serve.get_replica_context().app_name
        base = await RemoteDeployment(app, MODELS_DEPLOYMENT, config.run.start_timeout_s).repeat("base")
        player = RemotePlayer(settings, Models(settings.runs, settings.run, base), app)
        store = JobStore(settings.runs.evaluations)
        self._jobs = Jobs(store, player, lambda request: make_plan(request, config, catalog), config.eval.min_coverage)
        await self._jobs.start()

    async def submit(self, request: EvalRequest, key: str) -> dict[str, Any]:
        return await self._jobs.submit(request, key)

    async def views(self) -> list[dict[str, Any]]:
        return self._jobs.views()

    async def view(self, name: str) -> dict[str, Any]:
        return self._jobs.view(name)

    async def sample(self, name: str, sample_id: str) -> dict[str, Any]:
        return self._jobs.sample(name, sample_id)

    async def events(self, name: str, after: int, wait_s: float) -> list[dict[str, Any]]:
        return await self._jobs.events(name, after, wait_s)

    async def cancel(self, name: str) -> dict[str, Any]:
        return await self._jobs.cancel(name)

    async def counts(self) -> dict[str, int]:
        return self._jobs.counts()
