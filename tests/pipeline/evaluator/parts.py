"""A pool with real parts (buffer, workers, scripted agents) in one event loop; the engine and the workers can fail on demand."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.buffer.schema import create_run
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.config.schema import RunConfig
from pipeline.engines.base import Completion
from pipeline.evaluator.pool import EvaluatorPool
from pipeline.evaluator.spec import NodeSpec, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.paths import RunPaths
from pipeline.records import Batch, Sampling, Stopping, Task

MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None
"""A run folder in memory, where the machine can: the ledger syncs every transaction."""


def make_config(*, spec: dict[str, Any] | None = None, rollout: dict[str, Any] | None = None, **parts: Any) -> RunConfig:
    return RunConfig.model_validate(
        {
            "student": {"architecture": {}},
            "datasets": {"words": {"generator": "spell_backward"}},
            "algorithm": {"name": "grpo"},
            "specs": [{"agent": "scripted", **(spec or {})}],
            "rollout": {"tasks_per_step": 4, "samples_per_task": 4, **(rollout or {})},
            **parts,
        }
    )


def make_task(ordinal: int, script: dict[str, Any] | None = None, **changes: Any) -> Task:
    task = Task(
        ordinal=ordinal,
        task_id=f"words/{ordinal}",
        dataset="words",
        task_type="single_turn",
        messages=(("user", "hi"),),
        answer="ih",
        verifier="exact",
        samples=4,
        sampling=Sampling(max_tokens=8),
        stopping=Stopping(),
        seed=7,
        metadata={"script": script} if script else {},
    )
    return replace(task, **changes)


class Letters:
    """A renderer: one token a character."""

    def render(self, messages: tuple[tuple[str, str], ...]) -> np.ndarray:
        return np.asarray([ord(letter) for _, content in messages for letter in content], np.int32)

    def decode(self, token_ids: np.ndarray) -> str:
        return "".join(chr(token) for token in token_ids)


@dataclass
class Echo:
    """Answers every prompt with its reverse after `seconds`, and remembers its calls. faults: raised one a call, first first."""

    seconds: float = 1.0
    version: int = 0
    faults: list[BaseException] = field(default_factory=list)
    calls: list[list[Any]] = field(default_factory=list)

    async def generate(self, requests: list[Any], version: Any) -> list[Completion]:
        self.calls.append(list(requests))
        await asyncio.sleep(self.seconds)
        if self.faults:
            raise self.faults.pop(0)
        made = max(self.version, version.minimum) if version.exact is None else version.exact
        return [
            Completion(r.request_id, r.prompt[::-1].astype(np.int32), np.full(len(r.prompt), -1.0, np.float32), "stop", made)
            for r in reversed(requests)
        ]


class Tasks:
    """The fetcher's part of the contract. scripts: by ordinal; every other task is solved at once."""

    def __init__(self, buffer: Any, make: Callable[[int], Task]) -> None:
        self._buffer = buffer
        self._make = make

    async def tasks(self, ordinals: Any) -> list[Task]:
        return [self._make(ordinal) for ordinal in ordinals]

    async def replacement(self, ordinal: int) -> Task | None:
        slot = await self._buffer.replace(ordinal, None)
        return None if slot is None else self._make(slot.ordinal)


class Mortal:
    """A worker whose process dies as told: `deaths` calls end in ConnectionError after `after_s`; None: all."""

    def __init__(self, worker: EvaluatorWorker, deaths: int | None, after_s: float = 0.0) -> None:
        self.node = worker.node
        self._worker = worker
        self._deaths = deaths
        self._after_s = after_s
        self.calls = 0

    async def run_samples(self, *args: Any) -> list[Any]:
        self.calls += 1
        if self._deaths is None or self.calls <= self._deaths:
            await asyncio.sleep(self._after_s)
            raise ConnectionError("the worker died")
        return await self._worker.run_samples(*args)


async def inline(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


async def nobody() -> None:
    pass


@dataclass
class World:
    config: RunConfig
    buffer: BufferService
    pool: EvaluatorPool
    paths: RunPaths
    workers: list[Any]

    async def assign(self, step: int, count: int | None = None) -> list[Batch]:
        """What fetch[step] and batch[step] do: one task a batch."""
        slots = await self.buffer.assign(step, count or self.config.rollout.tasks_per_step, None)
        return [Batch(f"{step}.{slot.slot}", "single_turn", "single_turn", (slot.ordinal,)) for slot in slots]

    async def rollout(self, step: int, count: int | None = None) -> Any:
        return await self.pool.rollout(step, await self.assign(step, count))

    async def groups(self, *ordinals: int) -> list[Any]:
        return await self.buffer.read(list(ordinals), False)

    async def states(self) -> dict[str, int]:
        status = await self.buffer.status()
        return {name: count for name, count in status["ordinals"].items() if count}


@asynccontextmanager
async def world(
    config: RunConfig | None = None,
    make: Callable[[int], Task] = make_task,
    *,
    engine: Any = None,
    nodes: tuple[NodeSpec, ...] = (NodeSpec("here", (), 64.0, 64.0),),
    workers: Callable[[EvaluatorWorker], Any] = lambda worker: worker,
    buffer: Callable[[BufferService], Any] = lambda service: service,
    scorer: Any = nobody,
    **options: Any,
) -> AsyncIterator[World]:
    config = config or make_config()
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        paths = RunPaths(Path(folder) / "run")
        create_run(paths, {})
        service = BufferService(paths, BufferSettings.from_config(config), threaded=False)
        await service.open(True)
        specs = specs_from_config(config)
        made = [workers(EvaluatorWorker(config, Letters(), engine or Echo(), specs, node.node, offload=inline)) for node in nodes]
        seen = buffer(service)
        pool = EvaluatorPool(
            config, seen, Tasks(seen, make), made, scorer, nodes=nodes, details_folder=paths.details, offload=inline, **options
        )
        try:
            yield World(config, service, pool, paths, made)
        finally:
            await pool.close()
            await service.close()
