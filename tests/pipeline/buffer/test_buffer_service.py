"""The life of a group, as the other stages see it. Every test runs threaded and in the event loop."""

from __future__ import annotations

import asyncio
import pickle

import pytest

from pipeline.buffer import contents
from pipeline.buffer.api import AttemptEnd, StageReport
from pipeline.errors import AttemptRefused, CapacityFull, DataError, LateCommit, NotSelectable, RolloutError
from pipeline.records import GROUP_STATES
from tests.pipeline.buffer.helpers import (
    fill_step,
    make_column,
    make_group,
    make_sample,
    make_settings,
    new_run,
    opened,
    roll_out,
    same,
)

NEEDS = ("teacher",)


@pytest.fixture
def paths(tmp_path):
    return new_run(tmp_path, steps=10)


@pytest.fixture(params=[True, False], ids=["threaded", "in_loop"])
async def buffer(request, paths):
    async with opened(paths, threaded=request.param) as service:
        yield service


async def states(buffer) -> dict[str, int]:
    counts = (await buffer.status())["ordinals"]
    assert sum(counts[state] for state in GROUP_STATES) == counts["fetched"]
    return {state: counts[state] for state in GROUP_STATES if counts[state]}


async def test_a_group_goes_from_pending_to_trained(buffer):
    assert [(a.slot, a.ordinal, a.state) for a in await buffer.assign(1, 2, None)] == [(0, 0, "pending"), (1, 1, "pending")]
    attempt = await buffer.start_attempt(0, 0, "w")
    assert await states(buffer) == {"pending": 1, "running": 1}
    assert await buffer.commit(attempt, make_group(attempt, 1, NEEDS))
    await roll_out(buffer, 1, 1)
    assert await states(buffer) == {"written": 1, "ready": 1}
    assert await buffer.mark_produced([make_column(0)]) == {0: "produced"}
    await buffer.close_rollout(1)
    assert (await buffer.select(1)).ordinals == (0, 1)
    assert await states(buffer) == {"consumed": 2}
    await buffer.record_step(1, {"loss": 0.5})
    await buffer.mark_trained(1, "checkpoints/step_000001")
    assert await states(buffer) == {"trained": 2}
    status = await buffer.status()
    assert (status["step"], status["steps"], status["weight_version"], status["checkpoint_step"]) == (1, 10, 1, 1)
    assert status["capacity"] == {"total": 4, "used": 0}


async def test_what_was_committed_is_read_back_with_its_columns(buffer):
    await buffer.assign(1, 2, None)
    attempt = await buffer.start_attempt(0, 0, "w")
    group = make_group(attempt, 1, NEEDS)
    await buffer.commit(attempt, group)
    column = make_column(0)
    await buffer.mark_produced([column])
    (plain,) = await buffer.read([5, 0, 1], columns=False)
    assert same(plain, group)
    (full,) = await buffer.read([0], columns=True)
    assert same(full.columns, {"teacher": column})


async def test_assign_and_its_repetition_are_the_same(buffer):
    first = await buffer.assign(1, 2, None)
    assert await buffer.assign(1, 2, None) == first
    with pytest.raises(RolloutError, match="step 3 cannot be assigned after step 1"):
        await buffer.assign(3, 2, None)


@pytest.mark.fault(4)
async def test_the_end_of_the_data_gives_fewer_slots_then_none(buffer):
    assert len(await buffer.assign(1, 2, 3)) == 2
    assert len(await buffer.assign(2, 2, 3)) == 1
    assert await buffer.assign(3, 2, 3) == []
    assert await buffer.wait_scored(3, 0)
    assert not await buffer.wait_scored(4, 0)


async def test_no_step_is_half_assigned_for_lack_of_room(buffer):
    await buffer.assign(1, 3, None)
    with pytest.raises(CapacityFull, match="asks for 2 groups, but only 1 of buffer.capacity 4"):
        await buffer.assign(2, 2, None)
    assert (await buffer.status())["ordinals"]["fetched"] == 3
    with pytest.raises(CapacityFull, match="never"):
        await buffer.wait_capacity(5, 1)


