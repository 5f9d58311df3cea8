"""From the requests of single samples to calls of the engine: what one group asks for at the same moment is one call.

Invariant: every request ends, with its own completion (joined by id) or with an exception, and a call that nobody waits for any
more is cancelled.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from pipeline.engines.base import Completion, Engine, GenerateRequest, Version
from pipeline.errors import AgentTimeout, BadReply, EngineError, EngineUnavailable, RowRefused
from pipeline.evaluator.deadlines import Deadlines
from pipeline.evaluator.nursery import cancel_when_left
from pipeline.records import Sampling

Pending = tuple[GenerateRequest, "asyncio.Future[Completion]"]


@dataclass(frozen=True, slots=True)
class CallPolicy:
    """How often and how long the engine is asked."""

    attempts: int
    backoff_s: float
    timeout_s: float


class GroupGenerator:
    """One for each call of a worker. Requests that arrive in one pass of the event loop go to the engine together."""

    def __init__(self, engine: Engine, version: Version, policy: CallPolicy) -> None:
        self._engine = engine
        self._version = version
        self._policy = policy
        self._pending: list[Pending] = []
        self._calls: set[asyncio.Task[None]] = set()

    async def generate(self, request: GenerateRequest) -> Completion:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Completion] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append((request, future))
        return await future

    async def close(self) -> None:
        for call in self._calls:
            call.cancel()
        await asyncio.gather(*self._calls, return_exceptions=True)

    def _flush(self) -> None:
        batch = [(request, future) for request, future in self._pending if not future.done()]
        self._pending = []
        if not batch:
            return
        call = asyncio.create_task(self._call(batch), name=f"generate {batch[0][0].request_id} +{len(batch) - 1}")
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        cancel_when_left(call, [future for _, future in batch])

    async def _call(self, batch: list[Pending]) -> None:
        try:
            found = await self._ask([request for request, _ in batch])
        except (RowRefused, BadReply) as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:  # one bad row must not take its siblings
                await asyncio.gather(*(self._call([entry]) for entry in batch))
        except asyncio.CancelledError:
            _fail(batch, EngineUnavailable("the call of the engine was cancelled"))
            raise
        except Exception as error:
            _fail(batch, error)
        else:
            for request, future in batch:
                if not future.done():
                    future.set_result(found[request.request_id])

    async def _ask(self, requests: list[GenerateRequest]) -> dict[str, Completion]:
        """Again on EngineUnavailable, within the budget; every other fault is the caller's to judge."""
        for attempt in range(1, self._policy.attempts + 1):
            try:
                return await self._ask_once(requests)
            except (EngineUnavailable, ConnectionError):
                if attempt == self._policy.attempts:
                    raise
                await asyncio.sleep(self._policy.backoff_s * 2 ** (attempt - 1))
        raise AssertionError("attempts is at least 1")

    async def _ask_once(self, requests: list[GenerateRequest]) -> dict[str, Completion]:
        try:
            async with asyncio.timeout(self._policy.timeout_s) as deadline:
                completions = await self._engine.generate(requests, self._version)
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise EngineUnavailable(f"no reply within engine.call_timeout_s {self._policy.timeout_s:g} s") from error
        return self._checked(requests, completions)

    def _checked(self, requests: list[GenerateRequest], completions: Sequence[Completion]) -> dict[str, Completion]:
        found = {completion.request_id: completion for completion in completions}
        missing = [request.request_id for request in requests if request.request_id not in found]
        if missing or len(completions) != len(requests):
            raise BadReply(f"{len(completions)} completions for {len(requests)} requests; missing {missing[:3]}")
        for completion in completions:
            version, wanted = completion.weight_version, self._version
            if version < wanted.minimum or (wanted.exact is not None and version != wanted.exact):
                raise EngineError(f"asked for {wanted}, answered with weight version {version}")
            if len(completion.logprobs) != len(completion.token_ids):
                raise BadReply(f"{completion.request_id}: {len(completion.token_ids)} tokens, {len(completion.logprobs)} logprobs")
        return found


class Speaker(Protocol):
    """Who answers one request: a group's engine, or a teacher without one."""

    async def generate(self, request: GenerateRequest) -> Completion: ...


class SampleGenerator:
    """Student or teacher as the agent of one sample sees it (`agents.base.Generator`): seeds, deadline, turn records are here."""

    def __init__(
        self,
        group: Speaker,
        sample_id: str,
        sampling: Sampling,
        seed: int,
        turn_s: float,
        deadlines: Deadlines,
    ) -> None:
        self._group = group
        self._sample_id = sample_id
        self._sampling = sampling
        self._seed = seed
        self._turn_s = turn_s
        self._deadlines = deadlines
        self._clock = asyncio.get_running_loop().time
        self._executor = "student"
        self.turns: list[dict[str, Any]] = []
        """What was generated, also when the episode failed later."""

    def beside(self, group: Speaker, executor: str) -> SampleGenerator:
        """Another who may speak in this sample, under the same rules and into the same records."""
        other = copy.copy(self)
        other._group, other._executor = group, executor
        return other

    async def generate(self, prompt: np.ndarray, *, turn: int, max_tokens: int | None = None) -> Completion:
        sampling = self._sampling
        if max_tokens not in (None, sampling.max_tokens):
            sampling = replace(sampling, max_tokens=max_tokens)
        request = GenerateRequest(f"{self._sample_id}.{turn}", prompt, sampling, _turn_seed(self._seed, turn))
        started = self._clock()
        completion = await self._in_time(request)
        self.turns.append(
            {
                "turn": turn,
                "tokens": len(completion.token_ids),
                "seconds": round(self._clock() - started, 6),
                "executor": self._executor,
                "weight_version": completion.weight_version,
            }
        )
        return completion

    async def _in_time(self, request: GenerateRequest) -> Completion:
        try:
            with self._deadlines.within(self._turn_s) as deadline:
                return await self._group.generate(request)
        except TimeoutError:
            if not deadline.expired:
                raise
        raise AgentTimeout(f"turn {request.request_id} passed turn_timeout_s {self._turn_s:g} s")


def _turn_seed(seed: int, turn: int) -> int:
    if turn == 0:
        return seed
    return int(np.random.SeedSequence([seed, turn]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def _fail(batch: list[Pending], error: BaseException) -> None:
    for _, future in batch:
        if not future.done():
            future.set_exception(error)
