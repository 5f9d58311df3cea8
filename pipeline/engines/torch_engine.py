"""The embedded engine: continuous batching of one transformers model in one thread, behind an asynchronous face.

Invariant: a call is served by one weight version. New weights are loaded only while no call is half done, and a call that
cannot be answered fails in bounded time with its cause; none waits for ever.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch

from pipeline.config.models import Engine as EngineSettings
from pipeline.engines.base import Completion, EngineInfo, GenerateRequest, Piece, ScoredRow, ScoreRow, Signal, Version
from pipeline.engines.batching import Batching, GenerateCall, StreamCall, settle
from pipeline.engines.digests import model_digest, text_digest
from pipeline.engines.renderer import ChatRenderer, stop_ids
from pipeline.engines.streaming import heard
from pipeline.engines.torch_model import TorchModel
from pipeline.engines.weights import Published, WeightStore
from pipeline.errors import ConfigError, EngineError, RolloutError, RowRefused, SwapTimeout

POLL_S = 0.02
"""How often an idle engine looks for a version that a call waits for."""


class ScoreCall:
    def __init__(self, rows: list[ScoreRow], signal: Signal, top_k: int, deadline: float) -> None:
        self.rows, self.signal, self.top_k, self.deadline = rows, signal, top_k, deadline
        self.future: Future[list[ScoredRow]] = Future()


class TorchEngine:
    """Implements engines.base.StreamingEngine.

    folder: the model in Hugging Face format. weights: where versions are published; then nothing is served before the first
    publication, and the newest one is loaded before the first call. Without `weights` the folder is served as `version`.
    """

    def __init__(
        self,
        folder: Path | None,
        weights: WeightStore | None,
        settings: EngineSettings,
        *,
        smoothing: float = 0.0,
        dtype: str = "float32",
        version: int = 0,
    ) -> None:
        newest = weights.latest() if weights is not None else None
        source = newest.path if newest is not None else folder
        if source is None:
            raise ConfigError("a torch engine needs a model folder, or a weight store with a published version")
        torch.set_num_threads(settings.threads)
        self._settings, self._weights, self._smoothing = settings, weights, smoothing
        self._name = folder.name if folder is not None else source.name
        self._renderer = ChatRenderer.load(source)
        self._model = TorchModel(source, settings.slots, settings.max_context, getattr(torch, dtype))
        self._loaded = Published(version, source) if weights is None else newest
        self._digest = model_digest(source)
        self._batching = Batching(self._model, settings.slots, stop_ids(source, self._renderer))
        self._waiting: list[GenerateCall] = []
        self._scores: list[ScoreCall] = []
        self._scored_rows = 0
        self._news = False
        self._closing = False
        self._death: BaseException | None = None
        self._wake = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=f"engine-{self._name}", daemon=True)
        self._thread.start()

    async def info(self) -> EngineInfo:
        """Raises EngineError, with the cause, once the engine is dead or closed."""
        self._check_alive()
        return EngineInfo(
            kind="torch",
            model=self._name,
            digest=text_digest([self._digest, self._smoothing]),
            vocab_size=self._model.vocab_size,
            tokenizer_digest=self._renderer.digest,
            weight_version=-1 if self._loaded is None else self._loaded.version,
            max_context=self._model.max_context,
            slots=self._settings.slots,
            active=self._batching.active,
            waiting=sum(len(call.requests) for call in self._waiting) + self._batching.unstarted,
            generated_tokens=self._batching.generated_tokens,
            scored_rows=self._scored_rows,
            streams=True,
            streams_logprobs=True,
        )

    async def generate(self, requests: list[GenerateRequest], version: Version) -> list[Completion]:
        self._check_requests(requests)
        call = GenerateCall(list(requests), version, time.monotonic() + self._settings.swap_timeout_s)
        return await self._submit(call, self._waiting)

    def stream(self, requests: list[GenerateRequest], version: Version, top_logprobs: int | None) -> AsyncIterator[list[Piece]]:
        self._check_requests(requests)
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue()
        deadline = time.monotonic() + self._settings.swap_timeout_s

        def tell(found: list[Piece]) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, found)

        call = StreamCall(list(requests), version, deadline, top_logprobs, tell)
        return heard(lambda: self._submit(call, self._waiting), pieces)

    async def score(self, rows: list[ScoreRow], signal: Signal = "sampled", top_k: int = 0) -> list[ScoredRow]:
        if signal == "topk" and top_k < 1:
            raise EngineError(f"signal topk needs top_k >= 1, got {top_k}")
        for row in rows:
            self._check_tokens(row.row_id, row.token_ids, 1, self._model.max_context)
            if not 1 <= row.start <= len(row.token_ids):
                raise RowRefused(f"row {row.row_id}: start {row.start} is outside 1..{len(row.token_ids)}")
        call = ScoreCall(list(rows), signal, top_k, time.monotonic() + self._settings.swap_timeout_s)
        return await self._submit(call, self._scores)

    async def close(self) -> None:
        """End the thread; calls that still wait fail with EngineError."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        await asyncio.to_thread(self._thread.join, self._settings.swap_timeout_s)

    async def _submit(self, call: Any, queue: list[Any]) -> Any:
        with self._wake:
            self._check_alive()
            queue.append(call)
            self._news = True
            self._wake.notify()
        return await asyncio.wrap_future(call.future)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineError(f"engine {self._name} is dead: {self._death!r}") from self._death
        if self._closing:
            raise EngineError(f"engine {self._name} is closed")

    def _check_requests(self, requests: list[GenerateRequest]) -> None:
        for request in requests:
            self._check_tokens(request.request_id, request.prompt, 1, self._model.max_context - 1)
            if request.sampling.max_tokens < 1:
                raise RowRefused(f"row {request.request_id}: max_tokens {request.sampling.max_tokens} is below 1")

    def _check_tokens(self, name: str, token_ids: Any, least: int, most: int) -> None:
        if not least <= len(token_ids) <= most:
            raise RowRefused(
                f"row {name}: {len(token_ids)} tokens are outside {least}..{most} (engine.max_context {self._model.max_context})"
            )
        if token_ids.min() < 0 or token_ids.max() >= self._model.vocab_size:
            raise RowRefused(
                f"row {name}: token ids {token_ids.min()}..{token_ids.max()} outside the vocabulary of {self._model.vocab_size}"
            )

    # From here on: the engine's own thread.

    def _run(self) -> None:
        torch.set_num_threads(self._settings.threads)
        try:
            with torch.no_grad():
                while not self._closing:
                    self._turn()
            self._fail_all(EngineError(f"engine {self._name} was closed"))
        except BaseException as error:  # whatever ends the thread must reach those who wait for it
            self._death = error
            self._fail_all(error)

    def _turn(self) -> None:
        """One round: weights, scores, admission, one token for every active row. A fault fails the calls it may have touched."""
        try:
            self._drop_cancelled()
            self._swap_if_due()
            self._score_one()
            self._start_calls()
            if self._batching.busy:
                self._batching.step(self._loaded.version)
                return
        except Exception as error:
            self._model.forget()
            self._fail_all(error)
        with self._wake:
            if not (self._news or self._closing):
                self._wake.wait(POLL_S if self._waiting or self._scores else None)
            self._news = False

    def _swap_if_due(self) -> None:
        """Load the newest publication when it differs from what is served and nothing is half done."""
        newest = self._weights.latest() if self._weights is not None else None
        if newest is None or newest == self._loaded:
            return
        if self._batching.busy and self._settings.swap == "abort":
            self._waiting[:0] = self._batching.abort()
        if self._batching.busy or not (self._waiting or self._scores):
            return
        if any(call.version.exact is not None and self._fits(call.version) for call in self._waiting):
            return  # an evaluation of the served version goes first: it could never be answered later
        self._loaded = None  # half-loaded weights serve nobody
        self._model.load(newest.path)
        self._digest = model_digest(newest.path)
        self._loaded = newest

    def _start_calls(self) -> None:
        """Admit waiting calls in order while slots are free; a call that wants another version lets later ones pass."""
        newest = self._weights.latest() if self._weights is not None else self._loaded
        swap_due = newest != self._loaded
        for call in list(self._waiting):
            if self._fits(call.version) and (not swap_due or call.version.exact is not None):
                if not self._batching.has_room:
                    return
                self._waiting.remove(call)
                self._batching.start(call)
                continue
            exact = call.version.exact
            passed = exact is not None and newest is not None and newest.version > exact and not self._fits(call.version)
            if passed or (time.monotonic() >= call.deadline and not self._fits(call.version)):
                self._waiting.remove(call)
                settle(call.future, error=self._not_served(call.version, newest))

    def _fits(self, version: Version) -> bool:
        if self._loaded is None:
            return False
        return self._loaded.version >= version.minimum and version.exact in (None, self._loaded.version)

    def _not_served(self, version: Version, newest: Published | None) -> SwapTimeout:
        wanted = f"exactly {version.exact}" if version.exact is not None else f"at least {version.minimum}"
        return SwapTimeout(
            f"engine {self._name} was asked for version {wanted}; serves {self._loaded and self._loaded.version}, newest published "
            f"{newest and newest.version} (engine.swap_timeout_s {self._settings.swap_timeout_s})"
        )

    def _score_one(self) -> None:
        if not self._scores:
            return
        call = self._scores[0]
        if self._loaded is None:
            if time.monotonic() >= call.deadline:
                self._scores.remove(call)
                settle(call.future, error=self._not_served(Version(), None))
            return
        scored = self._model.score(call.rows, call.signal, call.top_k, self._smoothing)
        self._scores.remove(call)
        self._scored_rows += len(scored)
        settle(call.future, result=scored)

    def _drop_cancelled(self) -> None:
        """Whoever waited went away (a deadline, a cancelled sample): its rows make place for others."""
        with self._wake:
            for queue in (self._waiting, self._scores):
                queue[:] = [call for call in queue if not call.future.cancelled()]
        self._batching.drop_cancelled()

    def _fail_all(self, cause: BaseException) -> None:
        with self._wake:
            calls = [*self._batching.abort(), *self._waiting, *self._scores]
            self._waiting.clear()
            self._scores.clear()
        for call in calls:
            settle(call.future, error=_engine_error(self._name, cause))


def _engine_error(name: str, cause: BaseException) -> RolloutError:
    error = cause if isinstance(cause, EngineError) else EngineError(f"engine {name}: {type(cause).__name__}: {cause}")
    fresh = type(error)(*error.args)  # one exception a caller: a shared one would collect every caller's traceback
    fresh.__cause__ = cause
    return fresh