async def test_waiting_for_capacity_ends_when_a_step_is_consumed(buffer):
    await fill_step(buffer, 1)
    await fill_step(buffer, 2)
    assert not await buffer.wait_capacity(2, 0.01)
    waiter = asyncio.create_task(buffer.wait_capacity(2, 5))
    await asyncio.sleep(0)
    await buffer.select(1)
    assert await waiter
    assert len(await buffer.assign(3, 2, None)) == 2


async def test_an_acknowledgement_that_was_lost_is_given_again(buffer):
    await buffer.assign(1, 2, None)
    attempt = await buffer.start_attempt(0, 0, "w")
    group = make_group(attempt, 1)
    assert await buffer.commit(attempt, group) is True
    assert await buffer.commit(attempt, group) is False
    assert (await buffer.end_attempt(attempt, "infra", "infra_conn")) == (await buffer.end_attempt(attempt, "infra", "infra_conn"))
    assert await states(buffer) == {"pending": 1, "ready": 1}
    with pytest.raises(AttemptRefused, match="ordinal 0 is ready"):
        await buffer.start_attempt(0, 0, "w")
    assert (await buffer.status())["attempts"] == {"started": 1, "lost": 0, "late": 0, "regenerated": 0}


@pytest.mark.fault(16)
async def test_a_late_duplicate_is_refused_and_counted_once(buffer):
    await buffer.assign(1, 2, None)
    first = await buffer.start_attempt(0, 0, "w")
    assert (await buffer.end_attempt(first, "infra", "agent_timeout")).again
    second = await buffer.start_attempt(0, 0, "w")
    for _ in range(2):
        with pytest.raises(LateCommit):
            await buffer.commit(first, make_group(first, 1))
    assert await buffer.commit(second, make_group(second, 1))
    with pytest.raises(LateCommit):
        await buffer.commit(first, make_group(first, 1))
    (group,) = await buffer.read([0], False)
    assert group.attempt == 2
    assert (await buffer.status())["attempts"]["late"] == 1


async def test_failures_back_off_and_spend_their_own_budget(buffer):
    await buffer.assign(1, 2, None)
    ends = []
    for number in (1, 2, 3):
        attempt = await buffer.start_attempt(0, 0, "w")
        assert (attempt.number, attempt.failures) == (number, number - 1)
        ends.append(await buffer.end_attempt(attempt, "infra", "infra_conn"))
        assert await buffer.end_attempt(attempt, "infra", "infra_conn") == ends[-1]
    assert ends == [AttemptEnd(True, 0.5, None), AttemptEnd(True, 1.0, None), AttemptEnd(False, 0.0, "infra_conn")]
    attempt = await buffer.start_attempt(1, 0, "w")
    assert (await buffer.end_attempt(attempt, "data", "data")).dropped == "data"
    assert (await buffer.status())["dropped_by_reason"] == {"data": 1, "infra_conn": 1}
    with pytest.raises(AttemptRefused, match="infra_conn"):
        await buffer.start_attempt(0, 0, "w")


async def test_twenty_lost_attempts_poison_an_ordinal_and_lost_ones_are_no_failures(buffer):
    await buffer.assign(1, 2, None)
    for number in range(1, 21):
        attempt = await buffer.start_attempt(0, 0, "w")
        assert (attempt.number, attempt.failures) == (number, 0)
    with pytest.raises(AttemptRefused, match="poison"):
        await buffer.start_attempt(0, 0, "w")
    status = await buffer.status()
    assert status["dropped_by_reason"] == {"poison": 1} and status["attempts"]["lost"] == 20
    for number in range(20):
        end = await buffer.end_attempt(await buffer.start_attempt(1, 0, "w"), "lost", "worker died")
        assert (end.again, end.dropped) == ((True, None) if number < 19 else (False, "poison"))


