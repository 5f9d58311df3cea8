"""One transaction for many callers, and in which order bytes become durable."""

from __future__ import annotations

import asyncio
import os
import time

import pytest

from pipeline.buffer import segments
from pipeline.buffer.schema import get_meta, set_meta
from pipeline.errors import RolloutError
from tests.pipeline.buffer.helpers import make_group, make_settings, new_run, opened

WIDE = make_settings(tasks_per_step=200, max_staleness=0, capacity=200)


async def started(buffer, count: int) -> list:
    await buffer.assign(1, count, None)
    return [await buffer.start_attempt(ordinal, 0, "w") for ordinal in range(count)]


@pytest.mark.parametrize("threaded", [True, False])
async def test_commits_that_come_together_share_transactions(tmp_path, threaded):
    async with opened(new_run(tmp_path), WIDE, threaded=threaded) as buffer:
        attempts = await started(buffer, 100)
        statements: list[str] = []
        buffer._store._db.set_trace_callback(statements.append)
        began = time.perf_counter()
        assert all(await asyncio.gather(*(buffer.commit(attempt, make_group(attempt, 1)) for attempt in attempts)))
        seconds = time.perf_counter() - began
        assert statements.count("COMMIT") < 20
        assert 100 / seconds > 300  # groups a second; alone on the machine some thousands
        assert len(await buffer.read(list(range(100)), False)) == 100


async def test_segments_are_synced_before_the_transaction_that_names_them_and_commits_are_full(tmp_path, monkeypatch):
    events: list[str] = []
    real = os.fdatasync
    async with opened(new_run(tmp_path)) as buffer:
        (attempt,) = await started(buffer, 1)
        assert buffer._store._db.execute("PRAGMA synchronous").fetchone()[0] == 2
        assert buffer._store._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        buffer._store._db.set_trace_callback(events.append)
        monkeypatch.setattr(segments.os, "fdatasync", lambda file: (real(file), events.append("fdatasync")))
        await buffer.commit(attempt, make_group(attempt, 1, tokens=8000))
    assert events.index("fdatasync") < events.index("BEGIN IMMEDIATE") < events.index("COMMIT")


@pytest.mark.parametrize("threaded", [True, False])
async def test_a_job_that_fails_half_way_leaves_nothing_and_its_neighbours_stand(tmp_path, threaded):
    def half(ledger):
        set_meta(ledger.db, "fact:half", 1)
        raise RolloutError("half way")

    def whole(ledger):
        set_meta(ledger.db, "fact:whole", 1)

    async with opened(new_run(tmp_path), threaded=threaded) as buffer:
        results = await asyncio.gather(buffer._write(whole), buffer._write(half), buffer.assign(1, 2, None), return_exceptions=True)
        assert isinstance(results[1], RolloutError) and len(results[2]) == 2
        assert await buffer._read(lambda db: (get_meta(db, "fact:half"), get_meta(db, "fact:whole"))) == (None, 1)


@pytest.mark.parametrize("threaded", [True, False])
async def test_a_caller_that_goes_away_does_not_take_others_along(tmp_path, threaded):
    async with opened(new_run(tmp_path), threaded=threaded) as buffer:
        attempts = await started(buffer, 2)
        calls = [asyncio.create_task(buffer.commit(attempt, make_group(attempt, 1))) for attempt in attempts]
        await asyncio.sleep(0)
        calls[0].cancel()
        assert await calls[1]
        await buffer.commit(attempts[0], make_group(attempts[0], 1))
        assert (await buffer.status())["ordinals"]["ready"] == 2


async def test_closing_writes_what_was_submitted(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        attempts = await started(buffer, 4)
        calls = [asyncio.create_task(buffer.commit(attempt, make_group(attempt, 1))) for attempt in attempts]
        await asyncio.sleep(0)
    assert await asyncio.gather(*calls) == [True] * 4
