"""The models and the completions of the service, whoever carries the requests.

Invariant: a request is refused before any token is spent on it, with the key that is at fault; what is admitted ends by its
deadline.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pipeline.engines.base import Engine, EngineInfo
from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import DataError, RequestRefused
from pipeline.service.chunks import Chunks, event
from pipeline.service.completing import Ask, Completing, check_room
from pipeline.service.faults import refusal_of
from pipeline.service.models import Model
from pipeline.service.openai import ChatRequest, CompletionRequest, TokenIds
from pipeline.service.replies import Head, Prompt, chat_reply, completion_reply
from pipeline.service.streaming import Parts, Streaming, whole

RETRY_AFTER_S = 1.0
log = logging.getLogger("service")


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that is ready to answer."""

    model: Model
    info: EngineInfo
    engine: Engine


@dataclass(frozen=True, slots=True)
class _Asked:
    """A request that is good, and what answers it."""

    engine: Engine
    info: EngineInfo
    renderer: ChatRenderer
    head: Head
    prompts: list[Prompt]
    ask: Ask


class Backend(Protocol):
    """Where the models are. Every method has a deadline of its own and raises RequestRefused or the engine's errors."""

    async def open(self, name: str) -> Opened: ...

    async def listed(self) -> list[Model]:
        """The live model first, then checkpoints, newest first."""
        ...


