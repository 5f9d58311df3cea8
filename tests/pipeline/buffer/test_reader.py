"""The run as others see it."""

from __future__ import annotations

import asyncio
import sqlite3

import pytest

from pipeline.buffer.reader import read_facts, read_selections, read_status, read_steps
from pipeline.buffer.schema import create_run, is_created
from pipeline.errors import UserError
from pipeline.paths import RunPaths
from tests.pipeline.buffer.helpers import fill_step, make_column, new_run, opened


async def test_a_new_run_is_starting_with_all_counts_zero(tmp_path):
    status = read_status(new_run(tmp_path, "first", steps=7))
    assert status == {
        "run_id": "first", "state": "starting", "error": None, "step": 0, "steps": 7, "weight_version": 0, "checkpoint_step": 0,
        "ordinals": {"fetched": 0, "pending": 0, "running": 0, "written": 0, "ready": 0, "consumed": 0, "trained": 0, "dropped": 0},
        "dropped_by_reason": {}, "replaced": 0, "short_late": 0,
        "attempts": {"started": 0, "lost": 0, "late": 0, "regenerated": 0},
        "capacity": {"total": None, "used": 0}, "stages": {}, "workflow": {"id": None, "nodes_done": 0, "nodes_rerun": 0},
    }  # fmt: skip


async def test_the_ledger_view_has_its_stable_columns(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        await fill_step(buffer, 1, needs=("teacher",), version=0)
        await buffer.mark_produced([make_column(0)])
        await buffer.discard(1, "scoring")
        db = sqlite3.connect(f"file:{paths.database}?mode=ro", uri=True)
        cursor = db.execute("SELECT * FROM ledger ORDER BY ordinal")
        names = [column[0] for column in cursor.description]
        assert names == ["ordinal", "step", "slot", "state", "attempt", "reason", "weight_version", "fields", "rows_sha256"]
        first, second = cursor.fetchall()
        assert first[:8] == (0, 1, 0, "ready", 1, None, 0, "teacher") and len(first[8]) == 64
        assert second[:8] == (1, 1, 1, "dropped", 1, "scoring", 0, "")
        db.close()


async def test_status_adds_up_while_the_buffer_is_busy(tmp_path):
    paths = new_run(tmp_path)

    async def work(buffer):
        for step in range(1, 40):
            await fill_step(buffer, step)
            await buffer.select(step)
            await buffer.record_step(step, {})

    async with opened(paths) as buffer:
        working = asyncio.create_task(work(buffer))
        seen = []
        while not working.done():
            status = await asyncio.to_thread(read_status, paths)
            counts = status["ordinals"]
            assert sum(count for state, count in counts.items() if state != "fetched") == counts["fetched"]
            assert counts["consumed"] in (2 * status["step"], 2 * status["step"] + 2)
            seen.append(counts["consumed"])
        await working
    assert seen == sorted(seen) and len(set(seen)) > 2
    assert read_status(paths)["step"] == 39


async def test_results_selections_and_facts_are_read_without_the_buffer(tmp_path):
    paths = new_run(tmp_path, steps=3)
    async with opened(paths) as buffer:
        await fill_step(buffer, 1)
        await buffer.select(1)
        await buffer.record_step(1, {"loss": float("inf")})
        await buffer.set_run("running", window_first=1)
    assert read_steps(paths) == {1: {"loss": float("inf")}}
    assert read_selections(paths) == {1: [0, 1]}
    assert read_facts(paths) == {"steps": 3, "window_first": 1}
    assert read_status(paths)["capacity"] == {"total": 4, "used": 0}


def test_a_run_is_created_once(tmp_path):
    paths = new_run(tmp_path)
    with pytest.raises(UserError, match="run run exists"):
        create_run(paths, {})


def test_a_creation_that_was_killed_can_be_repeated(tmp_path):
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    paths.database.touch()
    create_run(paths, {"steps": 3})
    assert read_status(paths)["steps"] == 3


@pytest.mark.parametrize("left", ["nothing", "an empty file", "a header"])
def test_a_resume_makes_good_what_was_killed_while_it_was_made(tmp_path, left):
    paths = RunPaths(tmp_path / "run")
    paths.root.mkdir()
    if left == "an empty file":
        paths.database.touch()
    elif left == "a header":
        db = sqlite3.connect(paths.database)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("BEGIN IMMEDIATE")
        db.execute("CREATE TABLE meta (key TEXT)")
        db.close()  # killed before its commit
        assert paths.database.stat().st_size > 0
    assert not is_created(paths)
    for steps in (3, 4):
        create_run(paths, {"steps": steps}, exist_ok=True)
        assert is_created(paths) and read_status(paths)["steps"] == 3, "a run that is there is left alone"


def test_what_is_no_run_is_refused_by_name(tmp_path):
    paths = RunPaths(tmp_path / "run")
    with pytest.raises(UserError, match=r"no run in .*run\.db is missing"):
        read_status(paths)
    paths.root.mkdir()
    paths.database.write_text("this is not a database, it is a longer text that SQLite does not know " * 20)
    with pytest.raises(UserError, match="cannot be read as a run's database"):
        read_status(paths)
    paths.database.unlink()
    sqlite3.connect(paths.database).execute("CREATE TABLE foreign_table (x)").connection.close()
    with pytest.raises(UserError, match="not a run's database"):
        read_status(paths)


def test_a_newer_schema_is_refused_by_number(tmp_path):
    paths = new_run(tmp_path)
    db = sqlite3.connect(paths.database)
    db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(UserError, match="schema version 99; this program reads version 2"):
        read_status(paths)
