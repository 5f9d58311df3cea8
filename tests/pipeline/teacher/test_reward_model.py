"""A second scorer on the same primitive: groups that need two fields are ready when both are there."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pipeline.pumps import Pump, PumpKind, supervise
from pipeline.records import Column, Group
from pipeline.teacher.stage import ScoringStage
from tests.pipeline.teacher.fakes import Run, ToyTeacher, make_config, now, opened, running

pytestmark = pytest.mark.looptime
BOTH = ("teacher", "reward_model")


class LengthReward:
    """Implements lane.Scorer: the reward of a sample is the number of tokens that it made."""

    name = "length"

    def __init__(self, seconds: float, replicas: int = 1) -> None:
        self.seconds, self.replicas = seconds, replicas

    def tokens(self, item) -> int:
        return item.tokens

    async def score(self, groups: list[Group], replica: int) -> dict[int, Column | Exception]:
        await asyncio.sleep(self.seconds)
        return {group.ordinal: self._column(group) for group in groups}

    def _column(self, group: Group) -> Column:
        rewards = {sample.sample_id: {"reward": np.asarray([sample.loss_mask.sum()], np.float32)} for sample in group.samples}
        return Column("reward_model", group.ordinal, self.name, "length-1", rewards)


def reward_stage(run: Run, scorer: LengthReward) -> ScoringStage:
    return ScoringStage(
        "reward_model",
        [scorer],
        lambda item: scorer.name,
        run.buffer,
        run.config.teacher_stage,
        capacity=run.config.capacity,
        clock=run.clock,
    )


@pytest.mark.parametrize(("teacher_s", "reward_s"), [(1.0, 5.0), (5.0, 1.0)])
async def test_a_run_with_both_stages(teacher_s, reward_s):
    async with opened(make_config(3)) as run:
        teacher = run.scorer({name: [ToyTeacher(salt, call_s=teacher_s)] for salt, name in enumerate(("ant", "bee", "cat"))})
        reward = reward_stage(run, LengthReward(reward_s))

        async def produce() -> None:
            await run.fill(1, needs=BOTH)
            teacher.submit()
            reward.submit()

        async def train() -> tuple[int, ...]:
            await asyncio.sleep(3)
            assert await run.states() == {"written": 8}
            selection = await run.buffer.wait_selection(1, 60)
            assert selection is not None
            return selection.ordinals

        trained = await supervise(
            [
                Pump("evaluator", PumpKind.PRODUCER, produce),
                Pump("teacher", PumpKind.STAGE, teacher.run, teacher.drain),
                Pump("reward_model", PumpKind.STAGE, reward.run, reward.drain),
                Pump("train", PumpKind.TERMINAL, train),
            ]
        )
        assert sorted(trained) == list(range(8)) and now() == 5.0
        for columns in (await run.columns(list(trained))).values():
            assert set(columns) == set(BOTH)
            assert all(arrays["reward"] == [4.0] for arrays in columns["reward_model"].samples.values())
        assert (teacher.report().finished, reward.report().finished) == (8, 8)


async def test_groups_that_need_one_field_only_are_not_the_other_stages_work():
    async with opened(make_config()) as run:
        reward = reward_stage(run, LengthReward(1.0))
        await run.fill(1)
        async with running(reward):
            await asyncio.sleep(5)
        assert reward.report().started == 0 and await run.states() == {"written": 8}


async def test_a_group_dropped_by_one_stage_leaves_the_other():
    async with opened(make_config(max_consecutive_scoring_drops=50)) as run:
        teacher = run.scorer({"ant": [ToyTeacher(faults=lambda call, rows: ValueError("no"))]})
        reward = reward_stage(run, LengthReward(100.0))
        await run.fill(1, needs=BOTH)
        async with running(teacher), running(reward):
            assert await run.buffer.wait_scored(1, 60)
            await asyncio.sleep(200)
            assert reward.report().backlog == 0
            assert reward.report().detail["marks"] == {"late": 8}
        assert await run.states() == {"dropped": 8}