class Front:
    """max_in_flight: completion requests at the same time; more are told to come back. deadline_s: of one request."""

    def __init__(
        self,
        backend: Backend,
        deadline_s: float,
        max_in_flight: int,
        *,
        clock: Callable[[], float] = time.time,
        new_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self._backend, self._deadline_s, self._max_in_flight = backend, deadline_s, max_in_flight
        self._clock, self._new_seed = clock, new_seed
        self._renderers: dict[str, ChatRenderer] = {}
        """By tokenizer digest."""
        self.in_flight = 0

    async def models(self) -> dict[str, Any]:
        async with self._deadline():
            found = await self._backend.listed()
        data = [
            {
                "id": model.name,
                "object": "model",
                "created": int(model.folder.stat().st_mtime) if model.folder.exists() else int(self._clock()),
                "owned_by": "rollout",
                "weight_version": model.version,
            }
            for model in found
        ]
        return {"object": "list", "data": data}

    async def model(self, name: str) -> dict[str, Any]:
        """Raises RequestRefused 404."""
        data = (await self.models())["data"]
        found = next((entry for entry in data if entry["id"] == name), None)
        if found is None:
            known = [entry["id"] for entry in data]
            raise RequestRefused(404, "model_not_found", f"there is no model {name!r}; known are {known}", "model")
        return found

    async def complete(self, request: CompletionRequest | ChatRequest, request_id: str) -> dict[str, Any]:
        """The reply of `POST /v1/completions` or `/v1/chat/completions`."""
        with self._admitted():
            async with self._deadline():
                asked = await self._asked(request, request_id)
                answer = await Completing(asked.engine, asked.renderer).answer(asked.ask)
            if isinstance(request, ChatRequest):
                return chat_reply(asked.head, asked.prompts[0], answer, token_ids=request.return_token_ids)
            return completion_reply(asked.head, asked.prompts, answer, echo=request.echo, token_ids=request.return_token_ids)

    async def stream(self, request: CompletionRequest | ChatRequest, request_id: str) -> AsyncGenerator[str]:
        """The reply as server-sent events, some at a time. Raises before the first what `complete` raises; a fault after it is the
        last event. To close it ends the work.

        Token by token; whole choices by an engine of kind `openai`, with `logprobs` by all but `torch` and `scripted`, and with
        `logprobs` and `echo` by all.
        """
        with self._admitted():
            until = asyncio.get_running_loop().time() + self._deadline_s
            async with self._deadline(until):
                asked = await self._asked(request, request_id)
            chunks = Chunks(request, asked.head, asked.prompts)
            async with aclosing(self._parts(asked)) as parts:
                begun = False
                try:
                    while True:
                        async with self._deadline(until):
                            found = await anext(parts, None)
                        if found is None:
                            break
                        events = chunks.of(found)
                        if events:
                            yield events
                            begun = True
                except Exception as error:
                    if not begun:
                        raise
                    log.exception("request %s: its stream ended", request_id)
                    yield event(refusal_of(error).body(request_id))
                else:
                    yield chunks.end()

    async def _parts(self, asked: _Asked) -> AsyncIterator[Parts]:
        ask, info = asked.ask, asked.info
        scored = ask.top_logprobs is None or (info.streams_logprobs and not ask.echo)
        if info.streams and scored and ask.sampling.max_tokens:
            async with aclosing(Streaming(asked.engine, asked.renderer, ask).parts()) as stream:
                async for parts in stream:
                    yield parts
        else:
            yield whole(await Completing(asked.engine, asked.renderer).answer(ask))

    async def _asked(self, request: CompletionRequest | ChatRequest, request_id: str) -> _Asked:
        opened = await self._backend.open(request.model)
        renderer = await self._renderer(opened)
        seed = self._new_seed() if request.seed is None else request.seed % 2**63
        chat = isinstance(request, ChatRequest)
        prompts, ask = _of_chat(request, opened, renderer, seed) if chat else _of_text(request, opened, renderer, seed)
        head = Head(request_id, int(self._clock()), opened.model.name)
        return _Asked(opened.engine, opened.info, renderer, head, prompts, ask)

    async def _renderer(self, opened: Opened) -> ChatRenderer:
        digest = opened.info.tokenizer_digest
        if digest not in self._renderers:
            self._renderers[digest] = await asyncio.to_thread(ChatRenderer.load, opened.model.folder)
        return self._renderers[digest]

    @contextmanager
    def _admitted(self) -> Iterator[None]:
        if self.in_flight >= self._max_in_flight:
            message = f"{self.in_flight} completions are being made, which is the most at the same time; try again"
            raise RequestRefused(429, "too_many_requests", message, retry_after_s=RETRY_AFTER_S)
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    @asynccontextmanager
    async def _deadline(self, until: float | None = None) -> AsyncIterator[None]:
        """until: on the loop's clock; None: a request's time from now on."""
        end = asyncio.get_running_loop().time() + self._deadline_s if until is None else until
        try:
            async with asyncio.timeout_at(end) as deadline:
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise RequestRefused(504, "deadline", f"no answer within {self._deadline_s:g} s (engine.call_timeout_s)") from error


def _of_chat(request: ChatRequest, opened: Opened, renderer: ChatRenderer, seed: int) -> tuple[list[Prompt], Ask]:
    context = opened.info.max_context
    prompt = _rendered(request, renderer, context)
    most = request.most_tokens or max(1, context - len(prompt.token_ids))
    check_room(len(prompt.token_ids), most, context, "messages")
    array = np.asarray(prompt.token_ids, np.int32)
    return [prompt], Ask([array], request.sampling(most), request.n, seed, request.stops, request.likeliest)


def _of_text(request: CompletionRequest, opened: Opened, renderer: ChatRenderer, seed: int) -> tuple[list[Prompt], Ask]:
    given, context, wanted = request.prompts(), opened.info.max_context, request.max_tokens
    most = max(512, 4 * opened.info.slots)  # as many as an engine holds at the same time, several times over
    if len(given) * request.n > most:
        message = f"{len(given)} prompts x n {request.n} is above {most} choices a request"
        raise RequestRefused(400, "too_many_choices", message, "prompt" if request.n == 1 else "n")
    prompts = [_prompt(prompt, renderer, wanted, context) for prompt in given]
    for prompt in prompts:
        check_room(len(prompt.token_ids), wanted, context, "prompt")
    arrays = [np.asarray(prompt.token_ids, np.int32) for prompt in prompts]
    return prompts, Ask(arrays, request.sampling(wanted), request.n, seed, request.stops, request.logprobs, request.echo)


def _rendered(request: ChatRequest, renderer: ChatRenderer, max_context: int) -> Prompt:
    messages = [(message.role, message.text()) for message in request.messages]
    characters = sum(len(text) for _, text in messages)
    check_room(max(1, characters // renderer.longest_token), 1, max_context, "messages", at_least=True)
    try:
        return Prompt("", [int(token) for token in renderer.render(messages)])
    except DataError as error:
        raise RequestRefused(400, "invalid_messages", str(error), "messages") from error


def _prompt(prompt: str | TokenIds, renderer: ChatRenderer, wanted: int, max_context: int) -> Prompt:
    if isinstance(prompt, str):
        check_room(-(-len(prompt) // renderer.longest_token), wanted, max_context, "prompt", at_least=True)
        return Prompt(prompt, [int(token) for token in renderer.encode_text(prompt)])
    check_room(len(prompt), wanted, max_context, "prompt")
    foreign = [token for token in prompt if token >= renderer.vocab_size]
    if foreign:
        message = f"token id {foreign[0]} is outside the vocabulary of {renderer.vocab_size}"
        raise RequestRefused(404, "unknown_token", message, "prompt")
    return Prompt(renderer.decode(prompt), list(prompt))
