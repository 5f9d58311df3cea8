"""A long run of small steps, and what grows with it. Everything of the pipeline but Ray, in one process, which is why the process
is looked at: open files and memory of every part together. `pytest -s` prints the figures."""

from __future__ import annotations

import asyncio
import gc
import io
import json
import time
from contextlib import AsyncExitStack, asynccontextmanager, closing
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.batcher.service import Batcher
from pipeline.buffer.reader import read_status
from pipeline.buffer.schema import create_run, open_reader
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.cli.runs import create_run_folder
from pipeline.config.loading import load, read_config
from pipeline.engines.fixed_cost import FixedCostTeacher
from pipeline.engines.opening import open_student
from pipeline.engines.renderer import ChatRenderer
from pipeline.engines.weights import WeightStore
from pipeline.evaluator.pool import EvaluatorPool
from pipeline.evaluator.spec import NodeSpec, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.fetcher.catalog import Catalog
from pipeline.fetcher.service import Fetcher
from pipeline.observe.observer import Observer
from pipeline.paths import RunPaths
from pipeline.teacher.scorer import TeacherScorer
from pipeline.trainer.assets import student_folder
from pipeline.trainer.service import TrainerService

TINY = Path(__file__).parents[1] / "e2e" / "tiny.yaml"
STEPS, EVERY, LIFE = 2000, 250, 500
"""Steps in all, between two looks, and between two resumes."""
KEPT_GROUPS = 40
SETTINGS = (
    f"trainer.steps={STEPS}", f"buffer.keep_groups={KEPT_GROUPS}", "engine.script.seconds=0", "teachers.teacher.fixed_cost_s=0",
    "eval.hold_s=0.001", "observe.bars=false", "observe.trackers=[]",
)  # fmt: skip
"""Nothing takes time but the pipeline; nobody evaluates, so that no version is held for it."""
MB = 2**20


