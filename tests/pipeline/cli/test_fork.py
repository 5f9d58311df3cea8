"""A fork up to the point where Ray would start."""

from __future__ import annotations

import shutil

import pytest

from pipeline.buffer.reader import read_facts
from pipeline.config.loading import read_config
from pipeline.paths import RunPaths
from pipeline.trainer import checkpoints
from tests.pipeline.cli.test_run import drivers  # noqa: F401
from tests.pipeline.trainer.helpers import saved_student


@pytest.fixture
def source(rollout, drivers, config_file, tmp_path) -> RunPaths:  # noqa: F811
    """A run with checkpoints of steps 2 and 4."""
    assert rollout("run", config_file, "--runs-dir", tmp_path / "runs", "--run-id", "old", "rollout.tasks_per_step=2")[0] == 0
    paths = RunPaths(tmp_path / "runs" / "old")
    student = saved_student(tmp_path / "student")

    def write_model(folder):
        shutil.copytree(student, folder, dirs_exist_ok=True)

    for step in (2, 4):
        checkpoints.save(paths, step, {}, write_model=write_model, state={}, epoch=1, fence=lambda: None)
    return paths


def test_a_fork_holds_its_own_copy_of_the_checkpoint_and_the_old_runs_settings(rollout, source, drivers, tmp_path):  # noqa: F811
    code, out, err = rollout("fork", "old", "trainer.steps=5", "--runs-dir", tmp_path / "runs", "--run-id", "new")
    assert (code, err) == (0, "") and out.startswith("run new ") and drivers[-1] == ("new", 5)
    new = RunPaths(tmp_path / "runs" / "new")
    assert read_facts(new)["forked_from"] == "old/step_000004"
    shutil.rmtree(source.root)
    moved = RunPaths(tmp_path / "elsewhere")
    new.root.rename(moved.root)
    config = read_config(moved.config).config
    assert (config.run.id, config.rollout.tasks_per_step, config.trainer.steps) == ("new", 2, 5)
    assert config.student.architecture is None and config.student.path == moved.data / "student"
    held = {path.name for path in config.student.path.iterdir()}
    assert "model.safetensors" in held and not held & {checkpoints.STATE, checkpoints.MANIFEST}
    assert config.datasets["d"].path.is_file()


def test_the_step_can_be_chosen_and_a_torn_checkpoint_is_not(rollout, source, tmp_path):
    runs = tmp_path / "runs"
    assert rollout("fork", "old", "--step", 2, "--runs-dir", runs, "--run-id", "second")[0] == 0
    assert read_facts(RunPaths(runs / "second"))["forked_from"] == "old/step_000002"
    (source.checkpoint(4) / "model.safetensors").write_bytes(b"")
    assert rollout("fork", "old", "--runs-dir", runs, "--run-id", "newest")[0] == 0
    assert read_facts(RunPaths(runs / "newest"))["forked_from"] == "old/step_000002"
    code, _, err = rollout("fork", "old", "--step", 4, "--runs-dir", runs)
    assert code == 2 and "no complete checkpoint of step 4; there are those of steps [2]" in err
    shutil.rmtree(source.checkpoints)
    code, _, err = rollout("fork", "old", "--runs-dir", runs)
    assert code == 2 and "has no complete checkpoint" in err


def test_another_student_is_refused(rollout, source, tmp_path):
    code, _, err = rollout("fork", "old", "student.architecture.layers=3", "--runs-dir", tmp_path / "runs")
    assert code == 2 and "student.architecture cannot be overridden" in err
