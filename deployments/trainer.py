"""The Trainer actor: the only process that changes the student's parameters."""

from __future__ import annotations

import asyncio
import os
from typing import Any

from deployments.hosting import StageActor, forwards
from deployments.teachers import on_demand
from pipeline.engines.weights import WeightStore
from pipeline.fetcher.catalog import Catalog


@forwards("train", "save")
class TrainerActor(StageActor):
    """Imports torch when it is built, so that the actor's process answers pings meanwhile."""

    stage = "trainer"

    async def build(self) -> Any:
        student = await asyncio.to_thread(self._student)
        from pipeline.trainer.service import TrainerService

        service = TrainerService(
            self.config,
            self.paths,
            student,
            self.buffer,
            WeightStore(self.paths.weights),
            die=lambda: os._exit(1),
            complete=on_demand(self.config, self.paths, "score_at_select"),
        )
        await service.start()
        return service

    def _student(self) -> Any:
        from pipeline.trainer.assets import student_folder

        return student_folder(self.config, Catalog(self.config), self.paths.cache)
