"""An engine whose answers and scores can be said beforehand."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.engines.base import Completion, EngineInfo, ScoredRow
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

    def _version(self) -> int:
        if self.faults:
            raise self.faults.pop(0)
        return self.versions.pop(0) if len(self.versions) > 1 else self.versions[0]

    async def info(self) -> EngineInfo:
        digest = self.renderer.digest
        return EngineInfo("reverser", "r", "d", self.renderer.vocab_size, digest, self._version(), self.context, 8, 0, 0, 0, 0)

    async def generate(self, requests, version):
        made = self._version()
        self.requests += requests
        return [self._completion(request, made) for request in requests]

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
