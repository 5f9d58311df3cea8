"""Runs that are stopped in the middle, in every way there is, and go on.

The rollouts of the third and the fifth step take seconds (ordinals 9 and 17 are slow), so that a test can stop the run at a
moment when that step runs, others are consumed, and no other node is at work. One run is stopped several times in a row, because
a start costs ten seconds, and because that is how it happens.
"""

import shutil
import signal
import time

import pytest

from pipeline.buffer.reader import read_steps
from tests.e2e.program import adds_up, nodes, status, trained_as_planned, wait_for

STEPS, TASKS = 6, 4
SLOW = [f"trainer.steps={STEPS}", "trainer.save_every=5", "engine.script.seconds_by_ordinal={9: 3.0, 17: 3.0}"]
QUIET_S = 0.7


def alone(paths, step: int) -> bool:
    """That step's rollout runs, its slow ordinal is all that is left of it, and nothing else has begun or ended for a moment."""
    noted = nodes(paths)
    ended = {line["node"] for line in noted if line["event"] == "done"}
    running = {line["node"] for line in noted if line["event"] == "started"} - ended
    quiet = bool(noted) and time.time() - noted[-1]["t"] > QUIET_S
    in_the_middle = quiet and f"rollout[{step}]" in running and f"train[{step - 1}]" in ended
    return in_the_middle and status(paths)["ordinals"]["running"] == 1


def in_step(number: int, paths, command) -> dict:
    """The run's status in the middle of that step."""
    wait_for(lambda: alone(paths, number), 60, f"the middle of step {number}", command)
    return status(paths)


def finishes(rollout, paths, command) -> dict:
    """Whatever happened before: nothing was lost, repeated, or trained twice."""
    done = command.done(60)
    assert done.code == 0, done
    assert done.out.startswith(f"run {paths.run_id} {paths.root}\n")
    found = status(paths)
    assert found["state"] == "finished" and adds_up(found)
    assert found["attempts"]["regenerated"] == 0
    assert trained_as_planned(paths, STEPS, TASKS)
    assert sorted(read_steps(paths)) == list(range(1, STEPS + 1))
    assert found["ordinals"]["trained"] == STEPS * TASKS
    assert rollout.processes() == []
    return found


@pytest.mark.fault(2, 35, 38)
def test_killed_drivers_killed_clusters_and_a_folder_that_moves(rollout, tiny):
    run, paths = rollout.start("run", tiny, *SLOW, "--run-id", "r"), rollout.run("r")
    in_step(3, paths, run)
    second = rollout.call("resume", "r")
    assert (second.code, len(second.err.splitlines())) == (4, 1)
    assert f"run r is locked by process {run.process.pid}" in second.err
    assert run.running(), "who is refused does no harm"

    run.send(signal.SIGKILL)
    run.done(10)
    assert status(paths)["state"] == "running", "nobody was left to say otherwise"
    changed = rollout.call("resume", "r", "rollout.samples_per_task=3")
    assert changed.code == 2
    assert changed.err.splitlines()[0] == "error: run r: cannot change rollout.samples_per_task: 2 -> 3 on resume"

    resumed = rollout.start("resume", "r")
    found = in_step(5, paths, resumed)
    assert found["workflow"]["id"] == "r.r1" and found["workflow"]["nodes_rerun"] <= 2, "the interrupted workflow went on"
    # a node that ends in the moment of the kill is not in the workflow's storage yet; a new workflow runs all of them again
    assert found["attempts"]["lost"] <= 1, "the one that ran when the driver died, unless the orphaned stages still committed it"
    rollout.kill_all()

    shutil.rmtree(paths.workflow)
    moved = rollout.run("elsewhere/r")
    moved.root.parent.mkdir()
    paths.root.rename(moved.root)
    found = finishes(rollout, moved, rollout.start("resume", moved.root))
    assert found["workflow"]["id"] == "r.r2", "a new workflow begins at the first step that is not trained"
    assert found["attempts"]["lost"] in (1, 2), "everything was killed while ordinal 17 ran"


def test_interrupts_and_a_torn_workflow(rollout, tiny):
    run, paths = rollout.start("run", tiny, *SLOW, "--run-id", "r"), rollout.run("r")
    wait_for(lambda: rollout.find("gcs_server"), 30, "the start of Ray", run)
    run.send(signal.SIGTERM)
    assert run.done(45).code == 3, "also when it has hardly begun"
    assert rollout.processes() == []
    assert status(paths)["state"] == "stopped"

    run = rollout.start("resume", "r")
    in_step(3, paths, run)
    run.send(signal.SIGINT)
    done = run.done(45)
    assert done.code == 3 and "resume" in done.out.splitlines()[-1]
    assert rollout.processes() == []
    found = status(paths)
    assert found["state"] == "stopped" and adds_up(found)
    assert found["checkpoint_step"] == found["step"] >= 2, "what was trained is in a checkpoint"
    assert found["ordinals"]["running"] == 0 and found["attempts"]["lost"] == 0, "what ran was given time to end"

    (output,) = (paths.workflow / "workflows").rglob("*train[[]2]*/output.pkl")
    output.write_bytes(output.read_bytes()[:7])
    finishes(rollout, paths, rollout.start("resume", "r"))


def test_killed_before_there_is_a_ledger(rollout, tiny):
    run, paths = rollout.start("run", tiny, *SLOW, "--run-id", "r"), rollout.run("r")
    wait_for(paths.config.exists, 30, "the run folder", run)
    rollout.kill_all()
    finishes(rollout, paths, rollout.start("resume", "r"))
