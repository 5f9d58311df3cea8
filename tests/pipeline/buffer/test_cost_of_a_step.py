"""What a step asks of the database costs the same however many steps there were before it."""

from __future__ import annotations

import sqlite3

import pytest

from tests.pipeline.buffer.helpers import fast_folder, fill_step, make_column, make_settings, new_run, opened

WARM, STEPS = 8, 48
"""Steps until retention removes as much as comes in, and in all."""


@pytest.fixture
def work(monkeypatch):
    """Instructions of SQLite's machine so far, over all connections."""
    done = [0]

    def count():
        done[0] += 1

    class Counting(sqlite3.Connection):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            self.set_progress_handler(count, 1)

    connect = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", lambda *arguments, **options: connect(*arguments, factory=Counting, **options))
    return lambda: done[0]


async def play(buffer, step: int) -> None:
    ordinals = await fill_step(buffer, step, needs=("teacher",), version=step - 1)
    await buffer.backlog("teacher", 4)
    await buffer.mark_produced([make_column(ordinal) for ordinal in ordinals])
    assert await buffer.wait_scored(step, 0)
    selection = await buffer.wait_selection(step, 0)
    assert len(await buffer.read(list(selection.ordinals), True)) == 2
    await buffer.record_step(step, {})
    await buffer.mark_trained(step, f"checkpoints/{step}")
    await buffer.steps(step - 1)
    assert await buffer.wait_capacity(2, 0)


@pytest.mark.parametrize("sampler", ["in_order", "windowed"])
@pytest.mark.parametrize("inline_bytes", [64, 65536])
async def test_a_late_step_is_no_more_work_than_an_early_one(work, sampler, inline_bytes):
    """inline_bytes: rows in segments, and in the database."""
    settings, costs = make_settings(sampler=sampler, keep_groups=4, inline_bytes=inline_bytes), []
    with fast_folder() as folder:
        async with opened(new_run(folder), settings, epoch=True, threaded=False) as buffer:
            for step in range(1, STEPS + 1):
                before = work()
                await play(buffer, step)
                costs.append(work() - before)
    assert costs[WARM] > 1000, "the work is counted"
    assert max(costs[WARM:]) < 1.02 * costs[WARM]
