"""What every engine refuses before it works, and what it makes of logprobs that a server gave. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from math import log, log1p
from pathlib import Path

import numpy as np

from pipeline.engines.base import Completion, GenerateRequest, ScoredRow, ScoreRow, Signal
from pipeline.errors import BadReply, ConfigError, EngineError, RowRefused

FULL_ROWS = 8192
"""Largest vocabulary whose whole distribution travels as JSON."""
TOLERANCE = 1e-3
"""Above 0, a logprob is no rounding any more."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of one model. vocab_size: rows of the output matrix, padding included."""

    vocab_size: int
    max_context: int

    @classmethod
    def of(cls, folder: Path, max_context: int | None) -> Bounds:
        """By the folder's config.json. Raises ConfigError for a context that the model does not have."""
        config = json.loads((folder / "config.json").read_text())
        bound = config["max_position_embeddings"]
        if max_context is not None and max_context > bound:
            raise ConfigError(f"engine.max_context {max_context} is above the model's own bound {bound} ({folder.name})")
        return cls(config["vocab_size"], max_context or bound)

    def check_request(self, request: GenerateRequest) -> None:
        self._check_tokens(request.request_id, request.prompt, self.max_context - 1)
        if request.sampling.max_tokens < 1:
            raise RowRefused(f"row {request.request_id}: max_tokens {request.sampling.max_tokens} is below 1")

    def check_row(self, row: ScoreRow) -> None:
        self._check_tokens(row.row_id, row.token_ids, self.max_context)
        if not 1 <= row.start <= len(row.token_ids):
            raise RowRefused(f"row {row.row_id}: start {row.start} is outside 1..{len(row.token_ids)}")

    def room(self, request: GenerateRequest) -> int:
        """Tokens that may be said: the request's own bound, or the context's."""
        return min(request.sampling.max_tokens, self.max_context - len(request.prompt))

    def wanted(self, signal: Signal, top_k: int) -> int:
        """How many of the likeliest tokens a server is asked for. Raises EngineError."""
        if signal == "topk" and top_k < 1:
            raise EngineError(f"signal topk needs top_k >= 1, got {top_k}")
        if signal == "full" and self.vocab_size > FULL_ROWS:
            raise EngineError(
                f"signal full of {self.vocab_size} rows is too wide for a server (bound {FULL_ROWS}): use algorithm.opd.signal topk"
            )
        return {"sampled": 0, "topk": min(top_k, self.vocab_size), "full": self.vocab_size}[signal]

    def completion(
        self, request: GenerateRequest, token_ids: list[int], logprobs: list[float], stops: frozenset[int], version: int
    ) -> Completion:
        """Raises BadReply when that cannot be what was said."""
        tokens, values = np.asarray(token_ids, np.int32), np.asarray(logprobs, np.float32)
        if len(tokens) != len(values) or not 1 <= len(tokens) <= self.room(request):
            raise BadReply(
                f"{request.request_id}: {len(tokens)} tokens and {len(values)} logprobs, asked for 1..{self.room(request)} tokens"
            )
        self._check_reply(request.request_id, tokens, values)
        stopped = int(tokens[-1]) in stops
        if not stopped and len(tokens) < self.room(request):
            raise BadReply(f"{request.request_id}: ended after {len(tokens)} of {self.room(request)} tokens without a stop token")
        return Completion(request.request_id, tokens, values, "stop" if stopped else "length", version)

    def scored(
        self,
        row: ScoreRow,
        signal: Signal,
        wanted: int,
        logprobs: list[float],
        topk_ids: list[list[int]],
        topk_logprobs: list[list[float]],
        smoothing: float,
    ) -> ScoredRow:
        """Raises BadReply when a position has not what was asked for."""
        count = len(row.token_ids) - row.start
        values = _smoothed(np.asarray(logprobs, np.float32).reshape(-1), smoothing, self.vocab_size)
        if len(values) != count:
            raise BadReply(f"row {row.row_id}: {len(values)} logprobs for {count} tokens")
        self._check_reply(row.row_id, row.token_ids[row.start :], values)
        if signal == "sampled":
            return ScoredRow(row.row_id, values)
        short = [index for index in range(count) if not len(topk_ids[index]) == len(topk_logprobs[index]) == wanted]
        if short or len(topk_ids) != count:
            raise BadReply(f"row {row.row_id}: not {wanted} likely tokens at positions {short[:3]} of {count}")
        ids = np.asarray(topk_ids, np.int32).reshape(count, wanted)
        best = np.asarray(topk_logprobs, np.float32).reshape(count, wanted)
        best = _smoothed(best, smoothing, self.vocab_size)
        self._check_reply(row.row_id, ids, best)
        if signal == "topk":
            return ScoredRow(row.row_id, values, topk_ids=ids, topk_logprobs=best)
        full = np.full((count, self.vocab_size), np.nan, np.float32)
        np.put_along_axis(full, ids.astype(np.int64), best, axis=1)
        if np.isnan(full).any():
            raise BadReply(f"row {row.row_id}: the full distribution names a token twice")
        return ScoredRow(row.row_id, values, full_logprobs=full)

    def _check_tokens(self, name: str, token_ids: np.ndarray, most: int) -> None:
        if not 1 <= len(token_ids) <= most:
            raise RowRefused(f"row {name}: {len(token_ids)} tokens are outside 1..{most} (engine.max_context {self.max_context})")
        if token_ids.min() < 0 or token_ids.max() >= self.vocab_size:
            raise RowRefused(
                f"row {name}: token ids {token_ids.min()}..{token_ids.max()} outside the vocabulary of {self.vocab_size}"
            )

    def _check_reply(self, name: str, tokens: np.ndarray, logprobs: np.ndarray) -> None:
        if tokens.size and not (0 <= tokens.min() and tokens.max() < self.vocab_size):
            raise BadReply(f"{name}: token ids {tokens.min()}..{tokens.max()} outside the vocabulary of {self.vocab_size}")
        if np.isnan(logprobs).any() or (logprobs > TOLERANCE).any():
            raise BadReply(f"{name}: logprobs that are none: {logprobs[np.isnan(logprobs) | (logprobs > TOLERANCE)][:3]}")


def _smoothed(logprobs: np.ndarray, smoothing: float, vocab_size: int) -> np.ndarray:
    """log((1 - s) p + s / V)."""
    if smoothing == 0:
        return logprobs
    return np.logaddexp(logprobs + log1p(-smoothing), log(smoothing) - log(vocab_size)).astype(np.float32)
