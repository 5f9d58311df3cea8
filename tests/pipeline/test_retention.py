"""What `rollout gc` removes, and what it must not."""

from __future__ import annotations

import json
import shutil

import pytest

from pipeline.buffer.lock import RunLock
from pipeline.cli.main import run as command
from pipeline.cli.runs import write_config
from pipeline.engines.weights import WeightStore
from pipeline.paths import RunPaths
from pipeline.retention import remove, surplus
from pipeline.trainer import checkpoints
from tests.pipeline.buffer.helpers import fill_step, make_settings, new_run, opened, roll_out
from tests.pipeline.trainer.helpers import make_config

STEPS = 5
TASKS = 2


@pytest.fixture
def config():
    return make_config(rollout={"tasks_per_step": TASKS}, buffer={"allow_network_fs": True}, trainer={"save_every": 1})


@pytest.fixture
async def paths(tmp_path, config) -> RunPaths:
    """A run of five trained steps, with everything in it that a run can leave."""
    paths = new_run(tmp_path / "runs", "one", steps=STEPS, workflow_id="one.r3")
    write_config(paths, config)

    def write_model(folder):
        (folder / "model.safetensors").write_bytes(b"weights")

    async with opened(paths, make_settings(tasks_per_step=TASKS, segment_bytes=1)) as buffer:
        for step in range(1, STEPS + 1):
            slots = await buffer.assign(step, TASKS, None)
            for slot in slots:
                await roll_out(buffer, slot.ordinal, step, tokens=8000 if slot.slot else 5)
            await buffer.close_rollout(step)
            await buffer.select(step)
            await buffer.record_step(step, {"step": step})
            checkpoints.save(paths, step, {}, write_model=write_model, state={}, epoch=1, fence=lambda: None)
            await buffer.mark_trained(step, f"checkpoints/step_{step:06d}")
        await fill_step(buffer, STEPS + 1, TASKS)
    for version in range(STEPS):
        WeightStore(paths.weights).publish(version, write_model)
    for left in ("checkpoints/.tmp-dead", "weights/.new-dead", "workflow/workflows/one.r2", "workflow/workflows/one.r3/tasks"):
        (paths.root / left).mkdir(parents=True)
        (paths.root / left / "file").write_bytes(b"x" * 1000)
    (paths.workflow / "workflows/one.r3/tasks/.aside-dead").write_bytes(b"x")
    return paths


def names(folder):
    return sorted(path.name for path in folder.iterdir())


async def stored(paths):
    async with opened(paths, make_settings(tasks_per_step=TASKS)) as buffer:
        return [group.ordinal for group in await buffer.read(list(range(TASKS * (STEPS + 1))), True)]


async def test_checkpoints_weights_workflows_and_leftovers_go_and_rows_stay(paths, config):
    found = surplus(paths, config)
    assert sorted(item.what for item in found) == [
        "checkpoint step_000001", "checkpoint step_000002", "checkpoint step_000003",
        "finished workflow one.r2", "left over .aside-dead", "left over .new-dead", "left over .tmp-dead",
        "weights of an old version v000002", "weights of an old version v000003",
    ]  # fmt: skip
    assert all(item.size > 0 for item in found)
    await remove(paths, config, found)
    assert surplus(paths, config) == []
    assert names(paths.checkpoints) == ["step_000004", "step_000005"]
    assert WeightStore(paths.weights).latest().path.is_dir() and names(paths.weights) == ["LATEST", "v000004"]
    assert names(paths.workflow / "workflows") == ["one.r3"]
    assert len(names(paths.groups)) == STEPS


async def test_rows_go_down_to_what_a_resume_needs(paths, config):
    (found,) = [item for item in surplus(paths, config, rows=True) if item.what.startswith("rows")]
    assert found.what == "rows of 8 trained groups" and found.size > 4 * 6000
    before = sum(path.stat().st_size for path in paths.groups.iterdir())
    await remove(paths, config, [found], rows=True)
    assert await stored(paths) == [8, 9, 10, 11], "steps after the last but one checkpoint, and those still to be trained"
    assert before - sum(path.stat().st_size for path in paths.groups.iterdir()) <= found.size


async def test_without_the_checkpoint_that_covers_them_no_row_goes(paths, config):
    (paths.checkpoint(4) / "model.safetensors").unlink()
    found = surplus(paths, config, rows=True)
    assert not [item for item in found if item.what.startswith("rows")]
    assert sorted(item.what for item in found if item.what.startswith("checkpoint")) == [
        "checkpoint step_000001", "checkpoint step_000002", "checkpoint step_000004",
    ]  # fmt: skip


def test_the_command_says_what_it_would_do_and_leaves_running_runs_alone(paths, capsys):
    runs = ["--runs-dir", str(paths.root.parent)]
    builds = paths.root.parent / ".cache" / "teachers"
    (builds / ".abc-dead").mkdir(parents=True)
    (builds / ".abc.lock").touch()
    before = sorted(path for path in paths.root.rglob("*") if not path.name.startswith("run.db"))
    assert command(["gc", "--dry-run", *runs]) == 0
    said = capsys.readouterr().out
    assert "one: checkpoint step_000001" in said and "left over in the cache: .abc-dead" in said and "would free" in said
    assert sorted(path for path in paths.root.rglob("*") if not path.name.startswith("run.db")) == before
    with RunLock(paths):
        assert command(["gc", *runs]) == 0
        assert "one: passed over: run one is running" in capsys.readouterr().out
        assert command(["gc", "one", *runs]) == 4
    assert not (builds / ".abc-dead").exists() and (paths.checkpoints / "step_000001").is_dir()
    (builds / ".abc-dead").mkdir()
    assert command(["gc", "one", *runs]) == 0
    assert names(paths.checkpoints) == ["step_000004", "step_000005"]
    assert "freed" in capsys.readouterr().out


def test_a_broken_run_does_not_keep_the_others(paths, capsys):
    broken = paths.root.parent / "broken"
    shutil.copytree(paths.root, broken)
    (broken / "run.db").write_bytes(json.dumps({}).encode())
    assert command(["gc", "--runs-dir", str(paths.root.parent)]) == 0
    said = capsys.readouterr().out
    assert "broken: passed over" in said and "one: checkpoint step_000001" in said
