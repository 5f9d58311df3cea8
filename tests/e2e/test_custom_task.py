"""A task of one's own, in a folder of one's own: the run needs nothing of that folder once it has begun."""

import shutil
from pathlib import Path

from tests.e2e.program import status, step, trained_as_planned, wait_for

SOURCE = Path(__file__).parents[2] / "configs" / "custom_task"
STEPS, TASKS = 30, 4
SMALL = [
    f"trainer.steps={STEPS}",
    f"rollout.tasks_per_step={TASKS}",
    "rollout.samples_per_task=2",
    "student.supervised.steps=3",
    "datasets.sums.params={count: 300, largest: 60}",
    "eval={every: 0, items: 8}",
]


def test_it_runs_from_anywhere_and_goes_on_elsewhere(rollout, tmp_path):
    mine = tmp_path / "my own folder"
    shutil.copytree(SOURCE, mine, ignore=shutil.ignore_patterns("__pycache__"))
    run = rollout.start("run", "run.yaml", *SMALL, "--run-id", "r", cwd=mine)
    paths = rollout.run("r")
    wait_for(lambda: step(paths) >= 2, 90, "the second step", run)
    rollout.kill_all()
    assert step(paths) < STEPS, "it was killed in the middle"
    shutil.rmtree(mine)
    moved = rollout.run("moved/r")
    moved.root.parent.mkdir()
    paths.root.rename(moved.root)

    done = rollout.call("resume", moved.root, timeout_s=120)
    assert done.code == 0, done
    found = status(moved)
    assert found["state"] == "finished" and found["attempts"]["regenerated"] == 0
    assert trained_as_planned(moved, STEPS, TASKS)
    assert (moved.code / "my_task.py").is_file()
