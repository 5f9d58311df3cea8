import asyncio
import io
import json

import pytest

from pipeline.config.schema import RunConfig
from pipeline.errors import StageFailed
from pipeline.observe.metrics import read_metrics
from pipeline.observe.observer import Observer
from pipeline.observe.tensorboard import read_scalars
from pipeline.observe.timeline import read_timeline, timeline_path
from pipeline.paths import RunPaths
from tests.pipeline.observe.fakes import config, results, status, write_evaluation

pytestmark = pytest.mark.looptime


class Ledger:
    """A buffer whose run trains one step a second."""

    def __init__(self):
        self.error: Exception | None = None
        self.hangs = False
        self.state = "running"
        self.calls = {"status": 0, "steps": 0}
        self.after: list[int] = []

    def step(self):
        return int(asyncio.get_running_loop().time() - self.began) if hasattr(self, "began") else self._begin()

    def _begin(self):
        self.began = asyncio.get_running_loop().time()
        return 0

    async def _answer(self, call, value):
        self.calls[call] += 1
        if self.error is not None:
            raise self.error
        if self.hangs:
            await asyncio.sleep(1e9)
        return value

    async def status(self):
        return await self._answer("status", status(self.step(), state=self.state))

    async def steps(self, after=0):
        self.after.append(after)
        new = {step: metrics for step, metrics in results(self.step()).items() if step > after}
        return await self._answer("steps", {"results": new})


@pytest.fixture
def paths(tmp_path):
    return RunPaths(tmp_path / "run")


def make(paths, ledger, stream=None, **observe):
    settings = RunConfig.model_validate({**config(), "observe": observe})
    return Observer(paths, ledger, settings, lambda: 1000.0 + asyncio.get_running_loop().time(), stream=stream or io.StringIO())


async def run_for(observer, seconds):
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(observer.run(), seconds)


async def test_a_run_is_followed_to_its_end(paths):
    stream = io.StringIO()
    observer = make(paths, ledger := Ledger(), stream)
    write_evaluation(paths, "eval_000000", 0.1)
    await run_for(observer, 30.5)
    ledger.state = "finished"
    summary = await observer.final()
    assert [line["step"] for line in read_metrics(paths.metrics)] == list(range(1, ledger.step() + 1))
    assert len(read_timeline(timeline_path(paths))) == 1 + 31 + 1
    tags = {(tag, step) for tag, step, _ in read_scalars(paths.tensorboard)}
    assert ("train/loss", 30) in tags and ("eval/accuracy", 0) in tags
    assert summary["state"] == "finished" and summary["accuracy_before"] == 0.1 and summary["observer_errors"] == {}
    assert json.loads(paths.summary.read_text()) == summary
    assert "finished" in paths.report.read_text()
    assert len(stream.getvalue().splitlines()) == 5


async def test_a_second_process_goes_on_where_the_first_stopped(paths):
    ledger = Ledger()
    await run_for(make(paths, ledger), 5.5)
    await run_for(again := make(paths, ledger), 5.5)
    await again.final()
    assert [line["step"] for line in read_metrics(paths.metrics)] == list(range(1, ledger.step() + 1))
    losses = [step for tag, step, _ in read_scalars(paths.tensorboard) if tag == "train/loss"]
    assert sorted(losses) == list(range(1, ledger.step() + 1))


async def test_results_are_asked_for_only_when_a_step_was_trained(paths):
    observer = make(paths, ledger := Ledger())
    ledger.step = lambda: 3
    await run_for(observer, 10.5)
    assert ledger.calls == {"status": 11, "steps": 1}


async def test_only_new_results_are_asked_for(paths):
    observer = make(paths, ledger := Ledger())
    await run_for(observer, 30.5)
    assert ledger.after == list(range(30)), "what a step costs does not grow with the steps before it"


async def test_a_buffer_that_restarts_is_waited_for_and_counted(paths):
    observer = make(paths, ledger := Ledger(), stall_s=60)
    ledger.error = ConnectionError("actor is restarting")
    await run_for(observer, 20.5)
    ledger.error = None
    await run_for(observer, 5.5)
    assert observer.errors["ledger"] == 21
    assert "actor is restarting" in (paths.log / "observer.log").read_text()
    assert read_metrics(paths.metrics)


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_buffer_that_stays_away_fails_the_run_in_bounded_time(paths, hangs):
    observer = make(paths, ledger := Ledger(), stall_s=60)
    ledger.hangs, ledger.error = hangs, None if hangs else ConnectionError("gone")
    began = asyncio.get_running_loop().time()
    with pytest.raises(StageFailed, match="observe.stall_s 60") as caught:
        await observer.run()
    assert caught.value.__cause__ is not None
    assert 60 < asyncio.get_running_loop().time() - began < 80


async def test_metrics_that_cannot_be_written_fail_the_run(paths, monkeypatch):
    observer = make(paths, Ledger())
    await run_for(observer, 2.5)
    paths.metrics.unlink()
    paths.metrics.mkdir()
    with pytest.raises(StageFailed, match="metrics.jsonl cannot be written"):
        await asyncio.wait_for(observer.run(), 10)


async def test_a_drawing_that_fails_is_counted_and_logged_and_the_run_goes_on(paths):
    class Broken(io.StringIO):
        def write(self, text):
            raise OSError("the terminal went away")

    observer = make(paths, ledger := Ledger(), Broken())
    await run_for(observer, 30.5)
    summary = await observer.final()
    assert summary["observer_errors"]["bars"] >= 3
    assert "the terminal went away" in (paths.log / "observer.log").read_text()
    assert len(read_metrics(paths.metrics)) == ledger.step()


async def test_the_end_is_written_though_the_buffer_is_gone(paths):
    observer = make(paths, ledger := Ledger())
    await run_for(observer, 5.5)
    ledger.error = ConnectionError("the cluster is down")
    summary = await observer.final("failed", "stage trainer: ValueError: x")
    assert summary["state"] == "failed" and summary["error"] == "stage trainer: ValueError: x" and summary["steps"] == 5
    assert "stage trainer: ValueError: x" in paths.report.read_text()


async def test_bars_and_trackers_can_be_switched_off(paths):
    stream = io.StringIO()
    observer = make(paths, Ledger(), stream, bars=False, trackers=[])
    await run_for(observer, 5.5)
    await observer.final()
    assert stream.getvalue() == "" and not paths.tensorboard.exists()
