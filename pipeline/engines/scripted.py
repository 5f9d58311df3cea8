"""An engine that plays a script: fixed token streams, delays and failures by ordinal, so that every fault has a configuration.

Invariant: the same request gives the same tokens, and time passes only in the event loop's own sleep (a virtual clock owns it).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from math import log
from pathlib import Path
from typing import Literal

import numpy as np

from pipeline import errors
from pipeline.config.models import Engine as EngineSettings
from pipeline.config.models import Script
from pipeline.engines.base import Completion, EngineInfo, GenerateRequest, Piece, ScoredRow, ScoreRow, Signal, Version
from pipeline.engines.digests import text_digest
from pipeline.engines.fixed_cost import MAX_CONTEXT, flat_scores
from pipeline.engines.renderer import ChatRenderer
from pipeline.engines.streaming import heard
from pipeline.engines.weights import WeightStore
from pipeline.errors import ConfigError, RolloutError, SwapTimeout

FIRST_TOKEN = 5
"""Lower ids are special tokens of the run's tokenizer."""
EOS_TOKEN = 2
POLL_S = 0.02
HANG = "hang"
Faults = Mapping[int | None, type[RolloutError] | str]
"""Of a call: by ordinal, an exception, or HANG."""


class ScriptedEngine:
    """Implements engines.base.StreamingEngine. The ordinal is the first part of a request id (`<ordinal>.<index>.<turn>`).

    weights: when given, versions are real: a call names the newest published one and waits for the one it wants. folder:
    where the run's tokenizer is; without one the newest published folder's is taken, if it has one. version: what is served
    without `weights`.
    """

    def __init__(
        self, settings: EngineSettings, weights: WeightStore | None = None, folder: Path | None = None, version: int = 0
    ) -> None:
        self._settings, self._weights, self._version = settings, weights, version
        self._script = settings.script or Script()
        self._faults = {o: _fault("fail_by_ordinal", name) for o, name in self._script.fail_by_ordinal.items()}
        self._first_faults = {o: _fault("fail_once_by_ordinal", name) for o, name in self._script.fail_once_by_ordinal.items()}
        renderer = _renderer(folder, weights)
        self._eos = EOS_TOKEN if renderer is None else renderer.eos_token_id
        self._vocab_size = self._script.vocab_size if renderer is None else renderer.vocab_size
        self._tokenizer_digest = "" if renderer is None else renderer.digest
        self._slots = asyncio.Semaphore(settings.slots)
        self._active = self._waiting = self._generated_tokens = self._scored_rows = 0

    async def info(self) -> EngineInfo:
        served = self._served()
        return EngineInfo(
            kind="scripted",
            model="scripted",
            digest=text_digest(["scripted", self._vocab_size]),
            vocab_size=self._vocab_size,
            tokenizer_digest=self._tokenizer_digest,
            weight_version=-1 if served is None else served,
            max_context=self._settings.max_context or MAX_CONTEXT,
            slots=self._settings.slots,
            active=self._active,
            waiting=self._waiting,
            generated_tokens=self._generated_tokens,
            scored_rows=self._scored_rows,
            streams=True,
            streams_logprobs=True,
        )

    async def generate(self, requests: list[GenerateRequest], version: Version) -> list[Completion]:
        return await self._generate(requests, version, self._play)

    def stream(self, requests: list[GenerateRequest], version: Version, top_logprobs: int | None) -> AsyncIterator[list[Piece]]:
        """The script's seconds pass token by token."""
        pieces: asyncio.Queue[list[Piece] | None] = asyncio.Queue()

        async def play(request: GenerateRequest, served: int, faults: Faults) -> Completion:
            return await self._play(request, served, faults, lambda piece: pieces.put_nowait([piece]), top_logprobs)

        return heard(lambda: self._generate(requests, version, play), pieces)

    async def _generate(
        self, requests: list[GenerateRequest], version: Version, play: Callable[..., Awaitable[Completion]]
    ) -> list[Completion]:
        served = await self._wait_for(version)
        ordinals = {_ordinal(request) for request in requests}
        # Taken before the first await: of two calls with one ordinal, only one is the first attempt.
        faults = {o: fault for o in ordinals if (fault := self._first_faults.pop(o, None) or self._faults.get(o))}
        results = await asyncio.gather(*(play(request, served, faults) for request in requests), return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return results

    async def score(self, rows: list[ScoreRow], signal: Signal = "sampled", top_k: int = 0) -> list[ScoredRow]:
        scored = flat_scores(rows, signal, top_k, self._vocab_size, -log(self._vocab_size))
        self._scored_rows += len(rows)
        return scored

    async def close(self) -> None:
        """Nothing to end."""

    async def _play(
        self,
        request: GenerateRequest,
        version: int,
        faults: Faults,
        tell: Callable[[Piece], None] | None = None,
        top_logprobs: int | None = None,
    ) -> Completion:
        ordinal = _ordinal(request)
        said = self._completion(request, ordinal, version)
        pieces = self._pieces(said, top_logprobs) if tell is not None else []
        seconds = self._script.seconds_by_ordinal.get(ordinal, self._script.seconds)
        self._waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._waiting -= 1
        self._active += 1
        try:
            for piece in pieces[:-1]:
                await asyncio.sleep(seconds / len(pieces))
                tell(piece)
            await asyncio.sleep(seconds / max(1, len(pieces)))
            fault = faults.get(ordinal)
            if fault == HANG:
                await asyncio.Event().wait()
            if fault is not None:
                raise fault(f"scripted fault of ordinal {ordinal}")
        finally:
            self._active -= 1
            self._slots.release()
        for piece in pieces[-1:]:
            tell(piece)
        self._generated_tokens += len(said.token_ids)
        return said

    def _pieces(self, said: Completion, top_logprobs: int | None) -> list[Piece]:
        """A token each; one without a token when nothing is said."""
        ends = range(1, len(said.token_ids) + 1) or (0,)
        return [self._piece(said, end, said.finish_reason if end == ends[-1] else None, top_logprobs) for end in ends]

    def _piece(self, said: Completion, end: int, reason: Literal["stop", "length"] | None, top_logprobs: int | None) -> Piece:
        start = max(0, end - 1)
        tokens, scores = said.token_ids[start:end], None
        if top_logprobs is not None and end:
            row = ScoreRow(said.request_id, said.token_ids[[start, start]], 1)  # what stands before a token changes nothing here
            signal: Signal = "topk" if top_logprobs else "sampled"
            (scores,) = flat_scores([row], signal, top_logprobs, self._vocab_size, -log(self._vocab_size))
        return Piece(said.request_id, start, tokens, scores, reason, said.weight_version)

    def _completion(self, request: GenerateRequest, ordinal: int | None, version: int) -> Completion:
        """`tokens` tokens, the last of them the end of sequence, unless max_tokens cuts them off."""
        length = self._script.tokens_by_ordinal.get(ordinal, self._script.tokens)
        said = min(length, request.sampling.max_tokens)
        offset = int(np.random.SeedSequence(request.seed).generate_state(1)[0])
        tokens = FIRST_TOKEN + (offset + np.arange(said)) % max(1, self._vocab_size - FIRST_TOKEN)
        stopped = said == length
        if stopped and said:
            tokens[-1] = self._eos
        return Completion(
            request_id=request.request_id,
            token_ids=np.minimum(tokens, self._vocab_size - 1).astype(np.int32),
            logprobs=np.full(said, -log(self._vocab_size), np.float32),
            finish_reason="stop" if stopped else "length",
            weight_version=version,
        )

    def _served(self) -> int | None:
        if self._weights is None:
            return self._version
        newest = self._weights.latest()
        return None if newest is None else newest.version

    async def _wait_for(self, version: Version) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._settings.swap_timeout_s
        while True:
            served = self._served()
            if served is not None and served >= version.minimum and version.exact in (None, served):
                return served
            passed = version.exact is not None and served is not None and served > version.exact
            if passed or loop.time() >= deadline:
                wanted = f"exactly {version.exact}" if version.exact is not None else f"at least {version.minimum}"
                raise SwapTimeout(
                    f"the scripted engine was asked for version {wanted} and serves {served} "
                    f"(engine.swap_timeout_s {self._settings.swap_timeout_s})"
                )
            await asyncio.sleep(POLL_S)


def _ordinal(request: GenerateRequest) -> int | None:
    first = request.request_id.split(".", 1)[0]
    return int(first) if first.isdigit() else None


def _fault(key: str, name: str) -> type[RolloutError] | str:
    if name == HANG:
        return HANG
    kind = getattr(errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, RolloutError)) or issubclass(kind, errors.StageFailed):
        raise ConfigError(
            f"engine.script.{key}: {name!r} is neither {HANG!r} nor an exception of the pipeline that a call can raise"
        )
    return kind


def _renderer(folder: Path | None, weights: WeightStore | None) -> ChatRenderer | None:
    if folder is None and weights is not None and (newest := weights.latest()) is not None:
        folder = newest.path
    return ChatRenderer.load(folder) if folder is not None and (folder / "tokenizer.json").is_file() else None
