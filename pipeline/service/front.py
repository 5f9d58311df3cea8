"""The models and the completions of the service, whoever carries the requests.

Invariant: a request is refused before any token is spent on it, with the key that is at fault; what is admitted ends by its
deadline.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from pipeline.engines.base import Engine, EngineInfo
from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import DataError, RequestRefused
from pipeline.records import Sampling
from pipeline.service.completing import Answer, Ask, Completing, check_room
from pipeline.service.models import Model
from pipeline.service.openai import ChatRequest, CompletionRequest, TokenIds
from pipeline.service.replies import Head, Prompt, chat_reply, completion_reply

RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Opened:
    """A model that is ready to answer."""

    model: Model
    info: EngineInfo
    engine: Engine


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

    async def complete(self, request: CompletionRequest, request_id: str) -> dict[str, Any]:
        """The reply of `POST /v1/completions`."""
        async with self._admitted():
            opened = await self._backend.open(request.model)
            renderer = await self._renderer(opened)
            asked = request.prompts()
            if len(asked) * request.n > self._max_choices(opened):
                message = f"{len(asked)} prompts x n {request.n} is above {self._max_choices(opened)} choices a request"
                raise RequestRefused(400, "too_many_choices", message, "prompt" if request.n == 1 else "n")
            prompts = [_prompt(prompt, renderer, request.max_tokens, opened.info.max_context) for prompt in asked]
            answer = await self._answer(opened, renderer, prompts, request, request.max_tokens, request.logprobs, "prompt")
            head = Head(request_id, int(self._clock()), opened.model.name)
            return completion_reply(head, prompts, answer, echo=request.echo, token_ids=request.return_token_ids)

    async def chat(self, request: ChatRequest, request_id: str) -> dict[str, Any]:
        """The reply of `POST /v1/chat/completions`."""
        async with self._admitted():
            opened = await self._backend.open(request.model)
            renderer = await self._renderer(opened)
            messages = [(message.role, message.text()) for message in request.messages]
            characters = sum(len(text) for _, text in messages)
            check_room(max(1, characters // renderer.longest_token), 1, opened.info.max_context, "messages", at_least=True)
            try:
                tokens = renderer.render(messages)
            except DataError as error:
                raise RequestRefused(400, "invalid_messages", str(error), "messages") from error
            prompt = Prompt("", [int(token) for token in tokens])
            room = max(1, opened.info.max_context - len(tokens))
            most = request.most_tokens or room
            answer = await self._answer(opened, renderer, [prompt], request, most, request.likeliest, "messages")
            head = Head(request_id, int(self._clock()), opened.model.name)
            return chat_reply(head, prompt, answer, token_ids=request.return_token_ids)

    async def _answer(
        self,
        opened: Opened,
        renderer: ChatRenderer,
        prompts: list[Prompt],
        request: CompletionRequest | ChatRequest,
        max_tokens: int,
        top_logprobs: int | None,
        param: str,
    ) -> Answer:
        arrays = [np.asarray(prompt.token_ids, np.int32) for prompt in prompts]
        for array in arrays:
            check_room(len(array), max_tokens, opened.info.max_context, param)
        sampling: Sampling = request.sampling(max_tokens)
        seed = self._new_seed() if request.seed is None else request.seed % 2**63
        echo = isinstance(request, CompletionRequest) and request.echo
        ask = Ask(arrays, sampling, request.n, seed, request.stops, top_logprobs, echo)
        return await Completing(opened.engine, renderer).answer(ask)

    async def _renderer(self, opened: Opened) -> ChatRenderer:
        digest = opened.info.tokenizer_digest
        if digest not in self._renderers:
            self._renderers[digest] = await asyncio.to_thread(ChatRenderer.load, opened.model.folder)
        return self._renderers[digest]

    def _max_choices(self, opened: Opened) -> int:
        """As many as an engine holds at the same time, several times over."""
        return max(512, 4 * opened.info.slots)

    @asynccontextmanager
    async def _admitted(self) -> AsyncIterator[None]:
        if self.in_flight >= self._max_in_flight:
            message = f"{self.in_flight} completions are being made, which is the most at the same time; try again"
            raise RequestRefused(429, "too_many_requests", message, retry_after_s=RETRY_AFTER_S)
        self.in_flight += 1
        try:
            async with self._deadline():
                yield
        finally:
            self.in_flight -= 1

    @asynccontextmanager
    async def _deadline(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(self._deadline_s) as deadline:
                yield
        except TimeoutError as error:
            if not deadline.expired():
                raise
            raise RequestRefused(504, "deadline", f"no answer within {self._deadline_s:g} s (engine.call_timeout_s)") from error


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
