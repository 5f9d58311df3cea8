"""The benchmark's parts do what they state: time jumps, the stage overlaps with rollouts, the inline hook does not."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.errors import RolloutError
from pipeline.teacher import bench_commits
from pipeline.teacher.bench import SCALE, Workload, bounds, play
from pipeline.teacher.virtual_time import run_on_virtual_time


def test_virtual_time_jumps_to_the_next_timer_and_refuses_to_wait_for_nothing():
    async def hours() -> float:
        await asyncio.gather(asyncio.sleep(3600), asyncio.sleep(7200))
        return asyncio.get_running_loop().time()

    assert run_on_virtual_time(hours()) == 7200
    with pytest.raises(RolloutError, match="no timer is left"):
        run_on_virtual_time(asyncio.Event().wait())


def test_the_stage_is_faster_than_the_inline_hook_and_holds_fewer_permits():
    stage, inline, none = (play(Workload(), mode) for mode in ("stage", "inline", "none"))
    assert inline.seconds >= 1.6 * stage.seconds
    assert none.seconds < stage.seconds < 1.2 * none.seconds
    assert stage.permits_while_scoring < inline.permits_while_scoring and stage.calls < inline.calls
    assert none.calls == 0 and inline.calls == 96


def test_where_permits_are_scarce_the_teacher_is_nearly_free_and_the_whole_near_its_bound():
    scarce = Workload(permits=4)
    assert play(scarce, "stage").seconds <= 1.10 * play(scarce, "none").seconds
    costly = Workload(permits=4, row_s=0.1)
    assert play(costly, "stage").seconds <= 1.15 * max(bounds(costly).values())
    assert bounds(costly)["training"] == pytest.approx(12 / SCALE)


def test_commits_are_measured_with_the_teacher_off_slow_and_dead():
    found = bench_commits.figures(groups=20)
    assert set(found) == {"commit_p99_off_ms", "commit_p99_slow_ms", "commit_p99_dead_ms"}
    assert all(0 < value < 5000 for value in found.values())
