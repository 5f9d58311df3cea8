"""One run in which every process that it replaces by itself is killed in the middle of a step, one after the other."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.chaos.victims import HEALING, STAGES, kill
from tests.chaos.witnesses import first_after, judge
from tests.e2e.program import program, status, wait_for

CONFIG = Path(__file__).with_name("chaos.yaml")
STEPS, TASKS = 40, 4
HEALED_S = 20.0
VICTIMS = sorted(HEALING)


@pytest.fixture(scope="module")
def ordeal(tmp_path_factory):
    """victim -> seconds until it reports (stages) and until the next group or step, and the run after its end."""
    seconds: dict[str, dict[str, float]] = {}
    with program(tmp_path_factory.mktemp("chaos")) as rollout:
        paths = rollout.run("r")
        command = rollout.start("run", CONFIG, f"trainer.steps={STEPS}", "--run-id", "r")

        def rolling() -> dict | None:
            found = status(paths)
            return found if found and found["step"] and found["ordinals"]["running"] else None

        for victim in VICTIMS:
            before = wait_for(rolling, 60, "the middle of a step", command)["stages"]
            at = time.time()
            assert kill(victim, rollout, command, "r"), victim

            def replaced(victim: str = victim, before: dict = before) -> bool:
                return victim not in STAGES or status(paths)["stages"][victim]["pid"] != before[victim]["pid"]

            wait_for(replaced, HEALED_S, f"the new {victim}", command)
            reported = time.time() - at
            went_on = wait_for(lambda at=at: first_after(paths, at + 0.2), HEALED_S, f"a group after {victim} died", command)
            step = before_step = status(paths)["step"]
            wait_for(lambda before_step=before_step: status(paths)["step"] > before_step, 60, "the next step", command)
            seconds[victim] = {"report": reported, "group": went_on - at, "step": time.time() - at}
            assert step >= 1
        done = command.done(120)
        left = rollout.processes()
    print(json.dumps({victim: {what: round(s, 1) for what, s in found.items()} for victim, found in seconds.items()}))
    return seconds, done, left, paths


def test_the_run_finishes_without_a_command(ordeal):
    _, done, left, paths = ordeal
    assert done.code == 0, done
    assert left == []
    assert status(paths)["state"] == "finished"


def test_nothing_was_lost_or_repeated(ordeal):
    verdict = judge(ordeal[3], STEPS, TASKS)
    assert (verdict.lost, verdict.trained_twice, verdict.regenerated, verdict.wrong) == ([], [], [], [])


@pytest.mark.parametrize("victim", VICTIMS)
def test_it_is_replaced_soon(ordeal, victim):
    found = ordeal[0][victim]
    if victim in STAGES:
        assert found["report"] < HEALED_S
    assert found["step"] < 3 * HEALED_S
