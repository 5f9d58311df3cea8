"""The Trainer actor: the only process that changes the student's parameters."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from deployments.hosting import StageActor, forwards
from deployments.teachers import on_demand
from deployments.witness import TrainWitness
from pipeline.buffer.reader import run_fence
from pipeline.engines.weights import WeightStore
from pipeline.fetcher.catalog import Catalog


@forwards("train", "stop")
class TrainerActor(StageActor):
    """Imports torch when it is built, so that the actor's process answers pings meanwhile. It saves and publishes until a
    resume, or a trainer after it, has begun; then its process ends."""

    stage = "trainer"

    def __init__(self, root: str, run_epoch: int) -> None:
        self.run_epoch = run_epoch
        super().__init__(root)

    async def build(self) -> Any:
        student = await asyncio.to_thread(self._student)
        from pipeline.trainer.service import TrainerService

        service = TrainerService(
            self.config,
            self.paths,
            student,
            TrainWitness(self.buffer, self.paths.trained),
            WeightStore(self.paths.weights),
            fence=run_fence(self.paths, self.run_epoch, self.stage, await self.buffer.claim(self.stage)),
            epoch=self.run_epoch,
            die=lambda: os._exit(1),
            complete=on_demand(self.config, self.paths, "score_at_select"),
        )
        await service.start()
        return service

    def _student(self) -> Any:
        from pipeline.trainer.assets import student_folder

        return student_folder(self.config, Catalog(self.config), self.paths.cache)
