"""Answers while they are made: the tokens of a stream to text, and what a stream does when its engine is lost.

Invariant: the parts of a choice, joined, are what the whole reply says of it, and all are made by one weight version.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from pipeline.engines.base import Piece, StreamingEngine, Version
from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import EngineUnavailable, SwapTimeout
from pipeline.service.completing import ATTEMPTS, BACKOFF_S, Answer, Ask, Made, logprobs_of
from pipeline.service.stops import cut_at, settled


@dataclass(frozen=True, slots=True)
class Part:
    """What one choice has said since its last part."""

    index: int
    """Of the choice, over all prompts."""
    made: Made
    """Its finish_reason is None until the last part."""


@dataclass(frozen=True, slots=True)
class Parts:
    parts: list[Part]
    weight_version: int


def whole(answer: Answer) -> Parts:
    """An answer as a stream of one part a choice."""
    choices = [made for choices in answer.choices for made in choices]
    return Parts([Part(index, made) for index, made in enumerate(choices)], answer.weight_version)


class Choice:
    """One choice of a stream: token by token, the text that whatever follows will not change."""

    def __init__(self, stops: Sequence[str], decode: Callable[[Sequence[int]], str]) -> None:
        self._stops, self._decode = stops, decode
        self._told = ""
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None

    def say(self, token_ids: list[int], ended: str | None) -> str:
        """The text that these tokens settle. ended: why the engine ends behind them; None: it goes on."""
        self.token_ids += token_ids
        text, _, stopped = cut_at(self.token_ids, self._stops, self._decode)
        self.finish_reason = "stop" if stopped else ended
        shown = text if self.finish_reason is not None else settled(text, self._stops)
        fresh = shown[len(self._told) :]
        self._told += fresh
        return fresh


class Streaming:
    """sleep: before a lost stream is begun anew."""

    def __init__(
        self, engine: StreamingEngine, renderer: ChatRenderer, ask: Ask, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    ) -> None:
        self._engine, self._renderer, self._ask, self._sleep = engine, renderer, ask, sleep
        self._requests = ask.requests()
        self._choices = {request.request_id: Choice(ask.stops, renderer.decode) for request in self._requests}
        self._indices = {request.request_id: index for index, request in enumerate(self._requests)}
        self._version: int | None = None

    async def parts(self) -> AsyncIterator[Parts]:
        """A part a token. Ends, and frees the engine, when every choice has ended; until then one that has reached a stop is made
        on for nothing. Raises as `Completing.answer`, and SwapTimeout when the weights were replaced meanwhile.

        The same seeds and weights make the same tokens, so that a stream that a dying replica lost goes on where it was.
        """
        for attempt in range(1, ATTEMPTS + 1):
            wanted = Version() if self._version is None else Version(self._version, self._version)
            try:
                async with aclosing(self._engine.stream(self._requests, wanted, self._ask.top_logprobs)) as stream:
                    async for pieces in stream:
                        found = [part for piece in pieces for part in self._parts(piece)]
                        if found:
                            yield Parts(found, self._version)
                        if self.ended:
                            return
            except EngineUnavailable:
                if attempt == ATTEMPTS:
                    raise
                await self._sleep(BACKOFF_S * 2 ** (attempt - 1))
            else:
                raise EngineUnavailable("the stream ended before its choices")

    @property
    def ended(self) -> bool:
        return all(choice.finish_reason is not None for choice in self._choices.values())

    def _parts(self, piece: Piece) -> list[Part]:
        if self._version not in (None, piece.weight_version):
            raise SwapTimeout(f"the weights were replaced in a stream: {piece.weight_version} instead of {self._version}")
        self._version = piece.weight_version
        choice, parts = self._choices[piece.request_id], []
        known = len(choice.token_ids) - piece.start
        tokens = [int(token) for token in piece.token_ids]
        if known > 0 and choice.token_ids[piece.start :][: len(tokens)] != tokens[:known]:
            raise EngineUnavailable("a stream that was begun anew has other tokens")
        for place in range(max(0, known), len(tokens)) or ([] if tokens else [0]):
            if choice.finish_reason is not None:
                break
            fresh = tokens[place : place + 1]
            text = choice.say(fresh, piece.finish_reason if place + 1 >= len(tokens) else None)
            logprobs = None
            if self._ask.top_logprobs is not None:
                logprobs = logprobs_of(self._renderer, fresh, piece.scores, place, self._ask.top_logprobs)
            parts.append(Part(self._indices[piece.request_id], Made(text, fresh, choice.finish_reason, logprobs, None)))
        return parts
