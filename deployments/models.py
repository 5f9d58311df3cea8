"""The Models deployment: the engine of the live student, and engines of checkpoints that are asked for by name."""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from ray import serve

from deployments.engines import OPTIONS
from deployments.hosting import log_to_file
from deployments.multiplex import answers, pack
from deployments.names import MODELS_DEPLOYMENT
from pipeline.engines.base import Completion, Engine, EngineInfo, GenerateRequest, ScoredRow, ScoreRow, Signal, Version
from pipeline.engines.opening import open_student
from pipeline.importing import add_code_folder
from pipeline.service.arguments import Settings
from pipeline.service.loaded import LoadedEngines
from pipeline.service.models import LIVE, Model, Models, weights_key

KEPT_ENGINES = 2
"""Beside the live one."""
PIECES_PAUSE_S = 0.01
"""What is said meanwhile travels together: an item costs both processes about a millisecond."""


@serve.deployment(**OPTIONS | {"name": MODELS_DEPLOYMENT})
class ModelsReplica:
    """Every replica serves every model."""

    async def __init__(self, settings: Settings) -> None:
        log_to_file(settings.runs.service, "models")
        for folder in settings.code:
            add_code_folder(Path(folder))
        self._config = settings.config
        self._models = await asyncio.to_thread(_models, settings)
        live = self._models.live()
        published = self._models.weights is not None and self._models.weights.latest() is not None
        weights = self._models.weights if published else None
        self._live = await asyncio.to_thread(open_student, self._config, live.folder, weights, live.version)
        self._fixed = None if published else (weights_key(live.folder), live.version)
        """What the live engine holds for ever, when no run publishes to it."""
        self._loaded = LoadedEngines(lambda folder, version: open_student(self._config, folder, None, version), KEPT_ENGINES)
        logging.getLogger("models").info("live: %s, version %d", live.folder, live.version)

    async def open(self, name: str) -> tuple[Model, EngineInfo]:
        """Find a model and load it. Raises RequestRefused for one that is not there."""
        model = await asyncio.to_thread(self._models.find, name)
        return model, await self.info(model)

    async def listed(self) -> list[Model]:
        return await asyncio.to_thread(lambda: [self._models.live(), *self._models.checkpoints()])

    async def base(self) -> Path | None:
        """The student that is live when no run has weights."""
        return self._models.base

    async def info(self, model: Model) -> EngineInfo:
        async with self._engine(model) as engine:
            return await engine.info()

    async def generate(self, model: Model, requests: list[GenerateRequest], version: Version) -> list[Completion]:
        async with self._engine(model) as engine:
            return await engine.generate(requests, version)

    async def generate_all(self, model: Model, calls: bytes) -> AsyncIterator[bytes]:
        """Several `generate` at the same time; each is answered when it is done."""
        async with self._engine(model) as engine:
            async for part in answers(pickle.loads(calls), engine.generate):
                yield pack(part)

    async def stream(
        self, model: Model, requests: list[GenerateRequest], version: Version, top_logprobs: int | None
    ) -> AsyncIterator[bytes]:
        """Lists of pieces, packed, as the engine says them; only of an engine that streams."""
        async with self._engine(model) as engine, aclosing(engine.stream(requests, version, top_logprobs)) as stream:
            async for pieces in stream:
                yield pack(pieces)
                await asyncio.sleep(PIECES_PAUSE_S)

    async def score(self, model: Model, rows: list[ScoreRow], signal: Signal, top_k: int) -> list[ScoredRow]:
        async with self._engine(model) as engine:
            return await engine.score(rows, signal, top_k)

    async def check_health(self) -> None:
        """Serve replaces a replica whose engine is dead."""
        await self._live.info()

    @asynccontextmanager
    async def _engine(self, model: Model) -> AsyncIterator[Engine]:
        if model.name == LIVE or (weights_key(model.folder), model.version) == self._fixed:
            yield self._live
        else:
            async with self._loaded.use(model.folder, model.version) as engine:
                yield engine


def _models(settings: Settings) -> Models:
    """The student is made only when there is nothing newer to serve."""
    from pipeline.fetcher.catalog import Catalog
    from pipeline.trainer.assets import student_folder

    models = Models(settings.runs, settings.run, None)
    if models.has_weights():
        return models
    base = student_folder(settings.config, Catalog(settings.config), settings.runs.cache)
    return Models(settings.runs, settings.run, base)
