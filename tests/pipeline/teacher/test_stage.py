"""When calls start, what is in them, and how the stage ends. A real buffer, virtual time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pipeline.config.schema import RunConfig
from pipeline.errors import EngineUnavailable, FencedOut, StageFailed
from pipeline.pumps import Pump, PumpKind, supervise
from tests.pipeline.teacher.fakes import PROMPT, Run, ToyTeacher, make_config, make_group, make_sample, now, opened, running

pytestmark = pytest.mark.looptime
ROW = PROMPT + 4
"""Tokens of one row of the default groups."""


async def drained(run: Run, scorer, step: int = 1) -> None:
    async with running(scorer):
        await scorer.drain(step)


def batches(teacher: ToyTeacher) -> list[tuple[float, list[int]]]:
    """(start, ordinals) of every call."""
    return [(start, sorted({int(row.split(".")[0]) for row in rows})) for start, rows in teacher.calls]


async def test_an_idle_teacher_with_work_starts_in_the_same_moment():
    async with opened(make_config()) as run:
        teacher = ToyTeacher(call_s=0.5)
        scorer = run.scorer({"ant": [teacher]})
        async with running(scorer):
            for ordinal in await run.assign(1, 4):
                await asyncio.sleep(0.7)
                await run.commit(make_group(ordinal))
                scorer.submit()
            await asyncio.sleep(0.6)
        assert batches(teacher) == [(pytest.approx(0.7 * (index + 1)), [index]) for index in range(4)]


async def test_what_arrives_during_a_call_is_one_batch_right_after_it():
    async with opened(make_config()) as run:
        teacher = ToyTeacher(call_s=2.0)
        scorer = run.scorer({"ant": [teacher]})
        async with running(scorer):
            for ordinal in await run.assign(1, 6):
                await run.commit(make_group(ordinal))
                scorer.submit()
                await asyncio.sleep(0.25)
            await scorer.drain(1)
        assert batches(teacher) == [(0.0, [0]), (2.0, [1, 2, 3, 4, 5])]


@pytest.mark.parametrize("caps", [{"max_batch_rows": 11}, {"max_batch_tokens": 11 * ROW}])
async def test_caps_by_rows_and_by_tokens_keep_the_order(caps):
    async with opened(make_config(**caps)) as run:
        teacher = ToyTeacher()
        await run.fill(1)
        await drained(run, run.scorer({"ant": [teacher]}))
        assert [ordinals for _, ordinals in batches(teacher)] == [[0, 1], [2, 3], [4, 5], [6, 7]]
        assert all(tokens <= 11 * ROW for tokens in teacher.tokens)


async def test_a_group_above_the_cap_goes_alone_and_is_scored():
    async with opened(make_config(max_batch_rows=5)) as run:
        teacher = ToyTeacher()
        for ordinal in await run.assign(1, 3):
            rows = 9 if ordinal == 1 else 4
            await run.commit(make_group(ordinal, samples=[make_sample(ordinal, index) for index in range(rows)]))
        await drained(run, run.scorer({"ant": [teacher]}))
        assert [ordinals for _, ordinals in batches(teacher)] == [[0], [1], [2]]


async def test_an_older_step_goes_first_however_late_its_groups_arrive():
    async with opened(make_config(tasks=2, max_batch_rows=4)) as run:
        teacher = ToyTeacher()
        first, second = await run.assign(1), await run.assign(2)
        for ordinal in second:
            await run.commit(make_group(ordinal, 2))
        for ordinal in reversed(first):
            await run.commit(make_group(ordinal, 1))
            await asyncio.sleep(0.01)
        await drained(run, run.scorer({"ant": [teacher]}), 2)
        assert [ordinals for _, ordinals in batches(teacher)] == [[1], [0], [2], [3]]


async def test_a_call_holds_groups_of_one_step_so_that_the_awaited_one_does_not_wait_for_the_next():
    async with opened(make_config(tasks=3)) as run:
        teacher = ToyTeacher(call_s=0.0, row_s=0.25)
        first, second = await run.assign(1), await run.assign(2)
        for ordinal in (*second, *first):
            await run.commit(make_group(ordinal, 1 if ordinal in first else 2))
        await drained(run, run.scorer({"ant": [teacher]}), 2)
        assert batches(teacher) == [(0.0, [0, 1, 2]), (3.0, [3, 4, 5])]


async def test_idle_replicas_share_the_work_and_each_has_one_call_at_a_time():
    async with opened(make_config(tasks=9)) as run:
        fleet = [ToyTeacher() for _ in range(3)]
        await run.fill(1)
        await drained(run, run.scorer({"ant": fleet}))
        assert [batches(teacher) for teacher in fleet] == [[(0.0, [0, 1, 2])], [(0.0, [3, 4, 5])], [(0.0, [6, 7, 8])]]
        assert now() == 1.0


async def test_a_slow_teacher_does_not_hold_up_another():
    async with opened(make_config(3, tasks=9)) as run:
        fleet = {"ant": [ToyTeacher(call_s=100.0)], "bee": [ToyTeacher()], "cat": [ToyTeacher()]}
        scorer = run.scorer(fleet)
        async with running(scorer):
            await run.fill(1)
            scorer.submit()
            await asyncio.sleep(1.5)
            assert await run.states() == {"written": 3, "ready": 6}


async def test_a_broken_replica_beside_a_good_one_costs_time_and_no_group():
    async with opened(make_config(tasks=16, max_batch_rows=8)) as run:
        broken = ToyTeacher(call_s=0.0, faults=lambda call, rows: EngineUnavailable("gone"))
        good = ToyTeacher()
        await run.fill(1)
        await drained(run, run.scorer({"ant": [broken, good]}))
        assert await run.states() == {"ready": 16}
        assert len(broken.calls) < 10


async def test_linger_waits_for_company_and_no_longer():
    async with opened(make_config(linger_ms=400)) as run:
        teacher = ToyTeacher()
        scorer = run.scorer({"ant": [teacher]})
        async with running(scorer):
            for ordinal in await run.assign(1, 3):
                await run.commit(make_group(ordinal))
                scorer.submit()
                await asyncio.sleep(0.15)
            await asyncio.sleep(1)
        assert batches(teacher) == [(pytest.approx(0.4), [0, 1, 2])]


@pytest.mark.parametrize("how", ["full", "step drained", "upstream ended"])
async def test_linger_is_void_when(how):
    config = make_config(tasks=4, linger_ms=5000, **({"max_batch_rows": 4} if how == "full" else {}))
    async with opened(config) as run:
        teacher = ToyTeacher()
        scorer = run.scorer({"ant": [teacher]})
        await run.fill(1)
        async with running(scorer):
            waiter = {"step drained": lambda: scorer.drain(1), "upstream ended": scorer.drain}.get(how)
            task = asyncio.create_task(waiter()) if waiter else None
            await asyncio.sleep(0.5)
            assert teacher.calls and teacher.calls[0][0] == 0.0
            if task:
                await task


async def test_linger_is_void_for_a_group_of_a_step_that_is_being_trained():
    async with opened(make_config(tasks=2, sampler="ready_first", linger_ms=5000)) as run:
        teacher = ToyTeacher(call_s=0.1)
        first = await run.assign(1, 4)
        for ordinal in first[:2]:
            await run.commit(make_group(ordinal, 1, needs=()))
        async with running(run.scorer({"ant": [teacher]})):
            await run.commit(make_group(first[2], 1))
            await asyncio.sleep(2)
            assert teacher.calls == []
            await run.buffer.select(1)
            await asyncio.sleep(2)
            assert len(teacher.calls) == 1


async def test_stale_groups_are_dropped_before_they_cost_a_call():
    async with opened(make_config(tasks=2, sampler="windowed")) as run:
        late = await run.assign(1, 4)
        for ordinal in late[:2]:
            await run.commit(make_group(ordinal, 1, needs=()))
        for step in (1, 2):
            if step == 2:
                for ordinal in await run.assign(2, 2):
                    await run.commit(make_group(ordinal, 2, needs=()))
            await run.buffer.select(step)
        for ordinal in late[2:]:  # of weight version 0, which training step 3 does not take any more
            await run.commit(make_group(ordinal, 1))
        teacher = ToyTeacher()
        await drained(run, run.scorer({"ant": [teacher]}))
        assert teacher.calls == [] and (await run.buffer.status())["dropped_by_reason"] == {"stale": 2}


async def test_drain_finishes_the_backlog_and_ends_the_pump():
    async with opened(make_config(max_batch_rows=4)) as run:
        scorer = run.scorer({"ant": [ToyTeacher()]})
        await run.fill(1)
        task = asyncio.create_task(scorer.run())
        await scorer.drain()
        await task
        assert now() == 8.0 and await run.states() == {"ready": 8}


async def test_cancel_lets_the_running_call_end_and_leaves_the_rest_written():
    async with opened(make_config(max_batch_rows=8)) as run:
        scorer = run.scorer({"ant": [ToyTeacher(call_s=3.0)]})
        await run.fill(1)
        task = asyncio.create_task(scorer.run())
        await asyncio.sleep(1)
        await scorer.cancel()
        await task
        assert now() == 3.0 and await run.states() == {"ready": 2, "written": 6}


async def test_cancel_drops_no_group_for_a_call_that_failed_on_the_way_out():
    async with opened(make_config()) as run:
        scorer = run.scorer({"ant": [ToyTeacher(faults=lambda call, rows: ValueError("no"))]})
        await run.fill(1)
        task = asyncio.create_task(scorer.run())
        await asyncio.sleep(0.5)
        await scorer.cancel()
        await task
        assert await run.states() == {"written": 8}


async def test_cancelling_the_pump_itself_ends_its_calls():
    async with opened(make_config()) as run:
        teacher = ToyTeacher(call_s=1e6)
        scorer = run.scorer({"ant": [teacher]})
        await run.fill(1)
        async with running(scorer):
            await asyncio.sleep(1)
            assert teacher.busy
        assert not teacher.busy
        with pytest.raises(StageFailed):
            await scorer.drain(1)


async def test_an_acknowledgement_that_got_lost_is_asked_for_again():
    async with opened(make_config()) as run:
        scorer = run.scorer({"ant": [ToyTeacher()]})
        real, lost = run.buffer.mark_produced, 0

        async def lossy(columns):
            nonlocal lost
            marks = await real(columns)
            lost += 1
            if lost == 1:
                raise ConnectionError("reply lost")
            if lost == 2:
                await asyncio.Event().wait()
            return marks

        run.buffer.mark_produced = lossy
        await run.fill(1)
        async with running(scorer):
            await scorer.drain(1)
            await asyncio.sleep(60)
            assert scorer.report().detail["marks"] == {"repeated": 8}
        assert await run.states() == {"ready": 8}


async def test_being_fenced_out_is_final():
    async with opened(make_config()) as run:
        scorer = run.scorer({"ant": [ToyTeacher()]})

        async def fenced(columns):
            raise FencedOut("a newer writer owns the run")

        run.buffer.mark_produced = fenced
        await run.fill(1)
        with pytest.raises(FencedOut):
            await scorer.run()
        assert now() == 1.0


async def test_the_next_call_does_not_wait_for_a_slow_settlement():
    async with opened(make_config(max_batch_rows=16)) as run:
        teacher = ToyTeacher()
        real = run.buffer.mark_produced

        async def slow(columns):
            await asyncio.sleep(5)
            return await real(columns)

        run.buffer.mark_produced = slow
        await run.fill(1)
        await drained(run, run.scorer({"ant": [teacher]}))
        assert [start for start, _ in teacher.calls] == [0.0, 1.0] and now() == 7.0


async def test_rows_that_cannot_be_read_do_not_make_the_stage_spin():
    async with opened(make_config()) as run:
        reads = 0

        async def nothing(ordinals, columns):
            nonlocal reads
            reads += 1
            return []

        run.buffer.read = nothing
        await run.fill(1)
        async with running(run.scorer({"ant": [ToyTeacher()]})):
            await asyncio.sleep(20)
        assert reads <= 21


async def test_a_group_of_an_unknown_teacher_fails_the_stage_by_name():
    async with opened(make_config()) as run:
        (ordinal,) = await run.assign(1, 1)
        await run.commit(make_group(ordinal, teacher="dog"))
        with pytest.raises(StageFailed, match="group 0 of dataset 'data-dog' asks for the unknown scorer 'dog'"):
            await run.scorer({"ant": [ToyTeacher()]}).run()


async def test_the_report_names_counts_ages_and_costs():
    async with opened(make_config(max_batch_rows=8)) as run:
        scorer = run.scorer({"ant": [ToyTeacher(call_s=2.0)]})
        async with running(scorer):
            await run.fill(1)
            scorer.submit()
            await asyncio.sleep(3)
            report = scorer.report()
            assert (report.stage, report.started, report.finished, report.backlog) == ("teacher", 8, 2, 6)
            assert report.oldest_s == 3.0 and report.busy_s == 3.0
            assert report.detail["oldest"] == "group 2 (step 1, scorer ant)"
            assert report.detail["holder"] == "ant, replica 0"
            metrics = report.detail["scorers"]["ant"]
            assert (metrics["calls"], metrics["groups"], metrics["batch_rows"], metrics["batch_tokens"]) == (2, 2, 16, 16 * ROW)
            assert (metrics["queue_wait_s"], metrics["backlog"], metrics["in_flight"], metrics["drops"]) == (4.0, 4, 2, 0)
            await scorer.drain(1)
        report = scorer.report()
        assert (report.started, report.finished, report.backlog, report.oldest_s) == (8, 8, 0, 0.0)
        assert report.detail["scorers"]["ant"]["call_s"] == 8.0


def shots_config(**stage) -> RunConfig:
    base = make_config(**stage).model_dump(exclude_unset=True)
    model = {"engine": "fixed_cost"}
    base["teachers"] = {"ant": model, "bee": {**model, "shots": 2}}
    base["datasets"] = {"data-ant": {"teacher": "ant"}, "data-bee": {"teacher": "bee"}}
    return RunConfig.model_validate(base)


async def test_aliases_of_one_model_share_its_calls_and_each_reads_its_own_prompt():
    async with opened(shots_config()) as run:
        teacher, seen = ToyTeacher(), []
        teacher.faults = lambda call, rows: seen.extend(rows)
        await run.fill(1)
        await drained(run, run.scorer({"ant": [teacher], "bee": []}))
        assert [ordinals for _, ordinals in batches(teacher)] == [list(range(8))]
        rows = {row.row_id: row for row in seen}
        assert rows["0.0"].start == PROMPT
        # the system message, two solved examples of two turns, the task, and the renderer's two marks
        assert rows["1.0"].start == 1 + 1 + 4 + 1 + 1
        columns = await run.columns([0, 1])
        assert [columns[ordinal]["teacher"].producer for ordinal in (0, 1)] == ["ant", "bee"]
        assert columns[1]["teacher"].digest == "d0+2shots"
        expected = teacher.reply([rows["1.0"]], "sampled", 0)[0].logprobs
        np.testing.assert_array_equal(columns[1]["teacher"].samples["1.0"]["logprobs"][PROMPT:], expected)


async def test_the_shots_count_against_the_token_cap():
    async with opened(shots_config(max_batch_tokens=4 * ROW + 1)) as run:
        teacher = ToyTeacher()
        for ordinal in await run.assign(1, 2):
            await run.commit(make_group(ordinal, teacher="bee", samples=[make_sample(ordinal, index) for index in range(2)]))
        await drained(run, run.scorer({"ant": [teacher], "bee": []}))
        assert len(teacher.calls) == 2


async def test_several_turns_under_a_teacher_with_shots_are_dropped_with_a_reason():
    async with opened(shots_config()) as run:
        teacher = ToyTeacher()
        (ordinal,) = await run.assign(1, 1)
        await run.commit(make_group(ordinal, teacher="bee", samples=[make_sample(ordinal, 0, mask="1101")]))
        await drained(run, run.scorer({"ant": [teacher], "bee": []}))
        assert (await run.buffer.status())["dropped_by_reason"] == {"scoring:DataError": 1}
        assert teacher.calls == []


async def test_the_pump_ends_by_itself_under_supervise():
    async with opened(make_config(3)) as run:
        scorer = run.scorer({"ant": [ToyTeacher(0)], "bee": [ToyTeacher(1)], "cat": [ToyTeacher(2)]})

        async def trained() -> str:
            await run.buffer.wait_scored(1, 60)
            return "done"

        pumps = [Pump("pool", PumpKind.PRODUCER, run.fill), Pump("teacher", PumpKind.STAGE, scorer.run, scorer.drain)]
        assert await supervise([*pumps, Pump("train", PumpKind.TERMINAL, trained)]) == "done"
