"""The judge sees what it should: a clean run passes, and each planted fault is named."""

from __future__ import annotations

import json
import sqlite3

import pytest

from deployments.witness import CommitWitness, TrainWitness
from pipeline.paths import RunPaths
from tests.chaos.witnesses import first_after, judge, lines
from tests.pipeline.buffer.helpers import make_group, make_settings, new_run, opened

STEPS, TASKS = 3, 2


@pytest.fixture
async def run(tmp_path) -> RunPaths:
    """A finished run with its witnesses, without its processes."""
    paths = new_run(tmp_path)
    paths.log.mkdir()
    async with opened(paths, make_settings()) as buffer:
        pool, trainer = CommitWitness(buffer, paths.commits), TrainWitness(buffer, paths.trained)
        for step in range(1, STEPS + 1):
            for slot in await buffer.assign(step, TASKS, None):
                attempt = await pool.start_attempt(slot.ordinal, 0, "w")
                add(paths.plays, paths.plays, ordinal=slot.ordinal, attempt=attempt.number)
                await pool.commit(attempt, make_group(attempt, step))
            await buffer.close_rollout(step)
            await trainer.read(list((await trainer.select(step)).ordinals), True)
            await trainer.record_step(step, {"weights": f"w{step}"})
        await buffer.mark_trained(STEPS, "c")
        await buffer.set_run("finished")
    return paths


def add(like, path, **changes) -> None:
    """One more line: the last one of `like` with changes, a moment later."""
    found = lines(like)
    last = found[-1] if found else {"t": 0.0, "pid": 1}
    with path.open("a") as file:
        file.write(json.dumps(last | {"t": last["t"] + 0.5} | changes) + "\n")


def faults(paths: RunPaths) -> dict[str, list[str]]:
    verdict = judge(paths, STEPS, TASKS)
    return {name: entries for name in ("lost", "trained_twice", "regenerated", "wrong") if (entries := getattr(verdict, name))}


def test_a_clean_run_passes(run):
    assert faults(run) == {}
    assert first_after(run, 0.0) == lines(run.commits)[0]["t"]
    assert first_after(run, lines(run.trained)[-1]["t"]) is None


def test_a_step_that_a_crash_made_the_trainer_repeat_is_no_fault(run):
    add(run.trained, run.trained)
    assert faults(run) == {}


def test_a_commit_acknowledged_twice_for_one_attempt_is_no_fault(run):
    add(run.commits, run.commits)
    assert faults(run) == {}


def test_rows_that_are_not_those_that_were_acknowledged_are_lost(run):
    db = sqlite3.connect(run.database)
    db.execute("DELETE FROM payloads WHERE ordinal = 3")
    db.commit()
    db.close()
    assert list(faults(run)) == ["lost"]


def test_an_acknowledged_group_that_was_never_trained_is_lost(run):
    kept = [json.dumps(line) for line in lines(run.trained)[:-1]]
    run.trained.write_text("\n".join(kept) + "\n")
    assert set(faults(run)) == {"lost", "wrong"}


@pytest.mark.parametrize("change", [{"step": 4}, {"weights": "other"}, {"ordinals": [4, 0]}])
def test_training_again_on_something_else_is_training_twice(run, change):
    add(run.trained, run.trained, **change)
    assert "trained_twice" in faults(run)


def test_a_play_after_the_commit_is_a_regeneration(run):
    add(run.commits, run.plays, ordinal=5, attempt=2)
    assert list(faults(run)) == ["regenerated"]


def test_another_attempt_that_is_acknowledged_is_a_regeneration(run):
    add(run.commits, run.commits, attempt=2)
    assert "regenerated" in faults(run)


def test_a_run_that_says_it_failed_is_wrong(run):
    db = sqlite3.connect(run.database)
    db.execute("UPDATE meta SET value = '\"failed\"' WHERE key = 'state'")
    db.commit()
    db.close()
    assert list(faults(run)) == ["wrong"]