async def test_a_dropped_group_is_replaced_in_its_slot_while_its_rollout_is_open(buffer):
    await buffer.assign(1, 2, None)
    assert await buffer.discard(1, "zero_advantage") is True
    assert await buffer.discard(1, "zero_advantage") is False
    new = await buffer.replace(1, None)
    assert (new.step, new.slot, new.ordinal) == (1, 1, 2)
    assert await buffer.replace(1, None) == new
    assert [slot.ordinal for slot in await buffer.assign(1, 2, None)] == [0, 2]
    await buffer.discard(2, "zero_advantage")
    assert await buffer.replace(2, 3) is None  # the data ended
    await buffer.close_rollout(1)
    assert await buffer.replace(2, None) is None
    with pytest.raises(RolloutError, match="ordinal 0 is pending"):
        await buffer.replace(0, None)


@pytest.mark.parametrize("on_dropped", ["replace", "shrink"])
async def test_what_is_replaced_and_what_leaves_a_step_short_is_counted(paths, on_dropped):
    async with opened(paths, make_settings(on_dropped=on_dropped)) as buffer:
        (first, _) = await buffer.assign(1, 2, None)
        await buffer.discard(first.ordinal, "data")
        assert (await buffer.status())["short_late"] == 0, "its place may still be taken"
        replacement = await buffer.replace(first.ordinal, None)
        for slot in await buffer.assign(1, 2, None):
            if slot.state == "pending":
                await roll_out(buffer, slot.ordinal, 1, NEEDS)
        await buffer.close_rollout(1)
        await buffer.discard(1, "scoring:BadReply")
        assert await buffer.replace(1, None) is None
        for slot in await buffer.assign(1, 2, None):
            await buffer.mark_produced([make_column(slot.ordinal)])
        trained = len((await buffer.select(1)).ordinals)
        status = await buffer.status()
        assert (status["replaced"], status["ordinals"]["dropped"]) == (int(replacement is not None), 2)
        assert status["short_late"] == (1 if on_dropped == "replace" else 2)
        assert trained == 1 * 2 - status["short_late"]


async def test_a_replacement_always_finds_its_room(buffer):
    await buffer.assign(1, 2, None)
    await buffer.assign(2, 1, None)
    await buffer.discard(0, "data")
    with pytest.raises(CapacityFull):
        await buffer.assign(3, 2, None)
    assert (await buffer.replace(0, None)).ordinal == 3
    await buffer.discard(3, "data")
    await buffer.close_rollout(1)
    assert len(await buffer.assign(3, 2, None)) == 2


async def test_shrink_never_replaces(paths):
    async with opened(paths, make_settings(on_dropped="shrink")) as buffer:
        await buffer.assign(1, 2, None)
        await buffer.discard(0, "data")
        assert await buffer.replace(0, None) is None
        assert (await buffer.status())["capacity"]["used"] == 1
        await roll_out(buffer, 1, 1)
        await buffer.close_rollout(1)
        selection = await buffer.select(1)
        assert (selection.ordinals, selection.dropped) == ((1,), {"data": 1})


async def test_a_group_that_cannot_be_scored_gives_its_room_back(buffer):
    ordinals = await fill_step(buffer, 1, needs=NEEDS)
    await buffer.mark_produced([make_column(ordinals[0])])
    await buffer.discard(ordinals[1], "scoring")
    assert await buffer.wait_scored(1, 0)
    assert (await buffer.select(1)).dropped == {"scoring": 1}
    assert (await buffer.status())["capacity"]["used"] == 0
    assert await buffer.mark_produced([make_column(ordinals[1])]) == {ordinals[1]: "late"}
    assert await buffer.read([ordinals[1]], True) == []
    assert await buffer.backlog("teacher", 10) == []


