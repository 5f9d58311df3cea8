"""Calls between processes. Invariant: every call has a deadline, and a remote failure arrives as the remote's own exception.

Long work (a rollout, a training step) has no bound on its total time; it is bounded on answering pings meanwhile.
"""

from __future__ import annotations

import asyncio
import pickle
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any, NoReturn

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError, WorkerCrashedError

from deployments.channel import Channel, Closed
from deployments.multiplex import Answer, Call, Multiplexer, pack
from deployments.names import NAMESPACE, actor_name
from pipeline.errors import EngineUnavailable, RemoteTraceback, RolloutError, StageFailed

CALL_S = 60.0
"""Deadline of a call that does a bounded amount of work."""
PING_S = 10.0
LOST_CALL_WAITS_S = (0.5, 1.0, 2.0)
"""Before a call is repeated that a dying replica lost."""
UNANSWERED_PINGS = 6
"""This many pings in a row without an answer: the stage is taken for dead."""

DEATHS = (RayActorError, WorkerCrashedError)


def unwrap(error: BaseException, stage: str) -> BaseException:
    """The remote's own exception with its traceback as the cause; a lost process becomes ConnectionError."""
    if isinstance(error, DEATHS):
        return ConnectionError(f"{stage} died or cannot be reached: {first_line(error)}")
    if isinstance(error, RayTaskError):
        cause: BaseException = error
        while isinstance(cause, RayTaskError) and isinstance(cause.cause, BaseException):
            cause = cause.cause
        if isinstance(cause, RayTaskError):  # its own exception could not travel: the traceback's last line names it
            cause = StageFailed(stage, str(error).strip().splitlines()[-1])
        cause.__cause__ = RemoteTraceback(str(error))
        return cause
    return error


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else type(error).__name__


class RemoteStage:
    """A stage actor seen from another process: `await stage.method(...)` with the default deadline.

    Calls that are made at the same moment are one request, which is answered as a whole; one that waits for a change (`wait_*`)
    is a request of its own, so that it holds up nothing. Requests go through a channel where there is one; by Ray they are retried
    over a restart of the actor (`max_task_retries=-1`), which is safe because every mutating method takes an id.
    """

    def __init__(self, run_id: str, stage: str, deadline_s: float = CALL_S) -> None:
        self._run_id = run_id
        self._stage = stage
        self._deadline_s = deadline_s
        self._handle: Any = None
        self._channel = Channel()
        self._calls = Multiplexer(self._carry)
        self._waits = Multiplexer(self._carry, lanes=sys.maxsize)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(*args: Any, **kwargs: Any) -> Any:
            calls = self._waits if method.startswith("wait_") else self._calls
            return await calls.call(method, args, kwargs)

        return call

    async def _carry(self, calls: list[Call]) -> AsyncIterator[list[Answer]]:
        try:
            async with asyncio.timeout(self._deadline_s):
                answers = await self._answers(calls)
        except TimeoutError as error:
            names = ", ".join(sorted({method for method, _, _ in calls}))
            raise TimeoutError(f"{self._stage}.{names} did not answer within {self._deadline_s:.0f} s") from error
        except RayError as error:
            remote = unwrap(error, self._stage)
            raise remote from remote.__cause__
        yield answers

    async def _answers(self, calls: list[Call]) -> Sequence[Answer]:
        try:
            return [answer async for part in self._channel.request(calls) for answer in part]
        except Closed:
            answers = await asyncio.wrap_future(self.handle().answer.remote(calls).future())
        _open(self._channel, self.handle())
        return answers

    def handle(self) -> Any:
        if self._handle is None:
            self._handle = ray.get_actor(actor_name(self._run_id, self._stage), namespace=NAMESPACE)
        return self._handle


def _open(channel: Channel, handle: Any) -> None:
    """For later requests; the actor itself says where."""
    channel.open(lambda: asyncio.wrap_future(handle.channel.remote().future()))


