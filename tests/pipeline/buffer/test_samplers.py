"""Which groups a training step takes, and that no run waits for ever."""

from __future__ import annotations

import asyncio
import random

import looptime
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import CapacityFull, ConfigError, NotSelectable
from tests.pipeline.buffer.helpers import (
    fast_folder,
    fill_step,
    make_column,
    make_group,
    make_settings,
    new_run,
    opened,
    roll_out,
)


async def test_in_order_waits_for_the_straggler_and_ready_first_does_not(tmp_path):
    for sampler, expected in (("in_order", None), ("ready_first", (2, 4)), ("windowed", (2, 4))):
        async with opened(new_run(tmp_path, sampler), make_settings(sampler=sampler)) as buffer:
            await fill_step(buffer, 1)
            await buffer.select(1)
            await buffer.assign(2, 2, None)
            await roll_out(buffer, 2, 2)
            straggler = await buffer.start_attempt(3, 0, "slow")
            await fill_step(buffer, 3, version=1)
            selection = await buffer.wait_selection(2, 0)
            assert (selection and selection.ordinals) == expected
            await buffer.commit(straggler, make_group(straggler, 2))
            await buffer.close_rollout(2)
            if expected:
                assert (await buffer.select(3)).ordinals == ((3, 5) if sampler == "ready_first" else (5,))
            else:
                assert (await buffer.select(2)).ordinals == (2, 3)


async def test_windowed_drops_what_is_too_old_at_consumption_scored_or_not(tmp_path):
    async with opened(new_run(tmp_path), make_settings(sampler="windowed", max_staleness=1, capacity=8)) as buffer:
        await buffer.assign(1, 4, None)
        for ordinal, needs in ((0, ()), (1, ()), (2, ()), (3, ("teacher",))):
            await roll_out(buffer, ordinal, 1, needs, version=0)
        await buffer.close_rollout(1)
        assert (await buffer.select(1)).ordinals == (0, 1)
        assert await buffer.wait_selection(2, 0) is None  # one is ready; the unscored one may still come
        await fill_step(buffer, 2, version=2)
        assert (await buffer.select(2)).ordinals == (2, 4)  # staleness of ordinal 2: (2 - 1) - 0 = 1
        await fill_step(buffer, 3, version=2)
        selection = await buffer.select(3)  # ordinal 3 would have staleness 2
        assert (selection.ordinals, selection.dropped) == ((5, 6), {"stale": 1})
        assert await buffer.mark_produced([make_column(3)]) == {3: "late"}


async def test_ready_first_takes_a_short_step_only_when_nothing_more_can_come(tmp_path):
    async with opened(new_run(tmp_path), make_settings(sampler="ready_first", on_dropped="shrink")) as buffer:
        assert await buffer.wait_selection(1, 0) is None
        await buffer.assign(1, 2, None)
        await roll_out(buffer, 0, 1)
        await buffer.discard(1, "data")
        with pytest.raises(NotSelectable, match="ready_first"):
            await buffer.select(1)  # its rollout is open: a replacement could come
        await buffer.close_rollout(1)
        assert (await buffer.select(1)).ordinals == (0,)


async def test_the_end_of_data_can_be_selected_as_an_empty_step(tmp_path):
    for sampler in ("in_order", "ready_first", "windowed"):
        async with opened(new_run(tmp_path, sampler), make_settings(sampler=sampler)) as buffer:
            await buffer.assign(1, 2, 0)
            for selection in (await buffer.wait_selection(1, 0), await buffer.select(1)):
                assert selection.ordinals == () and selection.ended


async def test_a_step_that_finds_nothing_because_all_was_too_old_is_no_end_of_the_data(tmp_path):
    """What the teacher stage drops before it scores it is in no selection's own count."""
    async with opened(new_run(tmp_path), make_settings(sampler="windowed", max_staleness=0)) as buffer:
        await fill_step(buffer, 1)
        await buffer.select(1)
        for ordinal in await fill_step(buffer, 2, needs=("teacher",), version=0):
            assert await buffer.discard(ordinal, "stale")
        for _ in range(2):
            selection = await buffer.select(2)
            assert selection.ordinals == () and not selection.ended


# every run ends, or is refused at start