async def test_the_backlog_is_what_is_written_and_lacks_the_field(buffer):
    await fill_step(buffer, 1, needs=NEEDS)
    await fill_step(buffer, 2, needs=("teacher", "reward_model"))
    backlog = await buffer.backlog("teacher", 10)
    assert [(item.ordinal, item.step, item.dataset, item.teacher, item.rows, item.tokens) for item in backlog] == [
        (ordinal, step, "words", "big", 2, 10) for ordinal, step in ((0, 1), (1, 1), (2, 2), (3, 2))
    ]
    assert [item.ordinal for item in await buffer.backlog("reward_model", 1)] == [2]
    assert await buffer.mark_produced([make_column(0), make_column(2)]) == {0: "produced", 2: "produced"}
    assert [item.ordinal for item in await buffer.backlog("teacher", 10)] == [1, 3]
    assert await states(buffer) == {"written": 3, "ready": 1}
    await buffer.mark_produced([make_column(2, name="reward_model")])
    assert await states(buffer) == {"written": 2, "ready": 2}


async def test_repeated_and_unknown_columns_are_reported(buffer):
    await fill_step(buffer, 1, needs=NEEDS)
    columns = [make_column(ordinal) for ordinal in (0, 1, 9)]
    assert await buffer.mark_produced(columns) == {0: "produced", 1: "produced", 9: "unknown"}
    await buffer.select(1)
    assert await buffer.mark_produced(columns) == {0: "repeated", 1: "repeated", 9: "unknown"}
    assert await buffer.mark_produced([make_column(0, name="other")]) == {0: "late"}


async def test_a_group_may_bring_its_columns_along(buffer):
    await buffer.assign(1, 2, None)
    attempt = await buffer.start_attempt(0, 0, "w")
    group = make_group(attempt, 1, NEEDS)
    group.columns = {"teacher": make_column(0)}
    await buffer.commit(attempt, group)
    assert (await states(buffer))["ready"] == 1
    assert same((await buffer.read([0], True))[0], group)
    other = await buffer.start_attempt(1, 0, "w")
    group = make_group(other, 1, NEEDS)
    group.columns = {"teacher": make_column(0)}
    with pytest.raises(DataError, match="column 'teacher' of ordinal 0"):
        await buffer.commit(other, group)


async def test_selection_is_repeatable_and_ordered(buffer):
    await fill_step(buffer, 1)
    first = await buffer.select(1)
    assert await buffer.select(1) == first
    with pytest.raises(NotSelectable):
        await buffer.select(2)
    with pytest.raises(RolloutError, match="after step 1"):
        await buffer.select(3)
    with pytest.raises(RolloutError, match="ordinal 0 is consumed"):
        await buffer.discard(0, "late idea")


async def test_waiters_wake_when_the_last_group_comes(buffer):
    await buffer.assign(1, 2, None)
    scored = asyncio.create_task(buffer.wait_scored(1, 5))
    selection = asyncio.create_task(buffer.wait_selection(1, 5))
    await roll_out(buffer, 0, 1, NEEDS)
    await roll_out(buffer, 1, 1)
    assert not scored.done()
    await buffer.mark_produced([make_column(0)])
    assert await scored
    assert not selection.done()
    await buffer.close_rollout(1)
    assert (await selection).ordinals == (0, 1)


async def test_waiters_give_up_in_time(buffer):
    assert await buffer.wait_scored(1, 0.01) is False
    assert await buffer.wait_selection(1, 0) is None


async def test_finished_samples_of_an_unfinished_group_are_kept(buffer):
    await buffer.assign(1, 2, None)
    first = await buffer.start_attempt(0, 0, "w")
    for index in (1, 0):
        await buffer.store_sample(first, make_sample(0, index))
    await buffer.end_attempt(first, "lost", "worker died")
    with pytest.raises(LateCommit):
        await buffer.store_sample(first, make_sample(0, 2))
    second = await buffer.start_attempt(0, 0, "w")
    assert same(await buffer.stored_samples(0), [make_sample(0, 0), make_sample(0, 1)])
    assert await buffer.stored_samples(1) == []
    await buffer.commit(second, make_group(second, 1))
    assert await buffer.stored_samples(0) == []


