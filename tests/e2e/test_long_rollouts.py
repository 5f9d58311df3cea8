"""Two rollouts take ten times as long as the others, and the run is killed again and again soon after it began."""

import time

import pytest

from tests.chaos.witnesses import first_after
from tests.e2e.program import adds_up, status, trained_as_planned, wait_for

STEPS, TASKS = 4, 4
LONG = [f"trainer.steps={STEPS}", "engine.script.seconds_by_ordinal={3: 1.2, 9: 1.2}"]
KILL_AFTER_S = 2.0
MOST_KILLS = 10


@pytest.mark.fault(3)
def test_long_rollouts_are_neither_lost_nor_late(rollout, tiny):
    paths, words, kills = rollout.run("r"), ("run", tiny, *LONG, "--run-id", "r"), 0
    while (status(paths) or {"state": "new"})["state"] != "finished":
        assert kills < MOST_KILLS
        began = time.time()
        command = rollout.start(*words)
        wait_for(lambda began=began, command=command: first_after(paths, began) or not command.running(), 60, "the first group")
        until = time.monotonic() + KILL_AFTER_S
        while command.running() and time.monotonic() < until:
            time.sleep(0.05)
        kills += command.running()
        rollout.kill_all()
        words = ("resume", "r")
    found = status(paths)
    assert kills >= 1 and adds_up(found) and found["attempts"]["regenerated"] == 0
    assert trained_as_planned(paths, STEPS, TASKS), "each once, and the long ones in the steps that they belong to"
