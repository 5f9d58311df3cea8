"""What writes to the run folder belongs to one run epoch. Without a cluster: the services are built as the actors build them."""

from __future__ import annotations

import asyncio

import pytest

from deployments.replay_buffer import ReplayBuffer
from deployments.trainer import TrainerActor
from pipeline.buffer.reader import read_run_epoch
from pipeline.buffer.schema import create_run
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.cli.runs import write_config
from pipeline.errors import FencedOut
from pipeline.paths import RunPaths
from tests.pipeline.trainer.helpers import make_config, saved_student


def bare(actor: type, paths: RunPaths, config, buffer, epoch: int):
    """An actor without its process: no heartbeat, no log file."""
    made = object.__new__(actor)
    made.paths, made.config, made.buffer, made.run_epoch = paths, config, buffer, epoch
    return made


@pytest.fixture
def run(tmp_path):
    paths, config = RunPaths(tmp_path / "run"), make_config()
    create_run(paths, {})
    write_config(paths, config)
    return paths, config


async def begin(paths: RunPaths, config) -> int:
    """What a driver does first."""
    service = BufferService(paths, BufferSettings.from_config(config))
    await service.open(new_run_epoch=True)
    await service.close()
    return read_run_epoch(paths)


@pytest.mark.fault(39)
async def test_an_old_clusters_buffer_actor_cannot_start_again(run):
    paths, config = run
    old = await begin(paths, config)
    await (await bare(ReplayBuffer, paths, config, None, old).build()).close()
    await begin(paths, config)
    with pytest.raises(FencedOut, match="run epoch"):
        await bare(ReplayBuffer, paths, config, None, old).build()


async def begun(paths, config, tmp_path, monkeypatch) -> tuple[int, BufferService, list[int]]:
    """A run epoch with its buffer, a student for trainer actors, and the exit codes of those that end their process."""
    epoch = await begin(paths, config)
    buffer = BufferService(paths, BufferSettings.from_config(config))
    await buffer.open()
    student, ended = saved_student(tmp_path / "student"), []
    monkeypatch.setattr(TrainerActor, "_student", lambda self: student)
    monkeypatch.setattr("deployments.trainer.os._exit", ended.append)
    return epoch, buffer, ended


@pytest.mark.fault(39)
async def test_the_trainer_actor_stops_before_its_checkpoint_once_a_resume_has_begun(run, tmp_path, monkeypatch):
    paths, config = run
    epoch, buffer, ended = await begun(paths, config, tmp_path, monkeypatch)
    trainer = await bare(TrainerActor, paths, config, buffer, epoch).build()
    await buffer.assign(1, 0, 0)
    assert (await trainer.train(1))["end_of_data"]
    await begin(paths, config)
    again = BufferService(paths, BufferSettings.from_config(config))  # a zombie may still reach the ledger
    await again.open()
    trainer._buffer = again
    with pytest.raises(FencedOut):
        await trainer.save()
    assert ended == [1] and not list(paths.checkpoints.glob("step_*"))
    await asyncio.gather(trainer.close(), buffer.close(), again.close())


async def test_a_trainer_actor_that_is_taken_for_dead_stops_before_its_checkpoint(run, tmp_path, monkeypatch):
    """An old version that it published would stand in front of the new one."""
    paths, config = run
    epoch, buffer, ended = await begun(paths, config, tmp_path, monkeypatch)
    old, new = [await bare(TrainerActor, paths, config, buffer, epoch).build() for _ in range(2)]
    await buffer.assign(1, 0, 0)
    with pytest.raises(FencedOut, match="trainer 2 of run run has begun, this is 1"):
        await old.train(1)
    assert ended == [1] and (await new.train(1))["end_of_data"]
    await asyncio.gather(old.close(), new.close(), buffer.close())
