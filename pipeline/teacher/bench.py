"""`rollout bench teacher`: the teacher stage against scoring inside the commit, and against no teacher at all.

Invariant: the parts are the run's own (buffer, evaluator pool, teacher stage, their settings); only time, the student's engine
and the teacher are stated costs. Times of the workload are given in seconds and divided by `SCALE`.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.buffer.schema import create_run
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.config.schema import RunConfig
from pipeline.engines.fixed_cost import FixedCostTeacher
from pipeline.engines.scripted import ScriptedEngine
from pipeline.engines.weights import WeightStore
from pipeline.evaluator.pool import EvaluatorPool
from pipeline.evaluator.spec import NodeSpec, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.paths import RunPaths
from pipeline.records import Batch, Sampling, Stopping, Task
from pipeline.teacher.on_demand import ScoreOnDemand
from pipeline.teacher.scorer import TeacherScorer, start_teachers
from pipeline.teacher.teacher import Teacher
from pipeline.teacher.virtual_time import run_on_virtual_time

Mode = Literal["stage", "inline", "none"]
SCALE = 10.0
ALIAS = "teacher"


@dataclass(frozen=True, slots=True)
class Workload:
    """Seconds before division by SCALE."""

    steps: int = 12
    groups: int = 8
    rows: int = 4
    permits: int = 16
    """Groups that roll out at the same time."""
    max_staleness: int = 1
    rollout_s: tuple[float, float] = (1.0, 8.0)
    """Log-uniform, by ordinal; all rows of a group take the same time."""
    train_s: float = 1.0
    call_s: float = 0.9
    row_s: float = 0.0
    sampler: str = "in_order"
    seed: int = 0

    def seconds(self) -> dict[int, float]:
        low, high = np.log(self.rollout_s)
        drawn = np.random.default_rng(self.seed).uniform(low, high, self.steps * self.groups)
        return {ordinal: float(np.exp(value)) / SCALE for ordinal, value in enumerate(drawn)}


@dataclass(frozen=True, slots=True)
class Played:
    seconds: float
    """Scaled, like all times below."""
    permits_while_scoring: float
    """Mean number of permits that are held while the teacher works."""
    calls: int


def play(workload: Workload, mode: Mode) -> Played:
    """One run of the workload on virtual time."""
    return run_on_virtual_time(_play(workload, mode))


def figures(workload: Workload = Workload(), row_s: float = 0.1) -> dict[str, float]:
    """stage_over_inline: how many times faster the stage is. stage_over_none: time over that without a teacher.
    stage_over_bound: with `row_s` a row, time over the largest of the rollout, teacher and training bounds."""
    stage, inline, none = (play(workload, mode) for mode in ("stage", "inline", "none"))
    costly = replace(workload, row_s=row_s)
    return {
        "stage_over_inline": inline.seconds / stage.seconds,
        "stage_over_none": stage.seconds / none.seconds,
        "stage_over_bound": play(costly, "stage").seconds / max(bounds(costly).values()),
        "permits_while_scoring_stage": stage.permits_while_scoring,
        "permits_while_scoring_inline": inline.permits_while_scoring,
        "calls_stage": stage.calls,
        "calls_inline": inline.calls,
    }


def bounds(workload: Workload) -> dict[str, float]:
    """Scaled seconds that each stage needs with all of its work at hand. The teacher needs a call a staleness window at least."""
    rows = workload.steps * workload.groups * workload.rows
    windows = -(-workload.steps // (workload.max_staleness + 1))
    return {
        "rollout": sum(workload.seconds().values()) / workload.permits,
        "teacher": (rows * workload.row_s + windows * workload.call_s) / SCALE,
        "training": workload.steps * workload.train_s / SCALE,
    }


def bench_config(workload: Workload) -> RunConfig:
    seconds = {str(ordinal): value for ordinal, value in workload.seconds().items()}
    return RunConfig.model_validate(
        {
            "student": {"architecture": {}},
            "engine": {"kind": "scripted", "slots": 4096, "script": {"seconds_by_ordinal": seconds}},
            "teachers": {
                ALIAS: {"engine": "fixed_cost", "fixed_cost_s": workload.call_s / SCALE, "row_cost_s": workload.row_s / SCALE}
            },
            "datasets": {"bench": {}},
            "specs": [{"resource": {"cpu": 1.0}}],
            "rollout": {
                "tasks_per_step": workload.groups,
                "samples_per_task": workload.rows,
                "max_staleness": workload.max_staleness,
                "on_dropped": "shrink",
            },
            "buffer": {"sampler": workload.sampler},
            "algorithm": {"opd": {"signal": "sampled"}},
            "observe": {"details": False},
        }
    )


async def _play(workload: Workload, mode: Mode) -> Played:
    config = bench_config(workload)
    loop = asyncio.get_running_loop()
    async with bench_buffer(config, loop.time) as (buffer, paths):
        engine = _Watched(FixedCostTeacher(config.teachers[ALIAS]))
        scorer = TeacherScorer(config, buffer, {ALIAS: [engine]}, {}, StandInTokens(), lambda dataset, count: (), loop.time)
        await start_teachers(scorer.teachers, StandInTokens())
        specs = specs_from_config(config)
        nodes = (NodeSpec("bench", (), float(workload.permits * workload.rows), 1.0),)
        weights = WeightStore(paths.weights)
        weights.publish(0, _nothing)
        student = ScriptedEngine(config.engine, weights)
        worker = EvaluatorWorker(config, StandInTokens(), student, specs, "bench", offload=_here)

        async def wake() -> None:
            scorer.submit()

        async def teachers() -> Mapping[str, Teacher]:
            return scorer.teachers

        score = ScoreOnDemand(teachers, config.teacher_stage) if mode == "inline" else None
        pool = EvaluatorPool(
            config, buffer, _Tasks(workload, mode), [worker], wake, nodes=nodes, details_folder=paths.details, offload=_here,
            score=score,
        )  # fmt: skip
        engine.permits = lambda: pool.report().detail["tokens_held"] / workload.rows
        stage = asyncio.create_task(scorer.run()) if mode == "stage" else None
        try:
            await _steps(workload, pool, buffer, weights)
        finally:
            await pool.close()
            if stage is not None:
                stage.cancel()
                await asyncio.wait([stage])
        return Played(loop.time(), engine.mean_permits(), engine.calls)


async def _steps(workload: Workload, pool: EvaluatorPool, buffer: BufferService, weights: WeightStore) -> None:
    """The edges of the run's DAG: rollout[k] waits for train[k - 1 - max_staleness], train[k] for train[k - 1]."""
    trained = [asyncio.Event() for _ in range(workload.steps + 1)]
    trained[0].set()
    assigned = [asyncio.Event() for _ in range(workload.steps + 1)]
    assigned[0].set()

    async def rollout(step: int) -> None:
        await trained[max(0, step - 1 - workload.max_staleness)].wait()
        await assigned[step - 1].wait()
        slots = await buffer.assign(step, workload.groups, workload.steps * workload.groups)
        assigned[step].set()
        await pool.rollout(step, [Batch(f"{step}.{s.slot}", "single_turn", "single_turn", (s.ordinal,)) for s in slots])

    async def train(step: int) -> None:
        await trained[step - 1].wait()
        while not await buffer.wait_selectable(step, 60.0):
            continue
        await buffer.select(step)
        await asyncio.sleep(workload.train_s / SCALE)
        await buffer.record_step(step, {})
        weights.publish(step, _nothing)
        trained[step].set()

    async with asyncio.TaskGroup() as group:
        for step in range(1, workload.steps + 1):
            group.create_task(rollout(step))
            group.create_task(train(step))


