"""A run that is stopped in the middle, in every way there is, and goes on.

The third step's rollout takes seconds (ordinal 9 is slow), so that a test can stop the run at a moment when that step runs,
others are consumed, and no other node is at work.
"""

import shutil
import signal
import time

from pipeline.buffer.reader import read_steps
from tests.e2e.program import adds_up, nodes, program, status, trained_as_planned, wait_for

STEPS, TASKS = 6, 4
SLOW = ["trainer.steps=6", "trainer.save_every=5", "engine.script.seconds_by_ordinal={9: 3.0}"]
QUIET_S = 0.7


def in_the_third_step(paths) -> bool:
    """rollout[3] runs, and nothing else has begun or ended for a moment."""
    noted = nodes(paths)
    open_nodes = {line["node"] for line in noted if line["event"] == "started"} - {
        line["node"] for line in noted if line["event"] == "done"
    }
    return "rollout[3]" in open_nodes and "train[2]" not in open_nodes and time.time() - noted[-1]["t"] > QUIET_S


def finishes(rollout, paths, folder=None) -> dict:
    """`rollout resume` to the end; whatever happened before, nothing was lost, repeated, or trained twice."""
    done = rollout.call("resume", folder or paths.run_id)
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


def test_the_driver_is_killed_and_meanwhile_nobody_else_may_write(rollout, tiny):
    run = rollout.start("run", tiny, *SLOW, "--run-id", "r")
    paths = rollout.run("r")
    wait_for(lambda: in_the_third_step(paths), 60, "the third step", run)

    second = rollout.call("resume", "r")
    assert (second.code, len(second.err.splitlines())) == (4, 1)
    assert f"run r is locked by process {run.process.pid}" in second.err
    assert run.running()

    run.send(signal.SIGKILL)
    run.done(10)
    assert status(paths)["state"] == "running", "nobody was left to say otherwise"

    changed = rollout.call("resume", "r", "rollout.samples_per_task=3")
    assert (changed.code, changed.out) == (2, f"run r {paths.root}\n")
    assert changed.err.splitlines()[0] == "error: run r: cannot change rollout.samples_per_task: 2 -> 3 on resume"

    found = finishes(rollout, paths)
    assert found["workflow"]["nodes_rerun"] == 0
    assert found["workflow"]["id"] == "r.r1", "the interrupted workflow went on"


def test_everything_is_killed_the_workflow_is_gone_and_the_folder_elsewhere(rollout, tiny):
    run = rollout.start("run", tiny, *SLOW, "--run-id", "r")
    paths = rollout.run("r")
    wait_for(lambda: in_the_third_step(paths), 60, "the third step", run)
    before = status(paths)
    rollout.kill_all()
    assert before["ordinals"]["consumed"] == 2 * TASKS and before["ordinals"]["running"] == 1

    shutil.rmtree(paths.workflow)
    moved = rollout.run("elsewhere/r")
    moved.root.parent.mkdir()
    paths.root.rename(moved.root)
    found = finishes(rollout, moved, moved.root)
    assert found["workflow"]["id"] == "r.r2", "a new workflow begins at the first step that is not trained"
    assert found["attempts"]["lost"] == 1, "the one that ran"


def test_everything_is_killed_and_a_workflow_file_is_torn(rollout, tiny):
    run = rollout.start("run", tiny, *SLOW, "--run-id", "r")
    paths = rollout.run("r")
    wait_for(lambda: in_the_third_step(paths), 60, "the third step", run)
    rollout.kill_all()
    (output,) = (paths.workflow / "workflows" / "r.r1").rglob("*train[[]2]*/output.pkl")
    output.write_bytes(output.read_bytes()[:7])
    finishes(rollout, paths)


def test_an_interrupt_stops_it_and_it_goes_on(rollout, tiny):
    run = rollout.start("run", tiny, *SLOW, "--run-id", "r")
    paths = rollout.run("r")
    wait_for(lambda: in_the_third_step(paths), 60, "the third step", run)
    run.send(signal.SIGINT)
    done = run.done(45)
    assert done.code == 3
    assert "resume" in done.out.splitlines()[-1]
    assert rollout.processes() == []
    found = status(paths)
    assert found["state"] == "stopped" and adds_up(found)
    assert found["checkpoint_step"] == found["step"] >= 2, "what was trained is in a checkpoint"
    assert found["ordinals"]["running"] == 0, "what ran was given time to end"
    found = finishes(rollout, paths)
    assert found["attempts"]["lost"] == 0


def test_an_interrupt_of_a_run_that_has_hardly_begun(rollout, tiny):
    run = rollout.start("run", tiny, *SLOW, "--run-id", "r")
    paths = rollout.run("r")
    wait_for(lambda: rollout.find("gcs_server"), 30, "the start of Ray", run)
    run.send(signal.SIGTERM)
    assert run.done(45).code == 3
    assert rollout.processes() == []
    assert status(paths)["state"] == "stopped"
    finishes(rollout, paths)


def test_killed_before_there_is_a_ledger(tmp_path, tiny):
    with program(tmp_path) as rollout:
        run = rollout.start("run", tiny, *SLOW, "--run-id", "r")
        paths = rollout.run("r")
        wait_for(paths.config.exists, 30, "the run folder", run)
        rollout.kill_all()
        finishes(rollout, paths)
