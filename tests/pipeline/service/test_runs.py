"""Runs over HTTP, from their folders: what is started, what a status says when the process is gone, events, and cancellation."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.buffer.reader import read_status
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.config.loading import read_config
from pipeline.errors import RequestRefused
from pipeline.observe.evaluations import conversations
from pipeline.paths import RunPaths, SharedPaths
from pipeline.service.runs import STARTING_S, RunRequest, Runs
from tests.pipeline.observe.fakes import write_evaluation

HOLD = (
    "import sys, time; from pathlib import Path; from pipeline.buffer.lock import RunLock; from pipeline.paths import RunPaths\n"
    "with RunLock(RunPaths(Path(sys.argv[1]))):\n    print('held', flush=True); time.sleep(60)"
)


class World:
    def __init__(self, folder: Path) -> None:
        rows = [{"prompt": f"say {n}", "answer": str(n)} for n in range(40)]
        (folder / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
        self.config = {
            "student": {"architecture": {}},
            "algorithm": {"name": "grpo"},
            "datasets": {"d": {"source": "jsonl", "path": "d.jsonl"}},
            "trainer": {"steps": 3},
        }
        (folder / "c.yaml").write_text(yaml.safe_dump(self.config))
        self.shared = SharedPaths(folder / "runs")
        self.launched: list[list[str]] = []
        self.now = 0.0
        self.runs = Runs(self.shared, folder, lambda arguments, output: self.launched.append(arguments), clock=self.clock)

    def clock(self) -> float:
        import time

        return time.time() + self.now

    def paths(self, run_id: str) -> RunPaths:
        return RunPaths(self.shared.runs / run_id)

    async def record(self, run_id: str, state: str) -> None:
        paths = self.paths(run_id)
        service = BufferService(paths, BufferSettings.from_config(read_config(paths.config).config))
        await service.open(new_run_epoch=False)
        await service.set_run(state, None)
        await service.close()

    def hold(self, run_id: str) -> subprocess.Popen:
        """A process that owns the run."""
        owner = subprocess.Popen([sys.executable, "-c", HOLD, str(self.paths(run_id).root)], stdout=subprocess.PIPE, text=True)
        assert owner.stdout.readline() == "held\n"
        return owner


@pytest.fixture
def world(tmp_path) -> World:
    return World(tmp_path)


def request(**changes) -> RunRequest:
    return RunRequest.model_validate({"config": "c.yaml", "run_id": "r1", **changes})


def test_a_run_has_its_folder_before_its_process(world):
    view = world.runs.submit(request(overrides=["trainer.steps=2"]), "k")
    assert (view["id"], view["status"], view["steps"], view["ordinals"]["fetched"]) == ("r1", "starting", 2, 0)
    assert world.launched == [["resume", "r1", "--runs-dir", str(world.shared.runs)]]
    assert (world.paths("r1").root / "data" / "d.jsonl").is_file()
    assert world.runs.submit(request(overrides=["trainer.steps=2"]), "k")["id"] == "r1" and len(world.launched) == 1
    with pytest.raises(RequestRefused) as caught:
        world.runs.submit(request(), "k")
    assert caught.value.status == 409
    world.now = STARTING_S + 1
    assert [view["status"] for view in world.runs.views()] == ["stopped"], "its process never came"
    assert world.runs.resume("r1")["id"] == "r1" and len(world.launched) == 2


def test_what_cannot_run_leaves_nothing(world):
    for changes, status, param in [
        ({"config": "../c.yaml"}, 404, "config"),
        ({"config": "none.yaml"}, 404, "config"),
        ({"config": {"student": {}}}, 400, "config"),
        ({"overrides": ["trainer.stps=1"]}, 400, "overrides"),
        ({"config": {"student": {}}, "overrides": ["trainer.stps=1"]}, 400, "config"),
    ]:
        with pytest.raises(RequestRefused) as caught:
            world.runs.submit(request(**changes), "k")
        assert (caught.value.status, caught.value.param) == (status, param) and "/tmp" not in caught.value.message.partition(":")[0]
    assert world.launched == [] and world.runs.views() == []


@pytest.mark.fault(35)
def test_a_run_id_is_given_once(world):
    world.runs.submit(request(), "k")
    named = world.config | {"run": {"id": "r1"}, "datasets": {"words": {"generator": "spell_backward", "size": 50}}}
    for asked in (request(), request(run_id=None, config=named)):
        with pytest.raises(RequestRefused, match="POST /v1/runs/r1/resume") as caught:
            world.runs.submit(asked, "another")
        assert (caught.value.status, caught.value.param) == (409, "run_id")
    assert len(world.launched) == 1


def test_a_configuration_may_come_with_the_request(world):
    config = world.config | {"datasets": {"words": {"generator": "spell_backward", "size": 50}}}
    assert world.runs.submit(request(config=config), "k")["status"] == "starting"
    assert list(read_config(world.paths("r1").config).config.datasets) == ["words"]


async def test_a_run_that_lives_is_ended_and_marked_cancelled(world):
    world.runs.submit(request(), "k")
    owner = world.hold("r1")
    try:
        await world.record("r1", "running")
        assert world.runs.view("r1")["status"] == "running"
        with pytest.raises(RequestRefused) as caught:
            world.runs.resume("r1")
        assert caught.value.status == 409
        view = await world.runs.cancel("r1")
        assert owner.wait(10) == -signal.SIGTERM
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
    assert view["status"] == "cancelled" and read_status(world.paths("r1"))["state"] == "cancelled"
    with pytest.raises(RequestRefused) as caught:
        await world.runs.cancel("r1")
    assert caught.value.status == 409


async def test_a_run_whose_process_was_killed_is_stopped_and_goes_on(world):
    world.runs.submit(request(), "k")
    owner = world.hold("r1")
    await world.record("r1", "running")
    os.kill(owner.pid, signal.SIGKILL)
    owner.wait()
    owner.stdout.close()
    assert world.runs.view("r1")["status"] == "stopped"
    assert world.runs.resume("r1")["status"] == "starting"


async def test_a_service_that_goes_on_takes_up_what_was_interrupted(world):
    world.runs.go_on(None)
    everything = ["resume", "--all", "--runs-dir", str(world.shared.runs)]
    assert world.launched == [everything] and world.shared.service.root.is_dir()
    world.runs.submit(request(), "k")
    world.launched.clear()
    world.runs.go_on("r1")
    assert world.launched == [], "it is being started"
    for seconds, state, resumed in [(1, "running", True), (2, "failed", True), (3, "cancelled", False), (4, "finished", False)]:
        world.now = seconds * (STARTING_S + 1)
        await world.record("r1", state)
        world.launched.clear()
        world.runs.go_on("r1")
        assert bool(world.launched) == resumed, state
    with pytest.raises(RequestRefused):
        world.runs.go_on("r2")


async def test_events_are_the_steps_and_how_it_ended(world):
    world.runs.submit(request(), "k")
    paths = world.paths("r1")
    with paths.metrics.open("w") as file:
        file.writelines(json.dumps({"step": step, "loss": 1.0 / step}) + "\n" for step in (1, 2))
    found = await world.runs.events("r1", 0, 0.0)
    assert [(event["id"], event["event"]) for event in found] == [(1, "progress"), (2, "progress")]
    assert await world.runs.events("r1", 2, 0.0) == []
    waiting = asyncio.create_task(world.runs.events("r1", 2, 20.0))
    with paths.metrics.open("a") as file:
        file.write(json.dumps({"step": 3, "loss": 0.1}) + "\n")
    assert [event["id"] for event in await waiting] == [3]
    world.now = STARTING_S + 1
    await world.record("r1", "finished")
    (end,) = await world.runs.events("r1", 3, 0.0)
    assert (end["id"], end["event"], end["data"]["status"]) == (4, "done", "finished")
    assert await world.runs.events("r1", 4, 0.0) == []


def test_a_view_has_the_evaluations_and_they_their_samples(world):
    world.runs.submit(request(), "k")
    paths = world.paths("r1")
    write_evaluation(paths, "eval_000002", 0.5, items=10, unscored=2)
    write_evaluation(paths, "teacher_big", 1.0, items=4)
    view = world.runs.view("r1")
    (found,), (teacher,) = view["evaluations"], view["teachers"]
    assert (found["id"], found["step"], found["accuracy"], found["by_dataset"]) == ("eval_000002", 2, 0.5, {"spell_backward": 0.5})
    assert (found["scored"], found["total"], found["valid"]) == (8, 10, False) and found["failure_classes"]["infra"] == 2
    assert (teacher["id"], teacher["alias"], teacher["accuracy"]) == ("teacher_big", "big", 1.0)
    samples = world.runs.samples("r1", "eval_000002")
    assert len(samples) == 10 and samples[0]["error"] == "ConnectionError: refused" and samples[0]["turns"] == []
    for name in ("eval_000003", "../r1/eval_details/eval_000002", "teacher_big.summary.json"):
        with pytest.raises(RequestRefused) as caught:
            world.runs.samples("r1", name)
        assert caught.value.status == 404


def test_turns_come_with_their_sample(tmp_path):
    (tmp_path / "eval_000001.jsonl").write_text('{"sample_id": "0.0", "turns": 2}\n{"sample_id": "0.1", "turns": 0}\n')
    lines = [{"sample_id": "0.0", "turn": turn, "action": f"say {turn}"} for turn in (0, 1)]
    (tmp_path / "eval_000001.turns.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert [line["turns"] for line in conversations(tmp_path, "eval_000001")] == [lines, []]


def test_names_of_other_folders_are_no_runs(world):
    world.runs.submit(request(), "k")
    for name in (".service", "..", "r1/../r1", "/etc", "", "r2"):
        with pytest.raises(RequestRefused) as caught:
            world.runs.view(name)
        assert caught.value.status == 404