def node_call(run_id: str, stage: str, node: str, method: str, *args: Any) -> Any:
    """The call of a workflow node: of unbounded length, as long as the actor answers pings."""
    handle = ray.get_actor(actor_name(run_id, stage), namespace=NAMESPACE)
    reference = handle.node.remote(node, method, *args)
    unanswered = 0
    while True:
        try:
            return ray.get(reference, timeout=PING_S)
        except GetTimeoutError:
            unanswered = 0 if _pinged(handle) else unanswered + 1
            if unanswered >= UNANSWERED_PINGS:
                raise StageFailed(stage, f"no answer to {unanswered} pings of {PING_S:.0f} s during {method}") from None
        except RayError as error:
            remote = unwrap(error, stage)
            raise remote from remote.__cause__


def _pinged(handle: Any) -> bool:
    try:
        ray.get(handle.ping.remote(), timeout=PING_S)
    except (GetTimeoutError, *DEATHS):
        return False
    return True


class RemoteDeployment:
    """A Serve deployment seen from another process. A lost replica is EngineUnavailable: the caller retries within its own
    budget, because Serve does not."""

    def __init__(self, app: str, deployment: str, deadline_s: float) -> None:
        self._app = app
        self._deployment = deployment
        self._deadline_s = deadline_s
        self._handle: Any = None

    async def repeat(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """A call that may be made twice: again when a dying replica lost it, though not after its deadline."""
        for wait_s in LOST_CALL_WAITS_S:
            try:
                return await self.call(method, *args, deadline_s=deadline_s)
            except EngineUnavailable as error:
                if isinstance(error.__cause__, TimeoutError):
                    raise
                await asyncio.sleep(wait_s)
        return await self.call(method, *args, deadline_s=deadline_s)

    def handle(self) -> Any:
        from ray import serve

        if self._handle is None:
            self._handle = serve.get_deployment_handle(self._deployment, app_name=self._app)
        return self._handle

    async def call(self, method: str, *args: Any, deadline_s: float | None = None) -> Any:
        """What nobody waits for any more, the replica is told to leave."""
        seconds = self._deadline_s if deadline_s is None else deadline_s
        response = getattr(self.handle(), method).remote(*args)
        try:
            return await asyncio.wait_for(response, seconds)
        except TimeoutError as error:
            response.cancel()
            raise EngineUnavailable(f"{self._app}.{method} did not answer within {seconds:.0f} s") from error
        except asyncio.CancelledError:
            response.cancel()
            raise
        except RayError as error:
            self._raise(method, error)

    async def parts(self, method: str, *args: Any) -> AsyncIterator[Any]:
        """What a streaming method yields, packed as `pack` does. The deadline is on progress: the next of it. To close this ends
        the work. Raises RayError as it comes."""
        response = getattr(self.handle().options(stream=True), method).remote(*args)
        try:
            while True:
                yield pickle.loads(await asyncio.wait_for(anext(response), self._deadline_s))
        except StopAsyncIteration:
            return
        except TimeoutError as error:
            raise EngineUnavailable(f"{self._app}.{method} did not go on within {self._deadline_s:.0f} s") from error
        finally:
            response.cancel()

    def _raise(self, method: str, error: RayError) -> NoReturn:
        """What the replica raised, if it is ours to know; else the replica is what failed."""
        remote = unwrap(error, self._app)
        if isinstance(remote, RolloutError):
            raise remote from remote.__cause__
        raise EngineUnavailable(f"{self._app}.{method}: {first_line(remote)}") from remote


class RemoteEngine(RemoteDeployment):
    """An engine behind a Serve deployment handle, as `pipeline.engines.base.Engine`.

    model: of a deployment that serves several, the one that is meant; it stands before the arguments of every call.
    """

    def __init__(self, app: str, deployment: str, deadline_s: float, model: Any = None) -> None:
        super().__init__(app, deployment, deadline_s)
        self._model = () if model is None else (model,)

    async def info(self) -> Any:
        return await self.call("info", *self._model)

    async def generate(self, requests: list, version: Any) -> list:
        return await self.call("generate", *self._model, requests, version)

    async def stream(self, requests: list, version: Any, top_logprobs: int | None) -> AsyncIterator[list]:
        try:
            async with aclosing(self.parts("stream", *self._model, requests, version, top_logprobs)) as stream:
                async for pieces in stream:
                    yield pieces
        except RayError as error:
            self._raise("stream", error)

    async def score(self, rows: list, signal: str, top_k: int) -> list:
        return await self.call("score", *self._model, rows, signal, top_k)

    async def close(self) -> None:
        """The deployment ends with its application."""


class EngineCalls(RemoteEngine):
    """A RemoteEngine whose calls travel together. lanes: replicas, so that each gets its share."""

    def __init__(self, app: str, deployment: str, deadline_s: float, lanes: int, model: Any = None) -> None:
        super().__init__(app, deployment, deadline_s, model)
        self._calls = Multiplexer(self._carry, lanes)

    async def generate(self, requests: list, version: Any) -> list:
        return await self._calls.call(requests, version)

    async def _carry(self, calls: list[Call]) -> AsyncIterator[list[Answer]]:
        """Each call has its own fault among the answers: one of the request is the replica's."""
        try:
            async with aclosing(self.parts("generate_all", *self._model, pack(calls))) as stream:
                async for answers in stream:
                    yield answers
        except RayError as error:
            remote = unwrap(error, self._app)
            raise EngineUnavailable(f"{self._app}.generate: {first_line(remote)}") from remote


class RemoteWorker:
    """An EvaluatorWorker's actor, as `pipeline.evaluator.worker.WorkerClient`. Not retried: its death is a lost attempt."""

    def __init__(self, run_id: str, stage: str, node: str, player: str = "student") -> None:
        self.node = node
        self._name = stage
        self._stage = RemoteStage(run_id, stage)
        self._player = player
        self._channel = Channel()
        self._calls = Multiplexer(self._carry)

    async def clear(self) -> None:
        """Once it plays nothing any more. A worker that does not live, or not yet, plays nothing."""
        try:
            await asyncio.wait_for(asyncio.wrap_future(self._stage.handle().clear.remote().future()), CALL_S)
        except TimeoutError as error:
            raise StageFailed(self._name, f"did not end within {CALL_S:.0f} s what a pool before this one left playing") from error
        except (ValueError, *DEATHS):
            return

    async def run_samples(self, *args: Any) -> list:
        """Bounded by the phases' deadlines in the worker, and by pings: a worker that answers none is gone."""
        return await self._calls.call(*args, self._player)

    async def _carry(self, calls: list[Call]) -> AsyncIterator[list[Answer]]:
        handle = self._stage.handle()
        try:
            async with aclosing(self._channel.request(calls) if self._channel.is_open else _by_ray(handle, calls)) as parts:
                while True:
                    yield await self._alive(handle, asyncio.ensure_future(anext(parts)))
                    _open(self._channel, handle)
        except StopAsyncIteration:
            return
        except RayError as error:
            remote = unwrap(error, self._name)
            raise remote from remote.__cause__
        except Closed as error:
            raise ConnectionError(f"{self._name} died while it played") from error
        except TimeoutError as error:
            raise ConnectionError(f"worker {self.node} does not answer") from error

    async def _alive(self, handle: Any, result: asyncio.Future[Any]) -> Any:
        """The result, however long it takes, as long as the worker answers pings."""
        try:
            while not (await asyncio.wait({result}, timeout=PING_S))[0]:
                await asyncio.wait_for(asyncio.wrap_future(handle.ping.remote().future()), CALL_S)
            return result.result()
        finally:
            result.cancel()
            await asyncio.wait({result})


async def _by_ray(worker: Any, calls: list[Call]) -> AsyncIterator[list[Answer]]:
    async for reference in worker.play_all.options(num_returns="streaming").remote(pack(calls)):
        yield pickle.loads(await asyncio.wait_for(reference, CALL_S))
