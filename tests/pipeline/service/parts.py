"""An engine whose answers and scores can be said beforehand."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.engines.base import Completion, EngineInfo, Piece, ScoredRow, ScoreRow
from pipeline.engines.renderer import ChatRenderer
from pipeline.trainer.tokenizer import build_tokenizer

LETTERS = "abcdefghijklmnopqrstuvwxyz \n"
CONTEXT = 24


def letters_folder(folder: Path) -> Path:
    """A tokenizer with one token a letter."""
    build_tokenizer([((("user", LETTERS),), LETTERS)], folder)
    return folder


@dataclass
class Reverser:
    """Says the prompt backward. Token t is worth -t/100; the likeliest anywhere are tokens 5, 6, 7, ...

    faults: raised one a call, first first. versions: of the calls, one each; the last one stays.
    """

    renderer: ChatRenderer
    faults: list[BaseException] = field(default_factory=list)
    versions: list[int] = field(default_factory=lambda: [3])
    requests: list[Any] = field(default_factory=list)
    context: int = CONTEXT
    streams: bool = True
    said: asyncio.Semaphore | None = None
    """Of a stream: how many tokens of each sequence may be said by now; None: all."""
    breaks: list[BaseException] = field(default_factory=list)
    """Raised behind the second tokens of a stream, one a stream, first first."""
    streaming: int = 0

    def _version(self) -> int:
        if self.faults:
            raise self.faults.pop(0)
        return self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]

    async def info(self) -> EngineInfo:
        digest, version = self.renderer.digest, self._version()
        rows = self.renderer.vocab_size
        facts = ("reverser", "r", "d", rows, digest, version, self.context, 8, 0, 0, 0, 0)
        return EngineInfo(*facts, streams=self.streams, streams_logprobs=self.streams)

    async def generate(self, requests, version):
        made = self._version()
        self.requests += requests
        return [self._completion(request, made) for request in requests]

    async def stream(self, requests, version, top_logprobs):
        """A token of every sequence at the same moment."""
        made, breaks = self.versions[0], self.breaks.pop(0) if self.breaks else None
        whole = [self._completion(request, made) for request in requests]
        self.requests += requests
        self.streaming += 1
        try:
            for place in range(max(len(each.token_ids) for each in whole)):
                if self.said is not None:
                    await self.said.acquire()
                if breaks is not None and place == 2:
                    raise breaks
                yield [await self._piece(each, place, top_logprobs) for each in whole if place < len(each.token_ids)]
        finally:
            self.streaming -= 1

    async def _piece(self, whole, place, top_logprobs):
        tokens, scores = whole.token_ids[place : place + 1], None
        if top_logprobs is not None:
            row = ScoreRow(whole.request_id, np.append(tokens, tokens), 1)
            (scores,) = await self.score([row], "topk" if top_logprobs else "sampled", top_logprobs)
        reason = whole.finish_reason if place + 1 == len(whole.token_ids) else None
        return Piece(whole.request_id, place, tokens, scores, reason, whole.weight_version)

    def _completion(self, request, version):
        whole = np.append(request.prompt[::-1], self.renderer.eos_token_id).astype(np.int32)
        tokens = whole[: request.sampling.max_tokens]
        reason = "stop" if len(tokens) == len(whole) else "length"
        return Completion(request.request_id, tokens, np.full(len(tokens), -9.0, np.float32), reason, version)

    async def score(self, rows, signal, top_k):
        scored = []
        for row in rows:
            values = -row.token_ids[row.start :].astype(np.float32) / 100
            ids = np.tile(np.arange(5, 5 + top_k, dtype=np.int32), (len(values), 1)) if signal == "topk" else None
            at = -ids.astype(np.float32) / 100 if ids is not None else None
            scored.append(ScoredRow(row.row_id, values, ids, at))
        return scored

    async def close(self):
        pass
