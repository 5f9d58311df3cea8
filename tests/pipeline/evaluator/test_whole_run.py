"""Fetcher, pool and ledger together, from the first ordinal to the last: what is trained, also when everything dies in between."""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path

import pytest

from pipeline.buffer.schema import create_run
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.evaluator.pool import EvaluatorPool
from pipeline.evaluator.spec import NodeSpec, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.paths import RunPaths
from pipeline.records import Batch
from tests.pipeline.evaluator.parts import MEMORY, Letters, Tasks, inline, make_config, make_task, nobody

pytestmark = pytest.mark.looptime
STEPS, TASKS = 5, 4


class Life:
    """One life of a run's processes, from its folder. The steps' edges are those of the workflow; training takes a second."""

    def __init__(self, paths: RunPaths, prompts: int, slow: dict[int, float]) -> None:
        self.config = make_config(rollout={"tasks_per_step": TASKS, "max_staleness": 1})
        self.paths, self.prompts, self.slow = paths, prompts, slow

    async def play(self) -> None:
        self.buffer = BufferService(self.paths, BufferSettings.from_config(self.config), threaded=False)
        await self.buffer.open(new_run_epoch=True)
        worker = EvaluatorWorker(self.config, Letters(), None, specs_from_config(self.config), "here", offload=inline)
        self.pool = EvaluatorPool(
            self.config, self.buffer, Tasks(self.buffer, self.task), [worker], nobody, nodes=(NodeSpec("here", (), 8, 8),),
            details_folder=self.paths.details, offload=inline,
        )  # fmt: skip
        done = (await self.buffer.steps())["trained_step"]
        self.trained = [asyncio.Event() for _ in range(STEPS + 1)]
        self.assigned = [asyncio.Event() for _ in range(STEPS + 1)]
        for step in range(done + 1):
            self.trained[step].set()
            self.assigned[step].set()
        try:
            async with asyncio.TaskGroup() as group:
                for step in range(done + 1, STEPS + 1):
                    group.create_task(self.rollout(step))
                    group.create_task(self.train(step))
        finally:
            await self.pool.close()
            await self.buffer.close()

    def task(self, ordinal: int):
        return make_task(ordinal, {"run_s": self.slow.get(ordinal, 1.0)})

    async def rollout(self, step: int) -> None:
        await self.trained[max(0, step - 2)].wait()
        await self.assigned[step - 1].wait()
        slots = await self.buffer.assign(step, TASKS, self.prompts)
        self.assigned[step].set()
        batches = [Batch(f"{step}.{slot.slot}", "single_turn", "single_turn", (slot.ordinal,)) for slot in slots]
        await self.pool.rollout(step, batches)

    async def train(self, step: int) -> None:
        await self.trained[step - 1].wait()
        while await self.buffer.wait_selection(step, 60) is None:
            continue
        await asyncio.sleep(1.0)
        await self.buffer.record_step(step, {})
        self.trained[step].set()


async def finished(paths: RunPaths) -> tuple[list[list[int]], dict]:
    """What each step was trained on, and the run's status."""
    buffer = BufferService(paths, BufferSettings.from_config(make_config(rollout={"tasks_per_step": TASKS})), threaded=False)
    await buffer.open(new_run_epoch=False)
    selections = (await buffer.steps())["selections"]
    status = await buffer.status()
    await buffer.close()
    return [list(selections[step]) for step in sorted(selections)], status


@pytest.fixture
def paths():
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        paths = RunPaths(Path(folder) / "run")
        create_run(paths, {})
        yield paths


@pytest.mark.fault(4)
async def test_data_that_ends_before_the_steps_do_ends_the_run_by_itself(paths):
    await Life(paths, prompts=10, slow={}).play()
    trained, status = await finished(paths)
    assert trained == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [], []]
    assert status["ordinals"]["fetched"] == 10


@pytest.mark.fault(1)
async def test_what_was_written_or_in_flight_at_a_crash_is_trained_once_and_nothing_is_skipped(paths):
    slow = {7: 30.0, 8: 30.0, 9: 30.0, 10: 30.0}
    life = asyncio.create_task(Life(paths, prompts=16, slow=slow).play())
    await asyncio.sleep(3.5)  # step 1 is trained; of steps 2 and 3 some groups are written and four are in flight
    life.cancel()
    await asyncio.gather(life, return_exceptions=True)
    _, status = await finished(paths)
    assert (status["ordinals"]["running"], status["ordinals"]["ready"]) == (4, 4)
    await Life(paths, prompts=16, slow={}).play()
    trained, status = await finished(paths)
    assert [ordinal for step in trained for ordinal in step] == list(range(16))
    assert (status["attempts"]["regenerated"], status["attempts"]["started"]) == (0, 16 + 4)


@pytest.mark.fault(1)
@pytest.mark.parametrize("seed", range(5))
async def test_however_often_everything_dies_each_ordinal_is_trained_once(paths, seed):
    slow = {3: 10.0, 9: 10.0}
    while True:
        life = asyncio.create_task(Life(paths, prompts=16, slow=slow).play())
        await asyncio.wait([life], timeout=2.3 + seed * 0.9)
        if life.done():
            await life
            break
        life.cancel()
        await asyncio.gather(life, return_exceptions=True)
        slow = {ordinal: seconds - 1.5 for ordinal, seconds in slow.items()}
    trained, status = await finished(paths)
    assert [ordinal for step in trained for ordinal in step] == list(range(16))
    assert status["attempts"]["regenerated"] == 0
