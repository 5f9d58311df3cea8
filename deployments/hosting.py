"""What all stage actors share: they build their service from the run folder, answer pings, and say how they are doing.

Invariant: an actor holds nothing that the run folder does not hold, so a restart needs no command and no argument but the folder.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from deployments.calls import RemoteStage
from deployments.channel import Door
from deployments.multiplex import Answer, Call, answers
from deployments.names import door
from deployments.threads import keep_memory, take_turns
from deployments.witness import append_line
from pipeline.buffer.api import StageReport
from pipeline.config.loading import read_config
from pipeline.config.schema import RunConfig
from pipeline.errors import FencedOut, StageFailed
from pipeline.evaluator.admission import INFRASTRUCTURE_CPU
from pipeline.heap import tune_collector
from pipeline.paths import RunPaths

BEAT_S = 1.0
OPTIONS = {
    "num_cpus": INFRASTRUCTURE_CPU,
    "max_restarts": -1,
    "max_task_retries": -1,
    "lifetime": "detached",
    "max_concurrency": 1000,
}
"""Of every stage actor. A whole CPU each would ask for more than a laptop has."""


class StageActor:
    """Base of the stage actors. A subclass says how to build its service and forwards its methods to it."""

    stage = "stage"

    def __init__(self, root: str) -> None:
        self.paths = RunPaths(Path(root))
        log_to_file(self.paths, self.stage)
        take_turns()
        keep_memory()
        self.log = logging.getLogger(self.stage)
        self.config: RunConfig = read_config(self.paths.config).config
        self.buffer = RemoteStage(self.paths.run_id, "replay_buffer")
        self._door: Door | None = None
        self._started = asyncio.ensure_future(self._start())
        self._beats = asyncio.ensure_future(self._beat())

    async def build(self) -> Any:
        raise NotImplementedError

    def background(self) -> Callable[[Any], Awaitable[None]] | None:
        """A loop that belongs to the service and must live as long as the actor; None: there is none."""
        return None

    async def service(self) -> Any:
        """The service, built. Raises StageFailed with the cause when building it or its background loop failed."""
        return await asyncio.shield(self._started)

    async def ping(self) -> int:
        return os.getpid()

    async def answer(self, calls: Sequence[Call]) -> list[Answer]:
        """Several calls (method, positional, keyword arguments) in one request; one that fails does not touch the others."""
        return [answer async for part in answers(calls, self._call) for answer in part]

    async def channel(self) -> Path:
        """Where `answer` is asked beside Ray, on this machine."""
        if self._door is None:
            self._door = Door(door(self.paths, self.stage), self._answers)
        return self._door.path

    async def _answers(self, calls: Sequence[Call]) -> AsyncIterator[list[Answer]]:
        yield await self.answer(calls)

    async def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return await getattr(self, method)(*args, **kwargs)

    async def node(self, name: str, method: str, *args: Any) -> Any:
        """Do a workflow node's work; its beginning and its end are noted in log/nodes.jsonl."""
        append_line(self.paths.nodes, node=name, event="started")
        result = await getattr(self, method)(*args)
        append_line(self.paths.nodes, node=name, event="done")
        return result

    async def ready(self) -> int:
        await self.service()
        return os.getpid()

    async def _start(self) -> Any:
        try:
            service = await self.build()
            tune_collector()
        except Exception as error:
            self.log.exception("could not start")
            raise StageFailed(self.stage, f"could not start: {type(error).__name__}: {error}") from error
        loop = self.background()
        if loop is not None:
            self._loop = asyncio.ensure_future(loop(service))
            self._loop.add_done_callback(self._loop_ended)
        return service

    def _loop_ended(self, task: asyncio.Task) -> None:
        """A background loop never ends by itself: from now on every call says what happened."""
        if task.cancelled():
            return
        cause = task.exception()
        self.log.error("background loop ended", exc_info=cause)
        failure = cause if isinstance(cause, StageFailed) else StageFailed(self.stage, f"background loop ended: {cause!r}")
        if failure is not cause:
            failure.__cause__ = cause
        self._started = asyncio.get_running_loop().create_future()
        self._started.set_exception(failure)

    async def _beat(self) -> None:
        """Report once the service stands, and then about once a second. An unreachable buffer is not this stage's failure; being
        fenced out ends the process."""
        await asyncio.wait({self._started})
        while True:
            try:
                service = await self.service()
                await self.report(service)
            except FencedOut:
                self.log.error("a newer writer owns the run: this process ends")
                os._exit(1)
            except (ConnectionError, TimeoutError, StageFailed) as error:
                self.log.warning("no report: %s", error)
            await asyncio.sleep(BEAT_S)

    async def report(self, service: Any) -> None:
        await self.buffer.report_stage(self.identified(service.report()))

    def identified(self, report: StageReport) -> StageReport:
        """The service's numbers under this actor's name, pid and node."""
        name = f"{self.paths.run_id}:{self.stage}"
        return replace(report, stage=self.stage, actor=name, pid=os.getpid(), node=os.uname().nodename)


class _LogFile(logging.FileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A line that a full disk does not take goes nowhere: whoever ran into it says so, and logging's traceback would not."""


def log_to_file(paths: RunPaths, name: str) -> None:
    """Everything that this process logs goes to log/<name>.log of the run."""
    paths.log.mkdir(parents=True, exist_ok=True)
    handler = _LogFile(paths.log / f"{name}.log")
    handler.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.INFO)


def forwards(*names: str) -> Callable[[type], type]:
    """Class decorator: these methods of the actor are those of its service."""

    def method(name: str) -> Any:
        async def call(self: StageActor, *args: Any, **kwargs: Any) -> Any:
            result = getattr(await self.service(), name)(*args, **kwargs)
            return await result if inspect.isawaitable(result) else result

        call.__name__ = call.__qualname__ = name
        return call

    def decorate(cls: type) -> type:
        for name in names:
            setattr(cls, name, method(name))
        return cls

    return decorate
