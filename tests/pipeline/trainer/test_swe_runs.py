"""Two whole runs of `configs/swe_dagger.yaml` in one process, every stage without Ray: a teacher that takes over, and a replay of
what came of it."""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.agents.mixing import kappa
from pipeline.buffer.schema import create_run
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.config.loading import load
from pipeline.config.schema import RunConfig
from pipeline.engines.renderer import ChatRenderer
from pipeline.engines.scripted import ScriptedEngine
from pipeline.engines.weights import WeightStore
from pipeline.evaluator.pool import EvaluatorPool
from pipeline.evaluator.saved import open_saved
from pipeline.evaluator.spec import NodeSpec, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.fetcher.catalog import Catalog
from pipeline.fetcher.service import Fetcher
from pipeline.paths import RunPaths, evaluation_id
from pipeline.records import NOBODY, TEACHER, Batch, Group, Task
from pipeline.sandboxes.local import MISSING, LocalSandboxes
from pipeline.trainer.assets import student_folder
from pipeline.trainer.service import TrainerService

CONFIG = Path(__file__).parents[3] / "configs" / "swe_dagger.yaml"
STEPS = 2
SMALL = [
    f"trainer.steps={STEPS}",
    "trainer.warmup_steps=0",
    "rollout.tasks_per_step=3",
    "rollout.samples_per_task=1",
    "student.architecture.hidden=16",
    "student.architecture.mlp=32",
    "engine.kind=scripted",
    "engine.script.tokens=6",
]


class Tasks:
    """The fetcher, as the pool asks it across processes."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    async def tasks(self, ordinals: Sequence[int]) -> list[Task]:
        return self._fetcher.tasks(ordinals)

    async def replacement(self, ordinal: int) -> Task | None:
        return await self._fetcher.replacement(ordinal)


class Stages:
    """Of one run, in this process."""

    def __init__(self, config: RunConfig, paths: RunPaths, boxes: Path) -> None:
        self.config, self.paths, self.boxes = config, paths, boxes
        create_run(paths, {})
        self.buffer = BufferService(paths, BufferSettings.from_config(config), threaded=False)

    async def run(self) -> list[dict[str, Any]]:
        """The result of every step."""
        catalog, weights, specs = Catalog(self.config), WeightStore(self.paths.weights), specs_from_config(self.config)
        student = student_folder(self.config, catalog, self.paths.cache)
        engine = ScriptedEngine(self.config.engine, weights, student)
        sandboxes = {"swe": LocalSandboxes(root=self.boxes)}
        worker = EvaluatorWorker(self.config, ChatRenderer.load(student), engine, specs, "here", sandboxes=sandboxes)
        fetcher = Fetcher(self.config, catalog, self.buffer)
        saved = open_saved(self.config.rollout.reuse, self.paths.root.parent)
        pool = EvaluatorPool(
            self.config, self.buffer, Tasks(fetcher), [worker], _nobody, nodes=(NodeSpec("here", (), 8, 8),),
            details_folder=self.paths.details, saved=saved,
        )  # fmt: skip
        trainer = TrainerService(self.config, self.paths, student, self.buffer, weights)
        await trainer.start()
        results = []
        for step in range(1, STEPS + 1):
            batches = [Batch(f"{step}.{ordinal}", "swe", "swe", (ordinal,)) for ordinal in await fetcher.fetch(step)]
            await pool.rollout(step, batches)
            weights.release(evaluation_id(step - 1))  # nobody evaluates here
            results.append(await trainer.train(step))
        await pool.close()
        await trainer.close()
        return results

    async def groups(self) -> list[Group]:
        return await self.buffer.read(list(range(3 * STEPS)), columns=False)


@asynccontextmanager
async def stages(folder: Path, name: str, *overrides: str) -> AsyncIterator[Stages]:
    made = Stages(load(CONFIG, [*SMALL, *overrides]).config, RunPaths(folder / "runs" / name), folder / "boxes")
    await made.buffer.open(new_run_epoch=True)
    try:
        yield made
    finally:
        await made.buffer.close()


async def test_aggrevate_trains_on_both_and_iter_sft_on_what_it_saved(tmp_path: Path):
    if shutil.which("bwrap") is None:
        pytest.skip(f"did not run: {MISSING}")
    mixing = ["algorithm.name=aggrevate", "algorithm.t_max.start=2"]
    async with stages(tmp_path, "mixed", *mixing) as mixed:
        results, groups = await mixed.run(), await mixed.groups()
    turns = {group.ordinal: "".join(turn["executor"][0] for turn in group.samples[0].turns) for group in groups}
    for group in groups:
        assert re.fullmatch(f"s{{{kappa(group.task, 2)}}}t+", turns[group.ordinal])
        assert group.samples[0].reward == 1.0
    assert len(set(turns.values())) > 1
    assert all(result["loss_imitation"] > 0 for result in results)
    assert any(result["loss_anchor"] != 0 for result in results)

    replay = ["algorithm.name=iter_sft", f"rollout.reuse={mixed.paths.root}", "rollout.filters.rejection=all"]
    async with stages(tmp_path, "replayed", *replay) as replayed:
        results, again = await replayed.run(), await replayed.groups()
    for group, first in zip(again, groups, strict=True):
        (sample,), (earlier,) = group.samples, first.samples
        assert sample.token_ids.tolist() == earlier.token_ids.tolist() and (sample.versions == -1).all()
    trained = [result["tokens"] for result in results]
    assert sum(trained) == sum(int(np.sum(group.samples[0].loss_mask)) for group in groups)
    assert all(result["loss_imitation"] > 0 for result in results)
    assert {int(value) for group in groups for value in group.samples[0].executor} >= {NOBODY, TEACHER}


async def _nobody() -> None:
    """No teacher scores anything."""
