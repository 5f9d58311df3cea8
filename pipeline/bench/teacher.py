"""`rollout bench teacher`: the teacher stage against scoring inside the commit, and against no teacher at all.

Invariant: the parts are the run's own (buffer, evaluator pool, teacher stage, their settings); only time, the student's engine
and the teacher are stated costs. Times of the workload are given in seconds and divided by `SCALE`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.bench.parts import StandInTokens, bench_buffer, in_this_thread
from pipeline.bench.virtual_time import run_on_virtual_time
from pipeline.buffer.service import BufferService
from pipeline.config.schema import RunConfig
from pipeline.engines.fixed_cost import FixedCostTeacher
from pipeline.engines.scripted import ScriptedEngine
from pipeline.engines.weights import WeightStore
from pipeline.evaluator.pool import EvaluatorPool
from pipeline.evaluator.spec import NodeSpec, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.records import Batch, Sampling, Stopping, Task
from pipeline.teacher.on_demand import ScoreOnDemand
from pipeline.teacher.scorer import TeacherScorer, start_teachers
from pipeline.teacher.teacher import Teacher

Mode = Literal["stage", "inline", "none"]
SCALE = 10.0
ALIAS = "teacher"
FLOOR = (
    "stage_over_none is at least stage_over_none_floor, whatever is scheduled: what ends a step's rollout is scored in a call "
    "of 0.9 s that begins after it. A step begins when the last but one is trained, and from there to its own training takes "
    "m + 1 s without a teacher and m + 0.9 + 1 s with one, m its longest rollout: with at most 8 s that is 1.10 times as "
    "long, or more. Only where the longest way through all steps goes once from a training straight to the next may it be "
    "less, 1.098 for rollouts of 8 s"
)
"""Of the figures of the fixed workload, for any draw."""


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
    replicas: int = 1
    """Of the teacher."""
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


def figures(workload: Workload = Workload()) -> dict[str, float]:
    """stage_over_inline: how many times faster the stage is. stage_over_none: time over that without a teacher.
    stage_over_none_floor: the least that any order of calls reaches (`floor_s`); what lies between is time behind a call of the
    other step, and stage_over_none_two_replicas shows it go. stage_over_bound: where a call costs by the row, so that batching
    saves nothing, time over the largest of the rollout, teacher and training bounds. permits_while_scoring: mean number of groups
    that hold their permits while the teacher works. `_by_sample`: the same with as many permits for samples in place of groups."""
    stage, inline, none = (play(workload, mode) for mode in ("stage", "inline", "none"))
    two = play(replace(workload, replicas=2), "stage")
    found = {
        "stage_over_inline": inline.seconds / stage.seconds,
        "stage_over_none": stage.seconds / none.seconds,
        "stage_over_none_floor": floor_s(workload) / none.seconds,
        "stage_over_none_two_replicas": two.seconds / none.seconds,
        "stage_over_bound": over_bound(workload),
        "permits_while_scoring_stage": stage.permits_while_scoring,
        "permits_while_scoring_inline": inline.permits_while_scoring,
        "calls_stage": stage.calls,
        "calls_inline": inline.calls,
    }
    scarce = replace(workload, permits=workload.permits // workload.rows)
    stage, inline, none = (play(scarce, mode) for mode in ("stage", "inline", "none"))
    return found | {
        "stage_over_inline_by_sample": inline.seconds / stage.seconds,
        "stage_over_none_by_sample": stage.seconds / none.seconds,
        "stage_over_bound_by_sample": over_bound(scarce),
    }


def over_bound(workload: Workload) -> float:
    costly = by_the_row(workload)
    return play(costly, "stage").seconds / max(bounds(costly).values())


def by_the_row(workload: Workload) -> Workload:
    """Where batching saves nothing: a group alone costs the teacher what it did."""
    return replace(workload, call_s=0.0, row_s=workload.call_s / workload.rows)


def bounds(workload: Workload) -> dict[str, float]:
    """Scaled seconds that each stage needs with all of its work at hand. The teacher needs a call a staleness window at least."""
    rows = workload.steps * workload.groups * workload.rows
    windows = -(-workload.steps // (workload.max_staleness + 1))
    return {
        "rollout": sum(workload.seconds().values()) / workload.permits,
        "teacher": (rows * workload.row_s + windows * workload.call_s) / SCALE,
        "training": workload.steps * workload.train_s / SCALE,
    }


def floor_s(workload: Workload) -> float:
    """Scaled seconds that no order of calls is below: the longest path through the edges of `_steps`, where no group waits for a
    permit or for an idle teacher, and the last one of a step still takes a call of its own after its rollout."""
    seconds = workload.seconds()
    trained = [0.0]
    for step in range(1, workload.steps + 1):
        first = (step - 1) * workload.groups
        rolled = trained[max(0, step - 1 - workload.max_staleness)] + max(seconds[first + slot] for slot in range(workload.groups))
        scored = rolled + (workload.call_s + workload.rows * workload.row_s) / SCALE
        trained.append(max(scored, trained[-1]) + workload.train_s / SCALE)
    return trained[-1]


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
        engines = [_Watched(FixedCostTeacher(config.teachers[ALIAS])) for _ in range(workload.replicas)]
        scorer = TeacherScorer(config, buffer, {ALIAS: engines}, {}, StandInTokens(), lambda dataset, count: (), loop.time)
        await start_teachers(scorer.teachers, StandInTokens())
        specs = specs_from_config(config)
        nodes = (NodeSpec("bench", (), float(workload.permits * workload.rows), 1.0),)
        weights = WeightStore(paths.weights)
        weights.publish(0, _nothing)
        student = ScriptedEngine(config.engine, weights)
        worker = EvaluatorWorker(config, StandInTokens(), student, specs, "bench", offload=in_this_thread)

        async def wake() -> None:
            scorer.submit()

        async def teachers() -> Mapping[str, Teacher]:
            return scorer.teachers

        score = ScoreOnDemand(teachers, config.teacher_stage) if mode == "inline" else None
        pool = EvaluatorPool(
            config, buffer, _Tasks(workload, mode), [worker], wake, nodes=nodes, details_folder=paths.details,
            offload=in_this_thread, score=score,
        )  # fmt: skip
        for engine in engines:
            engine.permits = lambda: pool.report().detail["tokens_held"] / workload.rows
        stage = asyncio.create_task(scorer.run()) if mode == "stage" else None
        try:
            await _steps(workload, pool, buffer, weights)
        finally:
            await pool.close()
            if stage is not None:
                stage.cancel()
                await asyncio.wait([stage])
        seen = [permits for engine in engines for permits in engine.seen]
        return Played(loop.time(), float(np.mean(seen)) if seen else 0.0, sum(engine.calls for engine in engines))


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
        while await buffer.wait_selection(step, 60.0) is None:
            continue
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
        self.seen: list[float] = []

    async def info(self) -> Any:
        return await self._engine.info()

    async def score(self, *args: Any) -> Any:
        self.calls += 1
        self.seen.append(self.permits())
        scored = await self._engine.score(*args)
        self.seen.append(self.permits())
        return scored

    async def generate(self, *args: Any) -> Any:
        return await self._engine.generate(*args)

    async def close(self) -> None:
        await self._engine.close()


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


def _nothing(folder: Path) -> None:
    """Weights that nobody loads."""
