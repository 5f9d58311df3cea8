"""The service over real HTTP, without Ray: one run that goes on and evaluations that are played, both as fast as the test says."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar

import numpy as np
import uvicorn

from deployments.api import make_api
from deployments.gate import GateRules
from pipeline.buffer.api import StageReport
from pipeline.buffer.lock import RunLock
from pipeline.buffer.schema import create_run
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.config.loading import read_config
from pipeline.engines.renderer import ChatRenderer
from pipeline.evaluation.plan import EvalRequest, Plan
from pipeline.evaluation.store import JobStore
from pipeline.evaluator.placement import PlacementPool
from pipeline.evaluator.spec import NodeSpec, Resource
from pipeline.observe.metrics import MetricsWriter
from pipeline.observe.timeline import TimelineWriter, timeline_path
from pipeline.paths import RunPaths, SharedPaths
from pipeline.records import Sample, Task, aborted_sample
from pipeline.service.arguments import token_digest
from pipeline.service.front import Front
from pipeline.service.runs import Runs
from tests.deployments.test_api import Backend, LocalJobs
from tests.pipeline.buffer.helpers import roll_out
from tests.pipeline.evaluator.parts import make_task
from tests.pipeline.observe.fakes import STARTED_AT, TASKS, make_run, results, status
from tests.pipeline.service.parts import Reverser, letters_folder

T = TypeVar("T")
WAIT_S = 60.0
STEPS_BEFORE = 40
TASK = make_task(0, messages=(("system", "You repair programs."), ("user", "The test of <b>add</b> fails.")))


class Slowly:
    """Plays made-up samples, each when the test lets it: right, wrong, of several turns, and lost to the sandbox, in this order."""

    def __init__(self) -> None:
        self._let = asyncio.Semaphore(0)

    async def let(self, count: int) -> None:
        for _ in range(count):
            self._let.release()

    def link(self, model: str, target: Path) -> tuple[str, int]:
        target.mkdir()
        return model, 3

    async def play(self, model: Path, version: int, tasks: Any, done: Any, on_sample: Any) -> None:
        for task in tasks:
            for index in range(task.samples):
                if (task.ordinal, index) not in done:
                    await self._let.acquire()
                    on_sample(task, made_up(task, index, version))


def made_up(task: Task, index: int, version: int) -> Sample:
    kind = task.ordinal % 4
    if kind == 3:
        return aborted_sample(
            task.ordinal, index, [1, 2], abort_reason="infra_sandbox", error="SandboxError: no space left", phase="init"
        )
    turns = ({"turn": 0, "executor": "student", "tokens": 6, "action": "ls", "exit_code": 0, "output": "add.py\ntest_add.py\n"},)
    ones, mask = np.full(6, version, np.int32), np.ones(6, np.uint8)
    return Sample(
        f"{task.ordinal}.{index}", index, "ok", 0.0 if kind == 1 else 1.0, ones, mask, np.zeros(6, np.float32), mask, ones,
        "finish", "sub" if kind == 1 else "add", turns=turns if kind == 2 else (), seconds=0.25,
    )  # fmt: skip


def plan(request: EvalRequest) -> Plan:
    return Plan(tuple(replace(TASK, ordinal=n, task_id=f"repair/{n}", samples=request.n or 1) for n in range(8)), (1,))


class Site:
    """`with Site(folder) as site`: the page is at `site.url`. `do` runs a coroutine where the service runs."""

    def __init__(self, folder: Path, token: str | None = None) -> None:
        self._folder = folder
        self._rules = GateRules(True, token and token_digest(token), 100_000)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="site")
        self.step = STEPS_BEFORE

    def __enter__(self) -> Self:
        self._thread.start()
        self.do(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        self.do(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(WAIT_S)
        self._loop.close()

    def do(self, work: Awaitable[T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    async def _open(self) -> None:
        await self._open_run(make_run(self._folder / "runs", STEPS_BEFORE))
        self.player = Slowly()
        self.jobs = LocalJobs(JobStore(self._folder / "evals"), self.player, plan, 0.5)
        await self.jobs.start()
        letters = letters_folder(self._folder / "letters")
        backend = Backend(Reverser(ChatRenderer.load(letters)), letters)
        runs = Runs(SharedPaths(self._folder / "runs"), self._folder, lambda arguments, output: None)
        api = make_api(backend, self.jobs, Front(backend, 5.0, 8), runs, self._rules, self._folder / "evals")
        self._server = uvicorn.Server(uvicorn.Config(api, host="127.0.0.1", port=0, log_level="warning", lifespan="off"))
        self._serving = asyncio.create_task(self._server.serve())
        while not self._server.started:
            assert not self._serving.done(), "the server did not start"
            await asyncio.sleep(0.01)
        self.url = f"http://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"

    async def _open_run(self, paths: RunPaths) -> None:
        self.paths = paths
        create_run(paths, {"steps": 120, "started_at": STARTED_AT})
        self._lock = RunLock(paths)
        self._lock.acquire()
        self.buffer = BufferService(paths, BufferSettings.from_config(read_config(paths.config).config))
        await self.buffer.open(True)
        await self.buffer.set_run("running")
        await self.buffer.record_step(STEPS_BEFORE, results(STEPS_BEFORE)[STEPS_BEFORE])
        slots = await self.buffer.assign(1, TASKS, None)
        for slot in slots[:12]:
            await roll_out(self.buffer, slot.ordinal, 1, ("teacher",) if slot.ordinal % 3 else ())
        for slot in slots[12:20]:
            await self.buffer.start_attempt(slot.ordinal, STEPS_BEFORE, "worker")
        await self.buffer.discard(slots[31].ordinal, "zero_advantage")
        await self._report()

    async def _report(self) -> None:
        for name, stage in status(self.step)["stages"].items():
            detail = await placement() if name == "evaluator_pool" else {}
            await self.buffer.report_stage(
                StageReport(
                    name, stage["actor"], stage["pid"], stage["node"], stage["in"], stage["out"], stage["backlog"],
                    stage["oldest_s"], stage["busy_s"], detail,
                )
            )  # fmt: skip

    async def go_on(self) -> None:
        """One more training step, as a run's own writers leave it."""
        self.step += 1
        made = results(self.step)
        await self.buffer.record_step(self.step, made[self.step])
        MetricsWriter(self.paths.metrics).sync(made)
        TimelineWriter(timeline_path(self.paths), STARTED_AT).append(status(self.step), STARTED_AT + self.step + 10.0)
        await self._report()

    async def _close(self) -> None:
        self._server.should_exit = True
        await self._serving
        await self.jobs.close()
        await self.buffer.close()
        self._lock.release()


async def placement() -> dict[str, Any]:
    """What a pool with something in it says of itself."""
    pool = PlacementPool([NodeSpec("gpu-a", (0, 1), 16.0, 64.0), NodeSpec("gpu-b", (0,), 8.0, 32.0, (("licence", 4.0),))])
    each = Resource(gpu=0.25, cpu=1.0, memory_gb=2.0)
    await pool.acquire(each.times(7), each, 7)
    return {
        "samples_running": 5, "tokens_held": pool.held, "batches_waiting": 2, "workers_alive": 2, "worker_deaths": 1,
        "nodes": pool.used(), "oldest": "ordinal 12 of step 1",
    }  # fmt: skip
