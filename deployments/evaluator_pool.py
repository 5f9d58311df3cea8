"""The EvaluatorPool actor: admits batches, hands samples to the workers, commits finished groups, and runs evaluations."""

from __future__ import annotations

import asyncio
from typing import Any

from deployments.calls import RemoteStage, RemoteWorker
from deployments.hosting import StageActor, forwards
from deployments.names import worker_stage
from deployments.teachers import on_demand
from deployments.witness import CommitWitness
from pipeline.engines.weights import WeightStore
from pipeline.evaluation import details
from pipeline.evaluator.pool import EvaluatorPool
from pipeline.evaluator.saved import SavedTrajectories, open_saved
from pipeline.evaluator.spec import NodeSpec
from pipeline.paths import evaluation_id
from pipeline.teacher.on_demand import ScoreOnDemand


@forwards("rollout", "stop")
class EvaluatorPoolActor(StageActor):
    stage = "evaluator_pool"

    def __init__(self, root: str, nodes: tuple[NodeSpec, ...]) -> None:
        self.nodes = nodes
        super().__init__(root)

    async def build(self) -> EvaluatorPool:
        self.fetcher = RemoteStage(self.paths.run_id, "fetcher")
        self.scorer = RemoteStage(self.paths.run_id, "teacher_scorer")
        self.weights = WeightStore(self.paths.weights)
        saved = await asyncio.to_thread(open_saved, self.config.rollout.reuse, self.paths.root.parent)
        await asyncio.gather(*(worker.clear() for worker in self._workers("student")))
        return self._pool("student", on_demand(self.config, self.paths, "inline"), saved)

    async def evaluate(self, step: int) -> dict[str, Any]:
        """Evaluate weight version `step`, which the trainer holds under the evaluation's id until this releases it."""
        name = evaluation_id(step)
        try:
            newest = self.weights.latest()
            if newest is not None and newest.version > step and not self.paths.evaluation(step).exists():
                gone = f"version {step} was replaced by {newest.version} before it could be evaluated"
                return await asyncio.to_thread(details.write_skipped, self.paths.details, name, gone)
            return await (await self.service()).evaluate(name, await self.fetcher.eval_tasks(), step)
        finally:
            self.weights.release(name)

    async def evaluate_teacher(self, alias: str) -> dict[str, Any]:
        """The same tasks, played by a teacher that reads them in its own way."""
        tasks = await self.fetcher.eval_tasks(alias)
        return await self._pool(alias).evaluate(f"teacher_{alias}", tasks, 0)

    def _pool(self, player: str, score: ScoreOnDemand | None = None, saved: SavedTrajectories | None = None) -> EvaluatorPool:
        return EvaluatorPool(
            self.config,
            CommitWitness(self.buffer, self.paths.commits),
            self.fetcher,
            self._workers(player),
            self.scorer.submit,
            nodes=self.nodes,
            details_folder=self.paths.details,
            score=score,
            saved=saved,
        )

    def _workers(self, player: str) -> list[RemoteWorker]:
        return [RemoteWorker(self.paths.run_id, worker_stage(index), node.node, player) for index, node in enumerate(self.nodes)]
