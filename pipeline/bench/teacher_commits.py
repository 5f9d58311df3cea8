"""How long a commit takes while the teacher is off, slow or dead. Real time, a real file system.

Invariant measured: a commit is a bounded write, whatever the teacher does.
"""

from __future__ import annotations

import asyncio
import time
from typing import Literal

import numpy as np

from pipeline.bench.parts import StandInTokens, bench_buffer
from pipeline.bench.teacher import ALIAS, Workload, bench_config
from pipeline.engines.base import ScoredRow
from pipeline.engines.fixed_cost import FixedCostTeacher
from pipeline.records import NOBODY, STUDENT, Group, Sample, Sampling, Stopping, Task
from pipeline.teacher.scorer import TeacherScorer

State = Literal["off", "slow", "dead"]
TOKENS = 64
EVERY_S = 0.005
"""Between two commits: a busy run's. Back to back, 200 commits would be over before a slow teacher has made two calls."""


class _Dead(FixedCostTeacher):
    """Takes calls and never answers."""

    async def score(self, *_: object) -> list[ScoredRow]:
        await asyncio.Event().wait()
        return []


def figures(groups: int = 200, rounds: int = 9) -> dict[str, float]:
    """commit_p99_{off,slow,dead}_ms: the 99th percentile of the commits of all rounds, one every `EVERY_S`. A round of `groups`
    commits is of one state, and the rounds take turns, so that what else the machine does falls on all three."""
    found: dict[State, list[float]] = {"off": [], "slow": [], "dead": []}
    order = list(found)
    for _ in range(rounds):
        for state in order:
            found[state] += asyncio.run(_commits(state, groups))
        order.append(order.pop(0))
    return {f"commit_p99_{state}_ms": 1000 * float(np.percentile(seconds, 99)) for state, seconds in found.items()}


async def _commits(state: State, groups: int) -> list[float]:
    """Seconds of each."""
    config = bench_config(Workload(steps=1, groups=groups))
    async with bench_buffer(config, time.time, threaded=True) as (buffer, _):
        engine = (_Dead if state == "dead" else FixedCostTeacher)(config.teachers[ALIAS])
        scorer = TeacherScorer(config, buffer, {ALIAS: [engine]}, {}, StandInTokens(), lambda dataset, count: ())
        stage = asyncio.create_task(scorer.run()) if state != "off" else None
        seconds = []
        for slot in await buffer.assign(1, groups, None):
            attempt = await buffer.start_attempt(slot.ordinal, 0, "bench")
            group = _group(slot.ordinal)
            started = time.perf_counter()
            await buffer.commit(attempt, group)
            seconds.append(time.perf_counter() - started)
            scorer.submit()
            await asyncio.sleep(EVERY_S)
        if stage is not None:
            stage.cancel()
            await asyncio.wait([stage])
    return seconds


def _group(ordinal: int) -> Group:
    task = Task(
        ordinal, f"bench/{ordinal}", "bench", "single_turn", (("user", "-"),), "-", "exact", 4, Sampling(), Stopping(), 0,
        ("teacher",), ALIAS,
    )  # fmt: skip
    return Group(ordinal, 1, 1, task, 0, tuple(_sample(ordinal, index) for index in range(4)))


def _sample(ordinal: int, index: int) -> Sample:
    made = np.arange(TOKENS) >= TOKENS // 2
    return Sample(
        sample_id=f"{ordinal}.{index}",
        index=index,
        status="ok",
        reward=1.0,
        token_ids=np.full(TOKENS, 5, np.int32),
        loss_mask=made.astype(np.uint8),
        logprobs=np.where(made, -1.0, np.nan).astype(np.float32),
        executor=np.where(made, STUDENT, NOBODY).astype(np.uint8),
        versions=np.where(made, 0, -1).astype(np.int32),
        finish_reason="finish",
    )
