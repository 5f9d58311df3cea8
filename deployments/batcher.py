"""The Batcher actor: turns a step's tasks into batches."""

from __future__ import annotations

from deployments.calls import RemoteStage
from deployments.hosting import StageActor
from pipeline.batcher.service import Batcher
from pipeline.records import Batch


class BatcherActor(StageActor):
    stage = "batcher"

    async def build(self) -> Batcher:
        self.fetcher = RemoteStage(self.paths.run_id, "fetcher")
        return Batcher(self.config)

    async def batch(self, step: int, ordinals: list[int]) -> list[Batch]:
        batcher = await self.service()
        return batcher.batch(step, await self.fetcher.tasks(ordinals))
