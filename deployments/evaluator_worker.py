"""An EvaluatorWorker: one a bundle of the run's placement group. It plays samples, and holds nothing that must survive it."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Any

from deployments.calls import RemoteEngine
from deployments.hosting import log_to_file
from deployments.names import ENGINE_DEPLOYMENT, student_app, teacher_app
from pipeline.config.loading import read_config
from pipeline.engines.renderer import ChatRenderer
from pipeline.evaluator.spec import specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.fetcher.catalog import Catalog
from pipeline.paths import RunPaths
from pipeline.records import Sample
from pipeline.teacher.routing import teacher_groups


class EvaluatorWorkerActor:
    """Not retried by Ray: a call that its death ends is a lost attempt, and the pool starts another."""

    def __init__(self, root: str, node: str) -> None:
        self.paths = RunPaths(Path(root))
        self.node = node
        log_to_file(self.paths, f"evaluator_worker_{node}")
        self.log = logging.getLogger("evaluator_worker")
        self._started = asyncio.ensure_future(self._build())

    async def _build(self) -> dict[str, EvaluatorWorker]:
        """A player of the student's tasks, and one for each teacher (for the teachers' own evaluation)."""
        config = read_config(self.paths.config).config
        catalog = await asyncio.to_thread(Catalog, config)
        folder = await asyncio.to_thread(_tokenizer, config, catalog, self.paths.cache)
        renderer = ChatRenderer.load(folder)
        deadline_s = config.engine.call_timeout_s
        engines = {"student": student_app(self.paths.run_id)}
        for group in teacher_groups(config):
            engines |= {alias: teacher_app(self.paths.run_id, group.name) for alias in group.aliases}
        specs = specs_from_config(config)
        return {
            player: EvaluatorWorker(config, renderer, RemoteEngine(app, ENGINE_DEPLOYMENT, deadline_s), specs, self.node)
            for player, app in engines.items()
        }

    async def ready(self) -> int:
        await asyncio.shield(self._started)
        return os.getpid()

    async def ping(self) -> int:
        return os.getpid()

    async def run_samples(self, *args: Any, player: str = "student") -> list[Sample]:
        players = await asyncio.shield(self._started)
        return await players[player].run_samples(*args)


def _tokenizer(config: Any, catalog: Catalog, cache: Path) -> Path:
    from pipeline.trainer.assets import tokenizer_folder

    return tokenizer_folder(config, catalog, cache)
