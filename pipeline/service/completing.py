"""Answers completion requests with an engine: prompts to tokens, one call for all choices, tokens to text and log-probabilities.

Invariant: every token of a reply was made, and every log-probability of it computed, by one weight version, which the reply names.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.engines.base import Completion, Engine, GenerateRequest, ScoredRow, ScoreRow, Version
from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import EngineUnavailable, RequestRefused
from pipeline.records import Sampling
from pipeline.service.stops import cut_at

ATTEMPTS = 4
"""Of one call that a dying replica lost; the deadline of the request bounds them all."""
BACKOFF_S = 0.3
VERSION_TRIES = 4
"""Of a request whose weights were replaced between generating and scoring."""


@dataclass(frozen=True, slots=True)
class Made:
    """One choice."""

    text: str
    token_ids: list[int]
    """Of the text: what stood behind a stop is not there."""
    finish_reason: str | None
    """None: in a stream, there is more to come."""
    logprobs: TokenLogprobs | None
    prompt_logprobs: TokenLogprobs | None
    """With echo and logprobs."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """At temperature 1. The first token of a sequence has none: nothing stands before it."""

    tokens: list[str]
    logprobs: list[float | None]
    top: list[list[tuple[str, float]] | None]
    """At each place, the likeliest tokens first."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of the engine for one HTTP request."""

    prompts: list[np.ndarray]
    sampling: Sampling
    n: int
    seed: int
    stops: Sequence[str] = ()
    top_logprobs: int | None = None
    """None: no log-probabilities."""
    echo: bool = False

    def requests(self) -> list[GenerateRequest]:
        """Of each choice, prompt by prompt."""
        return [
            GenerateRequest(f"{place}.{choice}", prompt, self.sampling, choice_seed(self.seed, place, choice))
            for place, prompt in enumerate(self.prompts)
            for choice in range(self.n)
        ]


@dataclass(frozen=True, slots=True)
class Answer:
    choices: list[list[Made]]
    """By prompt."""
    weight_version: int


