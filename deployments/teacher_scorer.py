"""The TeacherScorer actor: scores written groups, teacher by teacher, while rollouts go on."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from deployments.hosting import StageActor, forwards
from deployments.teachers import teacher_engines
from pipeline.engines.renderer import ChatRenderer
from pipeline.fetcher.catalog import Catalog
from pipeline.teacher.scorer import TeacherScorer
from pipeline.trainer.assets import tokenizer_folder


@forwards("drain", "submit")
class TeacherScorerActor(StageActor):
    """Built as soon as every teacher serves, which takes as long as making the teachers."""

    stage = "teacher_scorer"

    async def build(self) -> TeacherScorer:
        catalog = await asyncio.to_thread(Catalog, self.config)
        renderer = ChatRenderer.load(await asyncio.to_thread(tokenizer_folder, self.config, catalog, self.paths.cache))
        engines = await teacher_engines(self.config, self.paths.run_id)
        renderers = {alias: renderer for alias in self.config.teachers}
        scorer = TeacherScorer(self.config, self.buffer, engines, renderers, renderer, catalog.shots, actor=self.stage)
        await scorer.start()
        return scorer

    def background(self) -> Callable[[Any], Awaitable[None]]:
        return TeacherScorer.run
