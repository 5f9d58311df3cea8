"""The two other moments of scoring give the columns of the stage: before the commit, and when a step is selected."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pipeline.config.schema import RunConfig
from pipeline.errors import StageFailed
from pipeline.evaluator.pool import EvaluatorPool
from pipeline.evaluator.spec import NodeSpec, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.records import Batch
from pipeline.teacher.on_demand import ScoreOnDemand
from pipeline.teacher.scorer import start_teachers
from tests.pipeline.evaluator.parts import Letters, Tasks, inline, make_task, nobody
from tests.pipeline.teacher.fakes import POISON, Renderer, ToyTeacher, make_config, make_group, make_sample, now, opened

pytestmark = pytest.mark.looptime


def in_mode(mode: str, **stage) -> RunConfig:
    return make_config(2, mode=mode, **stage)


async def on_demand(run, fleet) -> ScoreOnDemand:
    scorer = run.scorer(fleet)
    await start_teachers(scorer.teachers, Renderer())

    async def connect():
        return scorer.teachers

    return ScoreOnDemand(connect, run.config.teacher_stage)


def fleet(**options):
    return {"ant": [ToyTeacher(0, **options)], "bee": [ToyTeacher(1, **options)]}


def test_only_what_is_scored_at_select_is_ready_without_its_teacher():
    for mode, needs in [("stage", ("teacher",)), ("inline", ("teacher",)), ("score_at_select", ())]:
        config = in_mode(mode)
        assert config.needs_of("data-ant") == needs and config.teacher_of("data-ant") == "ant"


async def test_what_lacks_its_column_gets_that_of_its_own_teacher_and_the_rest_stays():
    async with opened(in_mode("score_at_select")) as run:
        teachers = fleet()
        score = await on_demand(run, teachers)
        groups = [make_group(0), make_group(1, teacher="bee"), make_group(2), make_group(3)]
        await score(groups)
        assert [group.columns["teacher"].producer for group in groups] == ["ant", "bee", "ant", "ant"]
        assert [len(engine.calls) for (engine,) in teachers.values()] == [1, 1]
        first = groups[0].columns["teacher"]
        await score(groups)
        assert groups[0].columns["teacher"] is first and len(teachers["ant"][0].calls) == 1


async def test_a_group_that_no_teacher_can_score_fails_by_name():
    async with opened(in_mode("inline")) as run:
        score = await on_demand(run, fleet(refuse=True))
        bad = make_group(1, samples=[make_sample(1, 0, poison=True)])
        with pytest.raises(StageFailed, match=f"teacher 'ant', group 1: RowRefused: row 1.0: token {POISON}"):
            await score([bad])


class Thirds(Letters):
    """Tokens that the toy teacher reads."""

    def render(self, messages):
        return np.asarray([3, 4, 5], np.int32)


@pytest.mark.parametrize("mode", ["inline", "score_at_select"])
async def test_a_rollout_commits_ready_groups_inline_with_the_column_and_at_select_without(mode):
    base = in_mode(mode, call_timeout_s=30).model_dump(exclude_unset=True)
    config = RunConfig.model_validate(
        {**base, "specs": [{"agent": "scripted"}], "rollout": {"tasks_per_step": 4, "on_dropped": "shrink"}}
    )

    def make(ordinal):
        name = ("ant", "bee")[ordinal % 2]
        return make_task(ordinal, dataset=f"data-{name}", teacher=name, needs=config.needs_of(f"data-{name}"))

    async with opened(config) as run:
        score = await on_demand(run, fleet(call_s=0.5))
        worker = EvaluatorWorker(config, Thirds(), None, specs_from_config(config), "here", offload=inline)
        pool = EvaluatorPool(
            config, run.buffer, Tasks(run.buffer, make), [worker], nobody, nodes=(NodeSpec("here", (), 4, 4),),
            details_folder=run.paths.details, offload=inline, score=one_by_one(score) if mode == "inline" else None,
        )  # fmt: skip
        ordinals = await run.assign(1)
        await pool.rollout(1, [Batch(str(o), "single_turn", "single_turn", (o,)) for o in ordinals])
        await pool.close()
        assert await run.states() == {"ready": 4}
        groups = await run.buffer.read(ordinals, True)
        if mode == "score_at_select":
            assert now() == 0 and not any(group.columns for group in groups)
            await score(groups)
        assert [group.columns["teacher"].producer for group in groups] == ["ant", "bee", "ant", "bee"]
        assert all(np.isfinite(arrays["logprobs"][3:]).all() for g in groups for arrays in g.columns["teacher"].samples.values())


def one_by_one(score):
    """The toy teacher insists on one call at a time, which a real engine queues."""
    turn = asyncio.Lock()

    async def scored(groups):
        async with turn:
            await score(groups)

    return scored