class Completing:
    """sleep: between the attempts of a lost call."""

    def __init__(self, engine: Engine, renderer: ChatRenderer, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._engine, self._renderer, self._sleep = engine, renderer, sleep

    async def answer(self, ask: Ask) -> Answer:
        """Raises RequestRefused, or the engine's own error once the attempts are used up."""
        for _ in range(VERSION_TRIES):
            completions, version = await self._generate(ask)
            if ask.top_logprobs is None:
                if version is None:
                    version = (await self._again(self._engine.info)).weight_version
                return Answer(self._made(ask, completions, None), version)
            rows, before, after = await self._score(ask, completions)
            if before == after and version in (None, before):
                return Answer(self._made(ask, completions, rows), before)
        raise EngineUnavailable(f"the weights were replaced {VERSION_TRIES} times while the request was answered")

    async def _generate(self, ask: Ask) -> tuple[list[list[Completion]] | None, int | None]:
        """Completions by prompt; None when nothing is to be made."""
        if ask.sampling.max_tokens == 0:
            return None, None
        requests = ask.requests()
        completions = await self._again(lambda: self._engine.generate(requests, Version()))
        grouped = [completions[start : start + ask.n] for start in range(0, len(completions), ask.n)]
        return grouped, completions[0].weight_version

    async def _score(self, ask: Ask, completions: list[list[Completion]] | None) -> tuple[list[ScoredRow | None], int, int]:
        """Scores of every choice (of every prompt when nothing was made), and the version before and after."""
        rows, lengths = [], []
        for place, prompt in enumerate(ask.prompts):
            for choice in range(ask.n):
                made = completions[place][choice].token_ids if completions else []
                tokens = np.concatenate([prompt, np.asarray(made, np.int32)])
                lengths.append(len(tokens))
                rows.append(ScoreRow(f"{place}.{choice}", tokens, 1 if ask.echo else len(prompt)))
        wanted = [row for row in rows if row.start < len(row.token_ids)]
        top = ask.top_logprobs or 0
        before = (await self._again(self._engine.info)).weight_version
        scored = await self._again(lambda: self._engine.score(wanted, "topk" if top else "sampled", top)) if wanted else []
        after = (await self._again(self._engine.info)).weight_version
        by_id = {row.row_id: row for row in scored}
        return [by_id.get(row.row_id) for row in rows], before, after

    def _made(self, ask: Ask, completions: list[list[Completion]] | None, rows: list[ScoredRow | None] | None) -> list[list[Made]]:
        choices = []
        for place, prompt in enumerate(ask.prompts):
            found = []
            for choice in range(ask.n):
                completion = completions[place][choice] if completions else None
                row = rows[place * ask.n + choice] if rows is not None else None
                found.append(self._choice(ask, prompt, completion, row))
            choices.append(found)
        return choices

    def _choice(self, ask: Ask, prompt: np.ndarray, completion: Completion | None, row: ScoredRow | None) -> Made:
        token_ids = [int(token) for token in completion.token_ids] if completion is not None else []
        text, count, stopped = cut_at(token_ids, ask.stops, self._renderer.decode)
        reason = "stop" if stopped or (completion is not None and completion.finish_reason == "stop") else "length"
        token_ids = token_ids[:count]
        if ask.top_logprobs is None:
            return Made(text, token_ids, reason, None, None)
        skipped = len(prompt) - 1 if ask.echo else 0
        logprobs = logprobs_of(self._renderer, token_ids, row, skipped, ask.top_logprobs)
        before = self._prompt_logprobs(prompt, row, ask.top_logprobs) if ask.echo else None
        return Made(text, token_ids, reason, logprobs, before)

    def _prompt_logprobs(self, prompt: np.ndarray, row: ScoredRow | None, top: int) -> TokenLogprobs:
        ids = [int(token) for token in prompt]
        rest = logprobs_of(self._renderer, ids[1:], row, 0, top)
        first = self._renderer.token_text(ids[0])
        return TokenLogprobs([first, *rest.tokens], [None, *rest.logprobs], [None, *rest.top])

    async def _again(self, call: Callable[[], Awaitable]):
        """A call that was in flight in a dying replica is lost, not failed: the same seeds make the same tokens."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                return await call()
            except EngineUnavailable:
                if attempt == ATTEMPTS:
                    raise
                await self._sleep(BACKOFF_S * 2 ** (attempt - 1))
        raise AssertionError("ATTEMPTS is at least 1")


def logprobs_of(renderer: ChatRenderer, token_ids: list[int], row: ScoredRow | None, start: int, top: int) -> TokenLogprobs:
    """row: scores from `start` on belong to the tokens."""
    tokens = [renderer.token_text(token) for token in token_ids]
    if row is None:
        return TokenLogprobs(tokens, [], [])
    values = [float(value) for value in row.logprobs[start : start + len(tokens)]]
    tops: list[list[tuple[str, float]] | None] = [None] * len(tokens)
    if top and row.topk_ids is not None and row.topk_logprobs is not None:
        for place in range(len(tokens)):
            ids, at = row.topk_ids[start + place], row.topk_logprobs[start + place]
            best = [(renderer.token_text(token), float(value)) for token, value in zip(ids, at, strict=True)]
            tops[place] = best
    return TokenLogprobs(tokens, values, tops)


def choice_seed(seed: int, place: int, choice: int) -> int:
    """The seed itself for the first choice of the first prompt; others are derived from it."""
    if place == choice == 0:
        return seed
    return int(np.random.SeedSequence([seed, place, choice]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def check_room(tokens: int, wanted: int, max_context: int, param: str, *, at_least: bool = False) -> None:
    """Raises RequestRefused for a prompt that the engine would refuse, with OpenAI's own code and first words for a long one.
    at_least: so many, because the text is not yet tokenized: what is megabytes long never is."""
    if tokens == 0:
        raise RequestRefused(400, "empty_prompt", "the prompt has no tokens", param)
    if tokens + min(wanted, 1) > max_context:
        has = f"has at least {tokens}" if at_least else f"has {tokens}"
        message = f"This model's maximum context length is {max_context} tokens; the prompt {has}: no room for an answer"
        raise RequestRefused(400, "context_length_exceeded", message, param)
