"""The benchmark's parts do what they state: time jumps, the stage overlaps with rollouts, the inline hook does not."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.bench import teacher_calls, teacher_commits
from pipeline.bench.teacher import SCALE, Workload, bounds, floor_s, over_bound, play
from pipeline.bench.virtual_time import run_on_virtual_time
from pipeline.errors import ConfigError, RolloutError

pytestmark = pytest.mark.slow


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
    assert over_bound(scarce) <= 1.15 and over_bound(Workload()) <= 1.15
    assert bounds(scarce)["training"] == pytest.approx(12 / SCALE)


def test_the_floor_is_what_a_replica_for_each_group_reaches_and_nothing_is_below_it():
    floor = floor_s(Workload())
    assert play(Workload(replicas=16), "stage").seconds == pytest.approx(floor, rel=1e-2)
    assert play(Workload(replicas=2), "stage").seconds < play(Workload(), "stage").seconds
    assert all(floor_s(each) <= play(each, "stage").seconds for each in (Workload(), Workload(permits=4), Workload(seed=1)))
    assert floor_s(Workload(call_s=0.0)) == pytest.approx(play(Workload(), "none").seconds, rel=1e-2)


def test_no_draw_of_the_rollouts_gives_a_floor_below_the_one_that_is_named():
    def ratio(**changes) -> float:
        return floor_s(Workload(**changes)) / floor_s(Workload(call_s=0.0, **changes))

    assert min(ratio(seed=seed) for seed in range(100)) >= 1.098
    assert ratio(rollout_s=(8.0, 8.0)) == pytest.approx(1.098, abs=1e-3)
    assert ratio() > 1.10, "so the one that is measured cannot be met"


def test_calls_of_stated_cost_save_what_they_state():
    assert teacher_calls.stated()["call32_over_8x4"] == pytest.approx(1 / 8)


def test_calls_of_a_random_model_are_measured():
    found, who = teacher_calls.of_shape("tiny", "cpu", tokens=8)
    assert 0 < found["call32_over_8x4"] < 2 and "tiny" in who
    with pytest.raises(ConfigError, match="shape '9b' is unknown"):
        teacher_calls.of_shape("9b", "cpu")


def test_commits_are_measured_with_the_teacher_off_slow_and_dead():
    found = teacher_commits.figures(groups=10, rounds=1)
    assert set(found) == {"commit_p99_off_ms", "commit_p99_slow_ms", "commit_p99_dead_ms"}
    assert all(0 < value < 5000 for value in found.values())
