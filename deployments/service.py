"""The Service deployment: the HTTP routes over the handles of the other two. Holds nothing; any number of clients may come."""

from __future__ import annotations

import time
from typing import Any

from fastapi import FastAPI
from ray import serve

from deployments.api import make_api
from deployments.calls import CALL_S, RemoteDeployment, RemoteEngine
from deployments.detached import start_detached
from deployments.engines import OPTIONS
from deployments.gate import MAX_BODY_BYTES, GateRules
from deployments.hosting import log_to_file
from deployments.names import EVALUATIONS_DEPLOYMENT, MODELS_DEPLOYMENT, SERVICE_DEPLOYMENT
from pipeline.evaluation.plan import EvalRequest
from pipeline.service.arguments import Settings
from pipeline.service.front import Front, Opened
from pipeline.service.models import Model
from pipeline.service.runs import Runs

MAX_IN_FLIGHT = 256
OPENED_S = 1.0
CANCEL_S = 90.0


class RemoteBackend:
    """Implements `pipeline.service.front.Backend`."""

    def __init__(self, app: str, settings: Settings) -> None:
        self._app, self._deadline_s = app, settings.config.engine.call_timeout_s
        self._models = RemoteDeployment(app, MODELS_DEPLOYMENT, self._deadline_s)
        self._opened: dict[str, tuple[float, Opened]] = {}

    async def open(self, name: str) -> Opened:
        """Asked anew after OPENED_S: a request is then one call of the engine, and not two."""
        now = time.monotonic()
        self._opened = {known: entry for known, entry in self._opened.items() if now - entry[0] < OPENED_S}
        if name not in self._opened:
            model, info = await self._models.repeat("open", name)
            engine = RemoteEngine(self._app, MODELS_DEPLOYMENT, self._deadline_s, model)
            self._opened[name] = (time.monotonic(), Opened(model, info, engine))
        return self._opened[name][1]

    async def listed(self) -> list[Model]:
        return await self._models.repeat("listed")


class RemoteEvaluating:
    """Implements `deployments.api.Evaluating`."""

    def __init__(self, app: str) -> None:
        self._jobs = RemoteDeployment(app, EVALUATIONS_DEPLOYMENT, CALL_S)

    async def submit(self, request: EvalRequest, key: str) -> dict[str, Any]:
        return await self._jobs.repeat("submit", request, key)

    async def views(self) -> list[dict[str, Any]]:
        return await self._jobs.repeat("views")

    async def view(self, name: str) -> dict[str, Any]:
        return await self._jobs.repeat("view", name)

    async def sample(self, name: str, sample_id: str) -> dict[str, Any]:
        return await self._jobs.repeat("sample", name, sample_id)

    async def events(self, name: str, after: int, wait_s: float) -> list[dict[str, Any]]:
        return await self._jobs.repeat("events", name, after, wait_s, deadline_s=wait_s + CALL_S)

    async def cancel(self, name: str) -> dict[str, Any]:
        return await self._jobs.repeat("cancel", name, deadline_s=CANCEL_S)

    async def counts(self) -> dict[str, int]:
        return await self._jobs.repeat("counts")


def service_deployment(settings: Settings) -> Any:
    def routes() -> FastAPI:
        """Called in the replica."""
        log_to_file(settings.runs.service, "service")
        app = serve.get_replica_context().app_name
        backend = RemoteBackend(app, settings)
        front = Front(backend, settings.config.engine.call_timeout_s, MAX_IN_FLIGHT)
        rules = GateRules(settings.loopback, settings.token_sha256, MAX_BODY_BYTES, settings.runs.ending)
        runs = Runs(settings.runs, settings.configs, start_detached)
        return make_api(backend, RemoteEvaluating(app), front, runs, rules, settings.runs.evaluations)

    return serve.deployment(**OPTIONS | {"name": SERVICE_DEPLOYMENT})(serve.ingress(routes)())
