"""What a dead pool left playing ends before its successor counts the node as free. Without a cluster."""

from __future__ import annotations

import asyncio
import pickle

from deployments.evaluator_worker import EvaluatorWorkerActor
from deployments.multiplex import pack
from pipeline.buffer.api import Attempt
from pipeline.evaluator.spec import PlacementToken
from pipeline.paths import RunPaths
from pipeline.records import StepContext
from tests.pipeline.evaluator.parts import make_task


class Endless:
    """A player whose samples never end by themselves, and take a moment to leave."""

    def __init__(self) -> None:
        self.playing = 0

    async def run_samples(self, *_: object) -> list:
        self.playing += 1
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.01)
            self.playing -= 1


async def test_a_worker_is_empty_once_it_is_cleared(tmp_path):
    worker, player = object.__new__(EvaluatorWorkerActor), Endless()
    worker.paths, worker._playing = RunPaths(tmp_path), set()
    worker.paths.log.mkdir()
    worker._started = asyncio.get_running_loop().create_future()
    worker._started.set_result({"student": player})
    call = (make_task(0), [0], Attempt(0, 1, 0, 0), StepContext(1), [PlacementToken("n", None, 0.0, 1.0, 0.0)])
    answers = worker.play_all(pack([call, call]))
    asked = asyncio.ensure_future(anext(answers))
    while player.playing < 2:
        await asyncio.sleep(0)
    await worker.clear()
    assert player.playing == 0
    told = pickle.loads(await asked)
    assert all("cancelled" in str(answer.error) for answer in told)
    await worker.clear()
