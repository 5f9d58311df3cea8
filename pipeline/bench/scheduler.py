"""`rollout bench scheduler`: what batching, admission and an episode cost, and how well the pool is filled.

Invariant: the parts are the run's own (batcher, placement pool, evaluator pool, worker, durable ledger). Costs are processor time;
the makespan is on virtual time.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.batcher.service import Batcher
from pipeline.bench.parts import StandInTokens, bench_buffer, in_this_thread
from pipeline.bench.virtual_time import run_on_virtual_time
from pipeline.buffer.api import Assignment, Attempt
from pipeline.config.schema import RunConfig
from pipeline.evaluator.placement import PlacementPool
from pipeline.evaluator.pool import LOOK_AHEAD, EvaluatorPool
from pipeline.evaluator.spec import NodeSpec, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.heap import tune_collector
from pipeline.records import Batch, Group, Sampling, Stopping, Task

GROUP = 4
"""Samples a task, where nothing else is said."""
EPISODES = 10_000
EPISODE_S = 10.0
SIZES = (10**3, 10**4, 10**5, 10**6)
SEEDS = range(10)
TYPE = "single_turn"


@dataclass(frozen=True, slots=True)
class Jobs:
    """Batches of the makespan, by place: tokens, and seconds that all samples of a batch take."""

    widths: tuple[int, ...]
    seconds: tuple[float, ...]
    capacity: int = 64

    @classmethod
    def draw(cls, seed: int, count: int = 500) -> Jobs:
        """1 to 16 tokens, 1 to 30 s log-uniform."""
        rng = np.random.default_rng(seed)
        widths = rng.integers(1, 17, count)
        seconds = np.exp(rng.uniform(np.log(1.0), np.log(30.0), count))
        return cls(tuple(map(int, widths)), tuple(map(float, seconds)))

    def bound_s(self) -> float:
        """No schedule is shorter: all tokens in use all the time, or the longest batch alone."""
        work = sum(width * seconds for width, seconds in zip(self.widths, self.seconds, strict=True))
        return max(work / self.capacity, *self.seconds)


def figures(sizes: Sequence[int] = SIZES, seeds: Sequence[int] = SEEDS, episodes: int = EPISODES) -> dict[str, float]:
    """us_per_sample_<n>: batching and admission of n samples. makespan_ratio: of the first seed, with strategy fifo, which knows no
    durations, and the default patience; _mean and _worst over all seeds; _longest_first: the mean where lengths are known.
    us_per_episode, kb_per_episode: scripted episodes in flight at once, from the batch to the assembled group; _committed: with the
    durable ledger beneath."""
    found = {f"us_per_sample_{_power(size)}": us_per_sample(size) for size in sizes}
    ratios = [makespan_ratio(Jobs.draw(seed), "fifo") for seed in seeds]
    known = [makespan_ratio(Jobs.draw(seed), "longest_first") for seed in seeds]
    found |= {
        "makespan_ratio": ratios[0],
        "makespan_ratio_mean": float(np.mean(ratios)),
        "makespan_ratio_worst": max(ratios),
        "makespan_ratio_longest_first": float(np.mean(known)),
    }
    return found | episode_costs(episodes)


def us_per_sample(samples: int) -> float:
    """Microseconds a sample from tasks to batches to tokens and back, `LOOK_AHEAD` batches waiting at a time."""
    config = bench_config(tasks_per_step=1, resource={"cpu": 4, "memory_gb": 16})
    tasks = [_task(ordinal, GROUP, {}) for ordinal in range(samples // GROUP)]
    began = time.process_time()
    batches = Batcher(config).batch(1, tasks)
    asyncio.run(_admit_all(config, batches))
    return (time.process_time() - began) / samples * 1e6


async def _admit_all(config: RunConfig, batches: list[Batch]) -> None:
    pool = PlacementPool([NodeSpec(f"node{place}", (), 96.0, 384.0) for place in range(4)])
    sample = specs_from_config(config)[TYPE].sample_resource
    looking, waiting = asyncio.Semaphore(LOOK_AHEAD), iter(batches)

    async def lane(batches: Iterator[Batch]) -> None:
        for batch in batches:
            count = len(batch.ordinals) * GROUP
            async with looking:
                tokens = await pool.acquire(sample.times(count), sample, count)
            await asyncio.sleep(0)
            pool.release(tokens)

    await asyncio.gather(*(lane(waiting) for _ in range(4 * LOOK_AHEAD)))


def makespan_ratio(jobs: Jobs, strategy: str) -> float:
    """Virtual seconds of one rollout of all batches over the lower bound."""
    config = bench_config(tasks_per_step=len(jobs.widths), strategy=strategy)
    tasks = [
        _task(place, width, {"script": {"run_s": seconds}, "row": {"expected_length": seconds}})
        for place, (width, seconds) in enumerate(zip(jobs.widths, jobs.seconds, strict=True))
    ]
    rolled = run_on_virtual_time(_rollout(config, tasks, float(jobs.capacity)))
    return rolled.seconds / jobs.bound_s()


def episode_costs(episodes: int = EPISODES) -> dict[str, float]:
    config = bench_config(tasks_per_step=episodes // GROUP)
    tasks = [_task(ordinal, GROUP, {"script": {"run_s": EPISODE_S}}) for ordinal in range(episodes // GROUP)]
    tune_collector()  # as the processes of a run do
    rolled = run_on_virtual_time(_rollout(config, tasks, float(episodes), NotingLedger(tasks), look_s=EPISODE_S / 2))
    durable = run_on_virtual_time(_rollout(config, tasks, float(episodes)))
    return {
        "us_per_episode": rolled.cpu_s / episodes * 1e6,
        "kb_per_episode": rolled.grown_bytes / episodes / 1024,
        "us_per_episode_committed": durable.cpu_s / episodes * 1e6,
    }


@dataclass(frozen=True, slots=True)
class _Rolled:
    seconds: float
    """On virtual time."""
    cpu_s: float
    grown_bytes: int
    """Resident memory at `look_s`, over that of the beginning."""


async def _rollout(
    config: RunConfig, tasks: list[Task], cpus: float, noting: NotingLedger | None = None, look_s: float | None = None
) -> _Rolled:
    loop = asyncio.get_running_loop()
    async with bench_buffer(config, loop.time) as (durable, paths):
        buffer = noting or durable
        worker = EvaluatorWorker(config, StandInTokens(), NoEngine(), specs_from_config(config), "bench", offload=in_this_thread)
        nodes = (NodeSpec("bench", (), cpus, 1.0),)
        pool = EvaluatorPool(
            config, buffer, Given(tasks), [worker], _nobody, nodes=nodes, details_folder=paths.details, offload=in_this_thread
        )
        await buffer.assign(1, len(tasks), None)
        batches = Batcher(config).batch(1, tasks)
        before, began, started = _resident(), time.process_time(), loop.time()
        rolling = asyncio.create_task(pool.rollout(1, batches))
        grown = 0
        if look_s is not None:
            await asyncio.sleep(look_s)
            grown = _resident() - before
        await rolling
        await pool.close()
        return _Rolled(loop.time() - started, time.process_time() - began, grown)


class NotingLedger:
    """What a rollout asks of the buffer, answered from memory."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._slots = [Assignment(1, slot, task.ordinal, "pending") for slot, task in enumerate(tasks)]
        self.groups: list[Group] = []

    async def assign(self, step: int, count: int, limit: int | None) -> list[Assignment]:
        return self._slots

    async def start_attempt(self, ordinal: int, weight_version: int, worker: str) -> Attempt:
        return Attempt(ordinal, number=1, failures=0, epoch=1)

    async def commit(self, attempt: Attempt, group: Group) -> bool:
        self.groups.append(group)
        return True

    async def close_rollout(self, step: int) -> None:
        return None


