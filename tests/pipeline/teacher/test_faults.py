"""The faults that users of scoring stages have met, each with one and with three teachers. A real buffer, virtual time."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pipeline.engines.base import Completion, ScoredRow, ScoreRow
from pipeline.errors import BadReply, BreakerTripped, ConfigError, EngineUnavailable, StageFailed, Stalled
from pipeline.evaluator.pool import EvaluatorPool
from pipeline.evaluator.spec import NodeSpec, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.pumps import Pump, PumpKind, supervise
from pipeline.records import Batch
from pipeline.teacher.scorer import score_groups, start_teachers
from pipeline.trainer.packing import RowRules, make_rows
from pipeline.watchdog import StallWatchdog
from tests.pipeline.evaluator.parts import Tasks, inline
from tests.pipeline.teacher.fakes import (
    PROMPT,
    TEACHERS,
    Renderer,
    ToyTeacher,
    make_config,
    make_group,
    make_sample,
    now,
    opened,
    report,
    running,
)

pytestmark = [
    pytest.mark.looptime,
    pytest.mark.parametrize("count", [1, 3]),
    pytest.mark.parametrize("sampler", ["in_order", "windowed"]),
]


def engines(count: int, **options) -> dict[str, list[ToyTeacher]]:
    return {name: [ToyTeacher(salt, **options)] for salt, name in enumerate(TEACHERS[:count])}


def every(fleet: dict[str, list[ToyTeacher]]) -> list[ToyTeacher]:
    return [engine for replicas in fleet.values() for engine in replicas]


@pytest.mark.fault(5)
async def test_the_end_of_data_while_groups_are_scored_is_not_the_end_of_the_run(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        scorer = run.scorer(engines(count, call_s=2.0))

        async def produce() -> None:
            await run.fill(1)
            scorer.submit()

        async def train() -> tuple[int, ...]:
            while (selection := await run.buffer.wait_selection(1, 1.0)) is None:
                continue
            return selection.ordinals

        trained = await supervise(
            [
                Pump("evaluator", PumpKind.PRODUCER, produce),
                Pump("teacher", PumpKind.STAGE, scorer.run, scorer.drain),
                Pump("train", PumpKind.TERMINAL, train),
            ]
        )
        assert sorted(trained) == list(range(8))
        assert await run.states() == {"consumed": 8}


@pytest.mark.fault(10)
async def test_failed_scoring_gives_its_capacity_back_and_the_step_closes(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        free = await run.buffer.status()
        fleet = engines(count, refuse=True)
        async with running(run.scorer(fleet)):
            await run.assign(1)
            for ordinal in range(8):
                bad = [make_sample(ordinal, index, poison=ordinal == 3 and index == 1) for index in range(4)]
                await run.commit(make_group(ordinal, teacher=TEACHERS[ordinal % count], samples=bad))
            await run.buffer.close_rollout(1)
            assert await run.buffer.wait_scored(1, 60)
        selection = await run.buffer.select(1)
        assert sorted(selection.ordinals) == [0, 1, 2, 4, 5, 6, 7]
        assert (await run.buffer.status())["capacity"] == free["capacity"]


@pytest.mark.fault(11)
async def test_the_next_call_starts_at_once_when_the_teacher_is_free_whatever_the_linger(count, sampler):
    config = make_config(count, sampler=sampler, tasks=16, max_batch_rows=4, linger_ms=30_000)
    async with opened(config) as run:
        fleet = engines(count, call_s=3.0)
        async with running(run.scorer(fleet)) as task:
            await run.fill(1)
            assert await run.buffer.wait_scored(1, 600)
            assert not task.done()
        for teacher in every(fleet):
            starts = [start for start, _ in teacher.calls]
            assert starts == [starts[0] + 3.0 * index for index in range(len(starts))]
        assert sum(len(teacher.calls) for teacher in every(fleet)) == 16


@pytest.mark.fault(12)
async def test_an_error_of_a_background_call_is_the_stages_failure(count, sampler):
    async with opened(make_config(count, sampler=sampler, max_consecutive_scoring_drops=2)) as run:
        fleet = engines(count, faults=lambda call, rows: RuntimeError("CUDA error: device-side assert"))
        scorer = run.scorer(fleet)
        task = asyncio.create_task(scorer.run())
        await run.fill(1)
        with pytest.raises(BreakerTripped, match=r"scorer '(ant|bee|cat)' failed on 2 groups in a row .*CUDA error") as caught:
            await task
        assert isinstance(caught.value.__cause__, RuntimeError)
        with pytest.raises(BreakerTripped):
            await scorer.drain(1)


@pytest.mark.fault(12)
async def test_a_settlement_that_is_never_acknowledged_is_the_stages_failure(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        scorer = run.scorer(engines(count))

        async def lost(columns):
            raise ConnectionError("buffer unreachable")

        run.buffer.mark_produced = lost
        task = asyncio.create_task(scorer.run())
        await run.fill(1)
        with pytest.raises(StageFailed, match="mark_produced was not acknowledged within 120 s") as caught:
            await task
        assert isinstance(caught.value.__cause__, ConnectionError) and now() == pytest.approx(121, abs=1)
        assert await run.states() == {"written": 8}


@pytest.mark.fault(13)
async def test_one_refused_row_costs_its_own_group_only(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        fleet = engines(count, refuse=True)
        async with running(run.scorer(fleet)):
            await run.assign(1)
            for ordinal in range(8):
                samples = [make_sample(ordinal, index, poison=(ordinal, index) == (5, 2)) for index in range(4)]
                await run.commit(make_group(ordinal, teacher=TEACHERS[ordinal % count], samples=samples))
            assert await run.buffer.wait_scored(1, 60)
        assert await run.states() == {"ready": 7, "dropped": 1}
        assert (await run.buffer.status())["dropped_by_reason"] == {"scoring:RowRefused": 1}
        assert sorted(run.produced) == [0, 1, 2, 3, 4, 6, 7]


@pytest.mark.fault(13)
async def test_one_reply_with_a_nan_costs_no_second_call_of_the_others(count, sampler):
    class Nan(ToyTeacher):
        def reply(self, rows, signal, top_k):
            replies = super().reply(rows, signal, top_k)
            for scored in replies:
                if scored.row_id == "4.0":
                    scored.logprobs[0] = np.nan
            return replies

    async with opened(make_config(count, sampler=sampler)) as run:
        fleet = {name: [Nan(salt)] for salt, name in enumerate(TEACHERS[:count])}
        await run.fill(1)
        async with running(run.scorer(fleet)):
            assert await run.buffer.wait_scored(1, 60)
        assert await run.states() == {"ready": 7, "dropped": 1}
        assert (await run.buffer.status())["dropped_by_reason"] == {"scoring:BadReply": 1}
        asked = [row for teacher in every(fleet) for _, rows in teacher.calls for row in rows]
        assert {row for row in asked if asked.count(row) > 1} == {f"4.{index}" for index in range(4)}


@pytest.mark.fault(14)
async def test_the_watchdog_still_looks_while_the_stage_drains(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        scorer = run.scorer(engines(count))

        async def wedge() -> None:
            await asyncio.Event().wait()

        async def probe():
            return [scorer.report(), report("train", 0, (await run.states()).get("ready", 0))]

        with pytest.raises(Stalled) as caught:
            await supervise(
                [
                    Pump("watchdog", PumpKind.MONITOR, StallWatchdog(probe, 30, now).run),
                    Pump("evaluator", PumpKind.PRODUCER, run.fill),
                    Pump("teacher", PumpKind.STAGE, scorer.run, scorer.drain),
                    Pump("train", PumpKind.TERMINAL, wedge),
                ]
            )
        assert caught.value.stage == "train"
        assert await run.states() == {"ready": 8}


@pytest.mark.fault(15)
async def test_commits_go_on_a_teacher_hangs_and_the_scoring_stage_is_named(count, sampler):
    async with opened(make_config(count, sampler=sampler, tasks=200, call_timeout_s=1e5)) as run:
        fleet = engines(count)
        fleet["ant"][0].faults = lambda call, rows: "hang"
        scorer = run.scorer(fleet)
        committed = 0

        async def produce() -> None:
            nonlocal committed
            for ordinal in await run.assign(1):
                await asyncio.sleep(1)
                await run.commit(make_group(ordinal, teacher=TEACHERS[ordinal % count]))
                scorer.submit()
                committed += 1

        async def probe():
            return [report("evaluator", committed, 200 - committed), scorer.report()]

        async def train() -> None:
            await asyncio.Event().wait()

        with pytest.raises(Stalled) as caught:
            await supervise(
                [
                    Pump("watchdog", PumpKind.MONITOR, StallWatchdog(probe, 30, now).run),
                    Pump("evaluator", PumpKind.PRODUCER, produce),
                    Pump("teacher", PumpKind.STAGE, scorer.run, scorer.drain),
                    Pump("train", PumpKind.TERMINAL, train),
                ]
            )
        assert caught.value.stage == "teacher" and 30 <= now() < 40
        assert "group 0 (step 1, scorer ant)" in str(caught.value) and "held by ant, replica 0" in str(caught.value)


@pytest.mark.fault(16)
async def test_a_column_that_comes_too_late_is_a_counted_no_op(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        scorer = run.scorer(engines(count, call_s=5.0))
        async with running(scorer):
            await run.fill(1)
            scorer.submit()
            await asyncio.sleep(1)
            await run.buffer.discard(0, "poison")
            assert await run.buffer.wait_scored(1, 60)
            await asyncio.sleep(1)
            assert scorer.report().detail["marks"] == {"produced": 7, "late": 1}
        assert await run.states() == {"ready": 7, "dropped": 1}


@pytest.mark.fault(19)
async def test_each_group_gets_its_own_teachers_scores_joined_by_id(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        fleet = engines(count)
        ordinals = await run.assign(1)
        for ordinal in ordinals:
            status = "aborted" if ordinal == 0 else "ok"
            samples = [make_sample(ordinal, index, status=status, mask="1" * (1 + index)) for index in range(4)]
            await run.commit(make_group(ordinal, teacher=TEACHERS[ordinal % count], samples=samples))
        async with running(run.scorer(fleet)):
            assert await run.buffer.wait_scored(1, 60)
        for group in await run.buffer.read(ordinals, columns=True):
            name = TEACHERS[group.ordinal % count]
            found = group.columns["teacher"]
            assert found.producer == name and found.digest == f"d{TEACHERS.index(name)}"
            for sample in group.samples:
                scored = found.samples[sample.sample_id]["logprobs"]
                np.testing.assert_array_equal(np.isfinite(scored), sample.loss_mask == 1)
                if sample.loss_mask.any():
                    expected = await alone(fleet[name][0], group, sample)
                    np.testing.assert_array_equal(scored[sample.loss_mask == 1], expected)


async def alone(teacher: ToyTeacher, group, sample) -> np.ndarray:
    (scored,) = teacher.reply([ScoreRow("x", sample.token_ids, int(np.flatnonzero(sample.loss_mask)[0]))], "sampled", 0)
    return scored.logprobs


@pytest.mark.fault(20)
async def test_exchanging_two_columns_changes_what_the_trainer_reads(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        ordinals = await run.fill(1)
        async with running(run.scorer(engines(count))):
            assert await run.buffer.wait_scored(1, 60)
        groups = await run.buffer.read(ordinals, columns=True)
        kept = [sample.sample_id for group in groups for sample in group.samples]
        rules = RowRules(64, signal="sampled")
        straight = make_rows(groups, kept, rules).rows
        assert all(row.covered.all() for row in straight)
        for group in groups:
            samples = group.columns["teacher"].samples
            names = sorted(samples)
            group.columns["teacher"].samples = dict(zip(names, [samples[name] for name in names[1:] + names[:1]], strict=True))
        shuffled = make_rows(groups, kept, rules).rows
        assert all(not np.array_equal(left.teacher, right.teacher) for left, right in zip(straight, shuffled, strict=True))


@pytest.mark.fault(21)
async def test_known_probabilities_reach_the_trainer_at_the_right_tokens(count, sampler):
    class Halves(ToyTeacher):
        def reply(self, rows, signal, top_k):
            lengths = {row.row_id: len(row.token_ids) - row.start for row in rows}
            return [ScoredRow(name, -np.log(2) * np.arange(1, length + 1, dtype=np.float32)) for name, length in lengths.items()]

    async with opened(make_config(count, sampler=sampler)) as run:
        ordinals = await run.fill(1)
        async with running(run.scorer({name: [Halves()] for name in TEACHERS[:count]})):
            assert await run.buffer.wait_scored(1, 60)
        selection = await run.buffer.select(1)
        assert sorted(selection.ordinals) == ordinals
        groups = await run.buffer.read(list(selection.ordinals), columns=True)
        kept = [sample.sample_id for group in groups for sample in group.samples]
        for row in make_rows(groups, kept, RowRules(64, signal="sampled")).rows:
            assert row.positions.tolist() == list(range(PROMPT, PROMPT + 4))
            np.testing.assert_allclose(row.teacher, np.log([1 / 2, 1 / 4, 1 / 8, 1 / 16]), rtol=1e-6)


@pytest.mark.fault(22)
async def test_a_group_of_empty_and_aborted_samples_needs_no_call(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        fleet = engines(count)
        ordinals = await run.assign(1)
        for ordinal in ordinals:
            samples = [make_sample(ordinal, 0, mask=""), make_sample(ordinal, 1, status="aborted")]
            await run.commit(make_group(ordinal, teacher=TEACHERS[ordinal % count], samples=samples))
        async with running(run.scorer(fleet)):
            assert await run.buffer.wait_scored(1, 60)
        assert await run.states() == {"ready": 8}
        assert all(teacher.calls == [] for teacher in every(fleet))
        for columns in (await run.columns(ordinals)).values():
            assert all(np.isnan(arrays["logprobs"]).all() for arrays in columns["teacher"].samples.values())


@pytest.mark.fault(23)
async def test_another_vocabulary_is_refused_before_the_first_call(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        fleet = engines(count)
        fleet[TEACHERS[count - 1]][0].tokenizer = "another"
        scorer = run.scorer(fleet)
        await run.fill(1)
        with pytest.raises(ConfigError, match=f"teachers.{TEACHERS[count - 1]} .*tokenizer another.* the student .tokenizer toy"):
            await scorer.run()
        with pytest.raises(StageFailed, match="tokenizer another"):
            await scorer.drain()
        assert all(teacher.calls == [] for teacher in every(fleet))
        with pytest.raises(ConfigError):
            await start_teachers(scorer.teachers, Renderer())


class Racing:
    """An engine whose weights change every second, while its calls run: a call keeps the version that it started with, and a token
    is 5 + that version."""

    async def generate(self, requests, version):
        await asyncio.sleep(0.4 * int(requests[0].request_id.split(".")[0]))  # for a slot
        served = int(now())
        await asyncio.sleep(1.5)
        tokens, logprobs = np.full(4, 5 + served, np.int32), np.full(4, -1.0, np.float32)
        return [Completion(request.request_id, tokens, logprobs, "length", served) for request in requests]


@pytest.mark.fault(31)
async def test_no_trained_token_carries_a_version_that_did_not_make_it(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        scorer = run.scorer(engines(count))
        worker = EvaluatorWorker(run.config, Renderer(), Racing(), specs_from_config(run.config), "here", offload=inline)

        async def wake() -> None:
            scorer.submit()

        def task(ordinal: int):
            return make_group(ordinal, teacher=TEACHERS[ordinal % count]).task

        pool = EvaluatorPool(
            run.config, run.buffer, Tasks(run.buffer, task), [worker], wake, nodes=(NodeSpec("here", (), 8, 8),),
            details_folder=run.paths.details, offload=inline,
        )  # fmt: skip
        ordinals = await run.assign(1)
        async with running(scorer):
            await pool.rollout(1, [Batch(str(ordinal), "single_turn", "single_turn", (ordinal,)) for ordinal in ordinals])
            assert await run.buffer.wait_scored(1, 60)
        await pool.close()
        groups = await run.buffer.read(list((await run.buffer.select(1)).ordinals), columns=True)
        kept = [sample.sample_id for group in groups for sample in group.samples]
        rows = make_rows(groups, kept, RowRules(64, signal="sampled")).rows
        versions = {sample.sample_id: sample.versions for group in groups for sample in group.samples}
        for row in rows:
            np.testing.assert_array_equal(row.token_ids[row.positions], 5 + versions[row.sample_id][row.positions])
            assert row.covered.all()
        assert len(rows) == 32 and len({group.weight_version for group in groups}) > 1


@pytest.mark.fault(41)
async def test_groups_committed_without_a_wake_up_are_scored_all_the_same(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        async with running(run.scorer(engines(count))) as task:
            await run.fill(1)  # nobody calls submit
            assert await run.buffer.wait_scored(1, 60)
            assert now() <= 3 and not task.done()


@pytest.mark.fault(41)
async def test_a_scorer_that_restarts_alone_finds_what_the_first_one_left(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        fleet = engines(count, call_s=4.0)
        await run.fill(1)
        async with running(run.scorer(fleet)):
            await asyncio.sleep(2)
        assert await run.states() == {"written": 8}
        again = run.scorer(fleet)
        async with running(again):
            await again.drain(1)
        assert await run.states() == {"ready": 8} and sorted(run.produced) == list(range(8))


async def test_a_lost_replica_costs_one_more_call_of_the_same_batch_and_no_group(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        fleet = engines(count, faults=lambda call, rows: EngineUnavailable("replica restarting") if call == 1 else None)
        await run.fill(1)
        async with running(run.scorer(fleet)):
            assert await run.buffer.wait_scored(1, 60)
        for teacher in every(fleet):
            (first, rows), (second, again) = teacher.calls
            assert rows == again and second == first + 2
        assert await run.states() == {"ready": 8}


async def test_a_call_that_hangs_ends_at_its_deadline_and_is_made_again(count, sampler):
    async with opened(make_config(count, sampler=sampler, call_timeout_s=7.0)) as run:
        fleet = engines(count, faults=lambda call, rows: "hang" if call == 1 else None)
        await run.fill(1)
        async with running(run.scorer(fleet)):
            assert await run.buffer.wait_scored(1, 60)
        assert [len(teacher.calls) for teacher in every(fleet)] == [2] * count
        assert await run.states() == {"ready": 8}


async def test_an_engine_that_cancels_itself_does_not_take_the_stage_down(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        fleet = engines(count, faults=lambda call, rows: asyncio.CancelledError() if call == 1 else None)
        await run.fill(1)
        async with running(run.scorer(fleet)) as task:
            assert await run.buffer.wait_scored(1, 60)
            assert not task.done()
        assert await run.states() == {"ready": 8}


async def test_a_teacher_that_never_answers_fails_the_run_by_name(count, sampler):
    async with opened(make_config(count, sampler=sampler, call_timeout_s=5.0, max_consecutive_scoring_drops=3)) as run:
        fleet = engines(count)
        fleet["ant"][0].faults = lambda call, rows: "hang"
        await run.fill(1, needs=("teacher",))
        with pytest.raises(BreakerTripped, match=r"'ant'.*no answer within teacher_stage.call_timeout_s 5") as caught:
            await run.scorer(fleet).run()
        assert isinstance(caught.value.__cause__, TimeoutError)
        assert (await run.buffer.status())["dropped_by_reason"] == {"scoring:TimeoutError": min(3, 8)}


async def test_the_pull_way_raises_where_the_stage_would_drop(count, sampler):
    async with opened(make_config(count, sampler=sampler)) as run:
        scorer = run.scorer(engines(count, refuse=True))
        await scorer.start()
        good = [make_group(ordinal, teacher=TEACHERS[ordinal % count]) for ordinal in range(8)]
        columns = await score_groups(good, scorer.teachers, run.config.teacher_stage)
        assert [column.ordinal for column in columns] == list(range(8))
        bad = make_group(8, teacher="ant", samples=[make_sample(8, 0, poison=True)])
        with pytest.raises(StageFailed, match="teacher 'ant', group 8: RowRefused"):
            await score_groups([bad], scorer.teachers, run.config.teacher_stage)


async def test_a_reply_with_a_row_too_few_is_no_reply(count, sampler):
    class Short(ToyTeacher):
        def reply(self, rows, signal, top_k):
            return super().reply(rows, signal, top_k)[1:]

    async with opened(make_config(count, sampler=sampler, max_consecutive_scoring_drops=1)) as run:
        await run.fill(1)
        with pytest.raises(BreakerTripped) as caught:
            await run.scorer({name: [Short()] for name in TEACHERS[:count]}).run()
        assert isinstance(caught.value.__cause__, BadReply)