class Run:
    """The whole dance of one run over a real buffer, with the edges of the workflow: rollout[k] waits for train[k-1-staleness]."""

    def __init__(self, buffer, settings, steps: int, save_every: int, drops: frozenset[int], limit: int | None, seed: int) -> None:
        self.buffer, self.settings, self.steps, self.save_every = buffer, settings, steps, save_every
        self.drops, self.limit, self.random = drops, limit, random.Random(seed)
        self.trained = [asyncio.Event() for _ in range(steps + 1)]
        self.fetched = [asyncio.Event() for _ in range(steps + 1)]
        self.trained[0].set()
        self.fetched[0].set()
        self.version = 0

    async def go(self) -> None:
        async with asyncio.TaskGroup() as self.tasks:
            for step in range(1, self.steps + 1):
                self.tasks.create_task(self.step(step))

    async def step(self, step: int) -> None:
        await self.trained[max(0, step - 1 - self.settings.max_staleness)].wait()
        await self.fetched[step - 1].wait()
        assert await self.buffer.wait_capacity(self.settings.tasks_per_step, 0)  # the edges alone keep within capacity
        slots = await self.buffer.assign(step, self.settings.tasks_per_step, self.limit)
        self.fetched[step].set()
        rollout = self.tasks.create_task(self.rollout(step, [slot.ordinal for slot in slots]))
        await self.trained[step - 1].wait()
        assert await self.buffer.wait_selection(step, 10_000) is not None
        await self.buffer.record_step(step, {})
        self.version = step
        if step % self.save_every == 0:
            await self.buffer.mark_trained(step, f"c{step}")
        self.trained[step].set()
        await rollout

    async def rollout(self, step: int, ordinals: list[int]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for ordinal in ordinals:
                tasks.create_task(self.group(step, ordinal))
        await self.buffer.close_rollout(step)

    async def group(self, step: int, ordinal: int) -> None:
        while True:
            attempt = await self.buffer.start_attempt(ordinal, self.version, "w")
            await asyncio.sleep(self.random.choice([0.1, 1, 1, 10]))
            if ordinal not in self.drops:
                break
            await self.buffer.end_attempt(attempt, "data", "data")
            replacement = await self.buffer.replace(ordinal, self.limit)
            if replacement is None:
                return
            ordinal = replacement.ordinal
        await self.buffer.commit(attempt, make_group(attempt, step, ("teacher",), version=attempt_version(self, attempt)))
        await asyncio.sleep(self.random.choice([0, 1]))
        if self.random.random() < 0.1:
            await self.buffer.discard(ordinal, "scoring")
        else:
            await self.buffer.mark_produced([make_column(ordinal)])


def attempt_version(run: Run, attempt) -> int:
    return run.random.randint(max(0, run.version - 3), run.version)


@settings(max_examples=120, deadline=None)
@given(
    tasks=st.integers(1, 3),
    staleness=st.integers(0, 2),
    spare=st.integers(-1, 3),
    sampler=st.sampled_from(["in_order", "ready_first", "windowed"]),
    on_dropped=st.sampled_from(["replace", "shrink"]),
    steps=st.integers(1, 5),
    save_every=st.integers(1, 6),
    drops=st.frozensets(st.integers(0, 14), max_size=6),
    limit=st.none() | st.integers(0, 12),
    seed=st.integers(0, 99),
)
@pytest.mark.fault(42)
def test_every_run_ends_or_is_refused_at_start(tasks, staleness, spare, sampler, on_dropped, steps, save_every, drops, limit, seed):
    loop = looptime.new_event_loop()
    capacity = max(1, tasks * (staleness + 1) + spare)
    try:
        chosen = make_settings(
            tasks_per_step=tasks, max_staleness=staleness, capacity=capacity, sampler=sampler, on_dropped=on_dropped, keep_groups=2
        )
    except ConfigError as error:
        assert capacity < tasks * (staleness + 1) and "buffer.capacity" in str(error)
        return

    async def play(folder) -> dict:
        async with opened(new_run(folder), chosen, threaded=False, clock=loop.time) as buffer:
            async with asyncio.timeout(100_000):
                await Run(buffer, chosen, steps, save_every, drops, limit, seed).go()
            return await buffer.status()

    with fast_folder() as folder:
        status = loop.run_until_complete(play(folder))
    loop.close()
    counts = status["ordinals"]
    assert status["capacity"]["used"] == 0
    assert counts["consumed"] + counts["trained"] + counts["dropped"] == counts["fetched"]
    if limit is None and on_dropped == "shrink":
        assert counts["consumed"] + counts["trained"] == steps * tasks - counts["dropped"]
    if limit is not None:
        assert counts["fetched"] <= limit


async def test_wait_capacity_is_refused_when_it_never_can_be(tmp_path):
    async with opened(new_run(tmp_path)) as buffer:
        with pytest.raises(CapacityFull, match=r"buffer.capacity is 4"):
            await buffer.assign(1, 5, None)


async def test_a_step_whose_rollout_goes_on_is_open_although_a_later_one_is_trained(tmp_path):
    async with opened(new_run(tmp_path), make_settings(sampler="ready_first")) as buffer:
        assert (await buffer.steps())["first_open"] == 1
        first = [slot.ordinal for slot in await buffer.assign(1, 2, None)]
        await roll_out(buffer, first[0], 1)
        await fill_step(buffer, 2)
        await buffer.select(1)
        await buffer.record_step(1, {})
        assert (await buffer.steps())["first_open"] == 1, "a straggler of step 1 is still to be rolled out"
        await roll_out(buffer, first[1], 1)
        await buffer.close_rollout(1)
        assert (await buffer.steps())["first_open"] == 2