class Given:
    """Implements evaluator.pool.TaskSource over tasks that are there."""

    def __init__(self, tasks: Sequence[Task]) -> None:
        self._tasks = {task.ordinal: task for task in tasks}

    async def tasks(self, ordinals: Sequence[int]) -> list[Task]:
        return [self._tasks[ordinal] for ordinal in ordinals]

    async def replacement(self, ordinal: int) -> Task | None:
        return None


class NoEngine:
    """Scripted episodes make their tokens up."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"a scripted episode asked the engine to {name}")


def bench_config(*, tasks_per_step: int, strategy: str = "fifo", resource: dict[str, float] | None = None) -> RunConfig:
    return RunConfig.model_validate(
        {
            "student": {"architecture": {}},
            "datasets": {"bench": {}},
            "algorithm": {"name": "grpo"},
            "specs": [{"agent": "scripted", "resource": resource or {"cpu": 1}}],
            "rollout": {"tasks_per_step": tasks_per_step, "max_staleness": 0, "strategy": strategy, "on_dropped": "shrink"},
            "observe": {"details": False},
        }
    )


def _task(ordinal: int, samples: int, metadata: dict[str, Any]) -> Task:
    return Task(
        ordinal, f"bench/{ordinal}", "bench", TYPE, (("user", "-"),), "-", "exact", samples, Sampling(), Stopping(), 0,
        metadata=metadata,
    )  # fmt: skip


def _resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _power(size: int) -> str:
    return f"1e{round(np.log10(size))}"


async def _nobody() -> None:
    return None