class _Watched:
    """A teacher that notes how many permits are held while it works."""

    def __init__(self, engine: FixedCostTeacher) -> None:
        self._engine = engine
        self.permits: Callable[[], float] = lambda: 0.0
        self.calls = 0
        self._seen: list[float] = []

    async def info(self) -> Any:
        return await self._engine.info()

    async def score(self, *args: Any) -> Any:
        self.calls += 1
        self._seen.append(self.permits())
        scored = await self._engine.score(*args)
        self._seen.append(self.permits())
        return scored

    async def generate(self, *args: Any) -> Any:
        return await self._engine.generate(*args)

    async def close(self) -> None:
        await self._engine.close()

    def mean_permits(self) -> float:
        return float(np.mean(self._seen)) if self._seen else 0.0


class StandInTokens:
    """Stands in for a renderer: the scripted engine's tokens mean nothing."""

    digest = ""
    vocab_size = 64

    def render(self, messages: Any) -> np.ndarray:
        return np.arange(1, 17, dtype=np.int32)

    def decode(self, token_ids: np.ndarray) -> str:
        return ""


class _Tasks:
    """Implements evaluator.pool.TaskSource."""

    def __init__(self, workload: Workload, mode: Mode) -> None:
        self._workload, self._mode = workload, mode

    async def tasks(self, ordinals: Sequence[int]) -> list[Task]:
        return [self._task(ordinal) for ordinal in ordinals]

    async def replacement(self, ordinal: int) -> Task | None:
        return None

    def _task(self, ordinal: int) -> Task:
        needs = () if self._mode == "none" else ("teacher",)
        messages = (("user", "-"),)
        return Task(
            ordinal, f"bench/{ordinal}", "bench", "single_turn", messages, "-", "exact", self._workload.rows,
            Sampling(), Stopping(), 0, needs, ALIAS,
        )  # fmt: skip


async def _here(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@asynccontextmanager
async def bench_buffer(
    config: RunConfig, clock: Callable[[], float], threaded: bool = False
) -> AsyncIterator[tuple[BufferService, RunPaths]]:
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "bench")
        create_run(paths, {})
        buffer = BufferService(paths, BufferSettings.from_config(config), clock=clock, threaded=threaded)
        await buffer.open(new_run_epoch=True)
        try:
            yield buffer, paths
        finally:
            await buffer.close()


def _nothing(folder: Path) -> None:
    """Weights that nobody loads."""