async def test_a_group_may_be_encoded_where_it_was_made_and_travels_in_one_block(buffer):
    await buffer.assign(1, 2, None)
    attempts = [await buffer.start_attempt(ordinal, 0, "w") for ordinal in range(2)]
    encoded = contents.encode_group(make_group(attempts[0], 1, NEEDS, samples=8, tokens=2000))
    blocks: list[pickle.PickleBuffer] = []
    travelling = pickle.dumps(encoded, 5, buffer_callback=blocks.append)
    assert len(blocks) == 1 and len(travelling) < 2000
    assert await buffer.commit(attempts[0], pickle.loads(travelling, buffers=blocks)) is True
    assert await buffer.commit(attempts[0], encoded) is False
    assert same(await buffer.read([0], True), [make_group(attempts[0], 1, NEEDS, samples=8, tokens=2000)])
    with pytest.raises(RolloutError, match="committed by attempt"):
        await buffer.commit(attempts[1], encoded)


async def test_a_wrong_group_is_refused_and_does_not_hurt_its_neighbours(buffer):
    await buffer.assign(1, 3, None)
    attempts = [await buffer.start_attempt(ordinal, 0, "w") for ordinal in range(3)]
    groups = [make_group(attempts[0], 1), make_group(attempts[1], 7), make_group(attempts[2], 1)]
    results = await asyncio.gather(*map(buffer.commit, attempts, groups), return_exceptions=True)
    assert results[0] is True and results[2] is True
    assert isinstance(results[1], RolloutError) and "belongs to step 1, its group says step 7" in str(results[1])
    assert await states(buffer) == {"running": 1, "ready": 2}


async def test_training_results_are_recorded_once(buffer):
    await buffer.record_step(1, {"loss": 1.0})
    await buffer.record_step(1, {"loss": 2.0})
    await buffer.record_step(2, {"loss": 0.5})
    assert (await buffer.steps())["results"] == {1: {"loss": 1.0}, 2: {"loss": 0.5}}
    assert (await buffer.steps(1))["results"] == {2: {"loss": 0.5}}


async def test_steps_tell_what_a_resume_replays(buffer):
    for step in range(1, 6):
        await fill_step(buffer, step)
        await buffer.select(step)
        await buffer.record_step(step, {})
        if step in (1, 2, 4):
            await buffer.mark_trained(step, f"checkpoints/step_{step:06d}")
    steps = await buffer.steps()
    assert (steps["trained_step"], steps["checkpoint_step"], steps["checkpoint_path"]) == (5, 4, "checkpoints/step_000004")
    assert steps["selections"] == {3: [4, 5], 4: [6, 7], 5: [8, 9]}
    assert await states(buffer) == {"consumed": 2, "trained": 8}
    await buffer.forget_checkpoint(4)
    assert list((await buffer.steps())["selections"]) == [2, 3, 4, 5]


async def test_status_shows_stages_and_the_run(buffer):
    await buffer.report_stage(StageReport("trainer", "r:trainer", 12, "n", 3, 2, 1, 0.5, detail={"a": 1}))
    await buffer.set_run("failed", "stage trainer: boom", workflow_id="run.r2", nodes_done=7)
    status = await buffer.status()
    assert (status["run_id"], status["state"], status["error"]) == ("run", "failed", "stage trainer: boom")
    assert status["workflow"] == {"id": "run.r2", "nodes_done": 7, "nodes_rerun": 0}
    trainer = status["stages"]["trainer"]
    assert {key: trainer[key] for key in ("actor", "pid", "node", "in", "out", "backlog", "oldest_s")} == {
        "actor": "r:trainer", "pid": 12, "node": "n", "in": 3, "out": 2, "backlog": 1, "oldest_s": 0.5,
    }  # fmt: skip


async def test_the_buffer_reports_commits_and_nothing_else(buffer):
    await fill_step(buffer, 1)
    report = buffer.report()
    assert (report.started, report.finished, report.backlog) == (2, 2, 0)


async def test_a_closed_buffer_says_so(paths):
    async with opened(paths) as buffer:
        waiter = asyncio.create_task(buffer.wait_scored(1, 60))
        await asyncio.sleep(0.01)
    with pytest.raises(RolloutError, match="closed"):
        await waiter
    with pytest.raises(RolloutError, match="closed"):
        await buffer.assign(1, 2, None)
