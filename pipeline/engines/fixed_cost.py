"""A teacher of stated cost: every token gets the same logprob, after a stated time. For tests, demos and benchmarks."""

from __future__ import annotations

import asyncio
from math import log
from pathlib import Path

import numpy as np

from pipeline.config.models import Teacher
from pipeline.engines.base import Completion, EngineInfo, GenerateRequest, ScoredRow, ScoreRow, Signal, Version
from pipeline.engines.digests import text_digest
from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import EngineError, RowRefused

MAX_CONTEXT = 1 << 20


class FixedCostTeacher:
    """Implements engines.base.Engine for scoring. One call at a time; a call takes fixed_cost_s + rows * row_cost_s.

    folder: where the run's tokenizer is; without one the teacher reads any (an empty tokenizer digest). Time is the event
    loop's, so that a virtual clock owns it.
    """

    def __init__(self, settings: Teacher, folder: Path | None = None, *, vocab_size: int = 64, logprob: float = -1.0) -> None:
        renderer = ChatRenderer.load(folder) if folder is not None else None
        self._settings, self._logprob = settings, logprob
        self._vocab_size = vocab_size if renderer is None else renderer.vocab_size
        self._tokenizer_digest = "" if renderer is None else renderer.digest
        self._one_call = asyncio.Lock()
        self._waiting = 0
        self._scored_rows = 0

    async def info(self) -> EngineInfo:
        return EngineInfo(
            kind="fixed_cost",
            model="fixed_cost",
            digest=text_digest(["fixed_cost", self._logprob, self._vocab_size]),
            vocab_size=self._vocab_size,
            tokenizer_digest=self._tokenizer_digest,
            weight_version=0,
            max_context=MAX_CONTEXT,
            slots=1,
            active=int(self._one_call.locked()),
            waiting=self._waiting,
            generated_tokens=0,
            scored_rows=self._scored_rows,
        )

    async def generate(self, requests: list[GenerateRequest], version: Version) -> list[Completion]:
        raise EngineError("a fixed_cost teacher scores and does not generate")

    async def score(self, rows: list[ScoreRow], signal: Signal = "sampled", top_k: int = 0) -> list[ScoredRow]:
        scored = flat_scores(rows, signal, top_k, self._vocab_size, self._logprob)
        self._waiting += 1
        try:
            await self._one_call.acquire()
        finally:
            self._waiting -= 1
        try:
            await asyncio.sleep(self._settings.fixed_cost_s + len(rows) * self._settings.row_cost_s)
        finally:
            self._one_call.release()
        self._scored_rows += len(rows)
        return scored

    async def close(self) -> None:
        """Nothing to end."""


def flat_scores(rows: list[ScoreRow], signal: Signal, top_k: int, vocab_size: int, logprob: float) -> list[ScoredRow]:
    """`logprob` for every given token; top-k and full signals are of the uniform distribution. Raises RowRefused."""
    return [_flat_row(row, signal, min(top_k, vocab_size), vocab_size, logprob) for row in rows]


def _flat_row(row: ScoreRow, signal: Signal, top_k: int, vocab_size: int, logprob: float) -> ScoredRow:
    if not 1 <= row.start <= len(row.token_ids):
        raise RowRefused(f"row {row.row_id}: start {row.start} is outside 1..{len(row.token_ids)}")
    if row.token_ids.min() < 0 or row.token_ids.max() >= vocab_size:
        raise RowRefused(
            f"row {row.row_id}: token ids {row.token_ids.min()}..{row.token_ids.max()} outside the vocabulary of {vocab_size}"
        )
    count = len(row.token_ids) - row.start
    logprobs = np.full(count, logprob, np.float32)
    if signal == "topk":
        ids = np.tile(np.arange(top_k, dtype=np.int32), (count, 1))
        return ScoredRow(row.row_id, logprobs, ids, np.full((count, top_k), -log(vocab_size), np.float32))
    if signal == "full":
        return ScoredRow(row.row_id, logprobs, full_logprobs=np.full((count, vocab_size), -log(vocab_size), np.float32))
    return ScoredRow(row.row_id, logprobs)
