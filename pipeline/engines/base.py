"""What turns tokens into tokens. An engine answers with what it did: token ids, logprobs and the weight version used.

Invariant: one call is served by one weight version, and the reply names it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np

from pipeline.pickling import by_fields
from pipeline.records import Sampling

Signal = Literal["sampled", "topk", "full"]


@by_fields
@dataclass(frozen=True, slots=True)
class GenerateRequest:
    request_id: str
    """Echoed in the completion; a sample's id and turn for training, anything unique elsewhere."""
    prompt: np.ndarray
    """int32 [P], P >= 1."""
    sampling: Sampling
    seed: int
    """The same (weights, prompt, sampling, seed) give the same tokens, whatever shares the batch."""


@by_fields
@dataclass(frozen=True, slots=True)
class Completion:
    request_id: str
    token_ids: np.ndarray
    """int32 [N], the end-of-sequence token included when it was sampled. N may be 0."""
    logprobs: np.ndarray
    """float32 [N], of the distribution that was sampled from (temperature and cuts applied).

    At temperature 0 (greedy): of the untempered distribution.
    """
    finish_reason: Literal["stop", "length"]
    weight_version: int


@dataclass(frozen=True, slots=True)
class ScoreRow:
    row_id: str
    token_ids: np.ndarray
    """int32 [T]."""
    start: int
    """Score tokens start..T-1, start >= 1; the earlier ones are context."""


@dataclass(frozen=True, slots=True)
class ScoredRow:
    row_id: str
    logprobs: np.ndarray
    """float32 [T - start]: log p(token_ids[t] | token_ids[:t]) at temperature 1, for t = start..T-1."""
    topk_ids: np.ndarray | None = None
    """int32 [T - start, K], most likely first."""
    topk_logprobs: np.ndarray | None = None
    """float32 [T - start, K]."""
    full_logprobs: np.ndarray | None = None
    """float32 [T - start, V]."""


@by_fields
@dataclass(frozen=True, slots=True)
class Piece:
    """What one sequence of a stream has said since its last piece."""

    request_id: str
    start: int
    """Tokens before these. 0 again: the engine began the sequence anew."""
    token_ids: np.ndarray
    """int32 [N]; N is 0 only when the sequence ends without a token."""
    scores: ScoredRow | None
    """Of these tokens, when log-probabilities were asked for."""
    finish_reason: Literal["stop", "length"] | None
    """None: there is more to come."""
    weight_version: int


@by_fields
@dataclass(frozen=True, slots=True)
class Version:
    """Which weights a call wants: at least `minimum`, or exactly `exact`."""

    minimum: int = 0
    exact: int | None = None


@dataclass(frozen=True, slots=True)
class EngineInfo:
    kind: str
    model: str
    digest: str
    """Digest of the weights and of what else changes a score."""
    vocab_size: int
    """Rows of the output matrix: padding included."""
    tokenizer_digest: str
    weight_version: int
    max_context: int
    slots: int
    active: int
    waiting: int
    generated_tokens: int
    scored_rows: int
    streams: bool = False
    """It is a StreamingEngine."""
    streams_logprobs: bool = False
    """Its streams can have log-probabilities."""


class Engine(Protocol):
    """Implemented by every engine, by Serve handles of engines, and by fakes."""

    async def info(self) -> EngineInfo: ...

    async def generate(self, requests: list[GenerateRequest], version: Version) -> list[Completion]:
        """One completion a request, in the order of the requests.

        Raises SwapTimeout when the wanted version is not served in time, EngineError for other faults, RowRefused for a
        prompt that leaves no room in the context.
        """
        ...

    async def score(self, rows: list[ScoreRow], signal: Signal, top_k: int) -> list[ScoredRow]:
        """Raises RowRefused, naming the row, for a row that is too long or holds a foreign token id."""
        ...

    async def close(self) -> None: ...


class StreamingEngine(Engine, Protocol):
    """An engine that says each token when it is made."""

    def stream(self, requests: list[GenerateRequest], version: Version, top_logprobs: int | None) -> AsyncIterator[list[Piece]]:
        """The pieces of all requests as they come; the last piece of each has a finish_reason. Raises what `generate` raises.

        top_logprobs: how many of the likeliest tokens are told at each place; None: no log-probabilities. To close the stream ends
        the work.
        """
        ...
