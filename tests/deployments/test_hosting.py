"""What the stage actors share, without their processes."""

from __future__ import annotations

import asyncio
import json
import logging
from datetime import datetime
from pathlib import Path

import pytest

from deployments import hosting
from deployments.hosting import StageActor, forwards
from pipeline.buffer.api import StageReport
from pipeline.cli.runs import create_run_folder
from pipeline.config.loading import load
from pipeline.errors import EngineError, FencedOut, StageFailed

TINY = Path(__file__).parents[1] / "e2e" / "tiny.yaml"


class Service:
    def double(self, value: int) -> int:
        return 2 * value

    async def fail(self) -> None:
        raise EngineError("no memory")

    def report(self) -> StageReport:
        return StageReport("?", "?", 0, "?", started=3, finished=2, backlog=1, oldest_s=0.5)


@forwards("double", "fail")
class Stage(StageActor):
    stage = "stage"
    loop_error: Exception | None = None

    async def build(self) -> Service:
        return Service()

    def background(self):
        if self.loop_error is None:
            return None

        async def loop(service: Service) -> None:
            raise self.loop_error

        return loop


class Unbuilt(Stage):
    async def build(self) -> Service:
        raise EngineError("no weights")


class Buffer:
    """Meets each report with the next of `faults`; when they are used up, it is kept."""

    def __init__(self, *faults: Exception) -> None:
        self.faults, self.reports = list(faults), []

    async def report_stage(self, report: StageReport) -> None:
        if self.faults:
            raise self.faults.pop(0)
        self.reports.append(report)


@pytest.fixture
def root(tmp_path, monkeypatch):
    handlers, level = logging.getLogger().handlers, logging.getLogger().level
    yield create_run_folder(tmp_path, load(TINY), "r", datetime(2030, 1, 1)).root
    for handler in logging.getLogger().handlers:
        handler.close()
    logging.getLogger().handlers, logging.getLogger().level = handlers, level


@pytest.fixture
async def make(root):
    made = []

    def build(kind: type[Stage], buffer: Buffer | None = None) -> Stage:
        actor = kind(str(root))
        actor.buffer = buffer or Buffer()
        made.append(actor)
        return actor

    yield build
    for actor in made:
        for task in (actor._beats, actor._started):
            task.cancel()
        await asyncio.gather(actor._beats, actor._started, return_exceptions=True)


async def test_methods_of_the_service_are_the_actors_own(make):
    actor = make(Stage)
    assert await actor.double(4) == 8
    with pytest.raises(EngineError, match="no memory"):
        await actor.fail()
    assert await actor.ready() == await actor.ping()


async def test_a_service_that_cannot_be_built_fails_every_call_with_the_cause(make):
    actor = make(Unbuilt)
    for _ in range(2):
        with pytest.raises(StageFailed, match="stage stage: could not start: EngineError: no weights") as caught:
            await actor.double(1)
        assert isinstance(caught.value.__cause__, EngineError)
    assert await actor.ping(), "its process is alive all the same"


async def test_a_background_loop_that_ends_fails_every_call_from_then_on(make, monkeypatch, root):
    monkeypatch.setattr(Stage, "loop_error", KeyError("x"))
    actor = make(Stage)
    await actor.ready()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    with pytest.raises(StageFailed, match="background loop ended: KeyError"):
        await actor.double(1)
    assert "KeyError: 'x'" in (root / "log" / "stage.log").read_text()


async def test_nodes_are_noted_when_they_begin_and_when_they_have_ended(make, root):
    actor = make(Stage)
    assert await actor.node("double[1]", "double", 3) == 6
    with pytest.raises(EngineError):
        await actor.node("fail[1]", "fail")
    noted = [json.loads(line) for line in (root / "log" / "nodes.jsonl").read_text().splitlines()]
    assert [(line["node"], line["event"]) for line in noted] == [
        ("double[1]", "started"),
        ("double[1]", "done"),
        ("fail[1]", "started"),
    ]


@pytest.mark.looptime
async def test_reports_carry_the_actors_name_and_survive_an_unreachable_buffer(make):
    buffer = Buffer(ConnectionError("gone"), TimeoutError("late"), StageFailed("replay_buffer", "starting"))
    actor = make(Stage, buffer)
    await actor.ready()
    await asyncio.sleep(6.5)
    assert len(buffer.reports) == 4
    report = buffer.reports[-1]
    assert (report.stage, report.actor, report.finished) == ("stage", "r:stage", 2)
    assert report.pid == await actor.ping()


@pytest.mark.looptime
async def test_a_stage_that_was_replaced_reports_as_soon_as_it_stands(make):
    class Slow(Stage):
        async def build(self) -> Service:
            await asyncio.sleep(3.4)
            return Service()

    buffer = Buffer()
    actor = make(Slow, buffer)
    await asyncio.sleep(3.3)
    assert buffer.reports == [], "nothing stands yet"
    await actor.ready()
    await asyncio.sleep(0.1)
    assert len(buffer.reports) == 1


@pytest.mark.looptime
async def test_a_stage_that_is_fenced_out_ends_its_process(make, monkeypatch):
    ended = []
    monkeypatch.setattr(hosting.os, "_exit", ended.append)
    actor = make(Stage, Buffer(FencedOut("a newer writer")))
    await actor.ready()
    await asyncio.sleep(1.5)
    assert ended == [1]