class Tasks:
    """The fetcher as the pool sees it."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher
        self.replacement = fetcher.replacement

    async def tasks(self, ordinals: Any) -> list[Any]:
        return self._fetcher.tasks(ordinals)


class Life:
    """One life of the run's stages, from its folder. The steps' edges are those of the workflow."""

    def __init__(self, paths: RunPaths) -> None:
        self._config, self._paths = read_config(paths.config).config, paths
        self._began = time.perf_counter()
        self.resumed_s = 0.0
        """Until the first new group was committed."""

    @asynccontextmanager
    async def stages(self):
        config, paths = self._config, self._paths
        catalog = Catalog(config)
        student = student_folder(config, catalog, paths.cache)
        renderer, weights = ChatRenderer.load(student), WeightStore(paths.weights)
        async with AsyncExitStack() as stack:
            self.buffer = BufferService(paths, BufferSettings.from_config(config))
            await self.buffer.open(new_run_epoch=True)
            stack.push_async_callback(self.buffer.close)
            self._trainer = TrainerService(config, paths, student, self.buffer, weights)
            stack.push_async_callback(self._trainer.close)
            await self._trainer.start()
            engine = open_student(config, student, weights)
            stack.push_async_callback(engine.close)
            teacher = FixedCostTeacher(config.teachers["teacher"], student)
            scorer = TeacherScorer(config, self.buffer, {"teacher": [teacher]}, {"teacher": renderer}, renderer, catalog.shots)
            await scorer.start()

            async def wake() -> None:
                scorer.submit()

            self._fetcher, self._batcher = Fetcher(config, catalog, self.buffer), Batcher(config)
            worker = EvaluatorWorker(config, renderer, engine, specs_from_config(config), "here")
            self._pool = EvaluatorPool(
                config, self.buffer, Tasks(self._fetcher), [worker], wake, nodes=(NodeSpec("here", (), 64.0, 8.0),),
                details_folder=paths.details,
            )  # fmt: skip
            stack.push_async_callback(self._pool.close)
            observer = Observer(paths, self.buffer, config, stream=io.StringIO())
            loops = [asyncio.create_task(scorer.run()), asyncio.create_task(observer.run())]
            try:
                yield self
            finally:
                for loop in loops:
                    loop.cancel()
                await asyncio.wait(loops)

    async def play(self, until: int) -> None:
        done = (await self.buffer.steps())["trained_step"]
        self._trained = asyncio.Condition()
        self._step = done
        async with asyncio.TaskGroup() as group:
            group.create_task(self._roll_out(done + 1, until))
            group.create_task(self._train(done + 1, until))

    async def _roll_out(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            async with self._trained:
                await self._trained.wait_for(lambda step=step: self._step >= step - 1 - self._config.rollout.max_staleness)
            tasks = self._fetcher.tasks(await self._fetcher.fetch(step))
            await self._pool.rollout(step, self._batcher.batch(step, tasks))
            self.resumed_s = self.resumed_s or time.perf_counter() - self._began

    async def _train(self, first: int, last: int) -> None:
        for step in range(first, last + 1):
            await self._trainer.train(step)
            async with self._trained:
                self._step = step
                self._trained.notify_all()


def look(paths: RunPaths, step: int) -> dict[str, float]:
    gc.collect()
    process = psutil.Process()
    return {
        "step": step,
        "memory_mb": process.memory_full_info().uss / MB,
        "open_files": process.num_fds(),
        "threads": process.num_threads(),
        "rows_mb": sum(path.stat().st_size for path in paths.groups.glob("*")) / MB,
        "ledger_mb": paths.database.stat().st_size / MB,
        "folders": sum(1 for folder in (paths.checkpoints, paths.weights) for path in folder.iterdir() if path.is_dir()),
    }


@pytest.fixture(scope="module")
def soaked(tmp_path_factory):
    paths = create_run_folder(tmp_path_factory.mktemp("soak"), load(TINY, SETTINGS), "soak", datetime(2030, 1, 1))
    create_run(paths, {"steps": STEPS})
    looks, lives = [], []

    async def live(first: int) -> None:
        life = Life(paths)
        async with life.stages():
            for until in range(first + EVERY, first + LIFE + 1, EVERY):
                began = time.perf_counter()
                await life.play(until)
                looks.append(look(paths, until) | {"step_ms": 1000 * (time.perf_counter() - began) / EVERY})
        lives.append(life.resumed_s)

    for first in range(0, STEPS, LIFE):
        asyncio.run(live(first))
    for seen in looks:
        print(json.dumps({name: round(value, 1) for name, value in seen.items()}))
    print(json.dumps({"resume_s": [round(seconds, 2) for seconds in lives]}))
    return looks, lives, paths


@pytest.mark.slow
@pytest.mark.timeout(1200)
class TestWhatDoesNotGrow:
    """Files, threads and times of the first life are left out: until then something is loaded for the first time."""

    def test_memory(self, soaked):
        """Within a life: the models of each are built anew in this one process, which leaves something behind."""
        looks, _, _ = soaked
        lives = [looks[first : first + LIFE // EVERY] for first in range(0, len(looks), LIFE // EVERY)]
        assert max(life[-1]["memory_mb"] - life[0]["memory_mb"] for life in lives) < 5

    def test_open_files_and_threads(self, soaked):
        looks, _, _ = soaked
        assert {seen["open_files"] for seen in looks[LIFE // EVERY :]} == {looks[-1]["open_files"]}
        assert max(seen["threads"] for seen in looks) <= looks[LIFE // EVERY]["threads"] + 2

    def test_time_of_a_step_and_of_a_resume(self, soaked):
        looks, lives, _ = soaked
        assert looks[-1]["step_ms"] < 2 * looks[LIFE // EVERY]["step_ms"]
        assert max(lives[1:]) < 2 * min(lives[1:]) + 0.5

    def test_what_is_kept_of_what_was_trained(self, soaked):
        looks, _, paths = soaked
        assert max(seen["folders"] for seen in looks) <= 2 + 1 + 3, "checkpoints, one of them on its way, and weights"
        with closing(open_reader(paths.database)) as db:
            rows = db.execute("SELECT count(*) FROM payloads WHERE name = 'rows'").fetchone()[0]
        config = read_config(paths.config).config
        assert rows <= KEPT_GROUPS + config.rollout.tasks_per_step * 2 * config.trainer.save_every

    def test_everything_was_trained_once(self, soaked):
        found, tasks = read_status(soaked[2]), read_config(soaked[2].config).config.rollout.tasks_per_step
        assert (found["step"], found["ordinals"]["trained"], found["ordinals"]["fetched"]) == (STEPS, STEPS * tasks, STEPS * tasks)
        assert found["attempts"]["regenerated"] == 0
