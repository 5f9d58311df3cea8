"""The Fetcher actor: assigns ordinals to steps and turns ordinals into tasks."""

from __future__ import annotations

import asyncio

from deployments.hosting import StageActor, forwards
from pipeline.fetcher.catalog import Catalog
from pipeline.fetcher.service import Fetcher


@forwards("fetch", "tasks", "replacement", "eval_tasks")
class FetcherActor(StageActor):
    stage = "fetcher"

    async def build(self) -> Fetcher:
        catalog = await asyncio.to_thread(Catalog, self.config)
        return Fetcher(self.config, catalog, self.buffer)
