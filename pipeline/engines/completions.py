"""Any server with OpenAI's completions API, as an engine: for evaluations and teachers. It takes no new weights.

Invariant: token ids go in, and what the server does not say is refused by name, never guessed: without token ids in its replies
it is not used for training, without logprobs of the prompt it does not score.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from pipeline.config.models import Engine as EngineSettings
from pipeline.config.models import Server
from pipeline.engines.base import Completion, EngineInfo, GenerateRequest, ScoredRow, ScoreRow, Signal, Version
from pipeline.engines.digests import text_digest
from pipeline.engines.endpoints import Endpoint, Endpoints, decoded, fault_of
from pipeline.engines.renderer import ChatRenderer, stop_ids
from pipeline.engines.rows import Bounds
from pipeline.errors import BadReply, EngineError, EngineUnavailable, RowRefused, SwapTimeout

KIND = "openai"
PATH = "/v1/completions"
CLIENT_FAULTS = range(400, 500)
BUSY = (408, 429)


class CompletionsEngine:
    """Implements engines.base.Engine.

    folder: the model's config.json and tokenizer. server: url and served_model. for_training: token ids and logprobs are needed.
    """

    def __init__(
        self,
        folder: Path,
        server: Server,
        settings: EngineSettings,
        *,
        smoothing: float = 0.0,
        version: int = 0,
        for_training: bool = False,
    ) -> None:
        self._folder, self._settings, self._smoothing, self._version = folder, settings, smoothing, version
        self._for_training = for_training
        self._bounds = Bounds.of(folder, settings.max_context)
        self._renderer = ChatRenderer.load(folder)
        self._stops = stop_ids(folder, self._renderer)
        self._model = server.served_model
        endpoints = [Endpoint(url, lambda url=url: url.rstrip("/").removesuffix("/v1")) for url in server.urls]
        self._servers = Endpoints(endpoints, settings.call_timeout_s, "/v1/models", self._seen)
        self._slots = asyncio.Semaphore(settings.slots)
        self._active = self._waiting = self._generated_tokens = self._scored_rows = 0

    async def info(self) -> EngineInfo:
        if not any(endpoint.up for endpoint in self._servers.endpoints):
            await self._servers.reach()
        return EngineInfo(
            kind=KIND,
            model=self._model or self._folder.name,
            digest=text_digest([KIND, self._model, self._renderer.digest, self._smoothing]),
            vocab_size=self._bounds.vocab_size,
            tokenizer_digest=self._renderer.digest,
            weight_version=self._version,
            max_context=self._bounds.max_context,
            slots=self._settings.slots,
            active=self._active,
            waiting=self._waiting,
            generated_tokens=self._generated_tokens,
            scored_rows=self._scored_rows,
        )

    async def generate(self, requests: list[GenerateRequest], version: Version) -> list[Completion]:
        if self._version < version.minimum or version.exact not in (None, self._version):
            raise SwapTimeout(f"engine {KIND} takes no new weights: it serves version {self._version}, asked for {version}")
        for request in requests:
            self._bounds.check_request(request)
        said = await asyncio.gather(*(self._in_slot(self._generate(request)) for request in requests))
        self._generated_tokens += sum(len(completion.token_ids) for completion in said)
        return list(said)

    async def score(self, rows: list[ScoreRow], signal: Signal = "sampled", top_k: int = 0) -> list[ScoredRow]:
        for row in rows:
            self._bounds.check_row(row)
        wanted = self._bounds.wanted(signal, top_k)
        scored = await asyncio.gather(*(self._in_slot(self._score(row, signal, wanted)) for row in rows))
        self._scored_rows += len(rows)
        return list(scored)

    async def close(self) -> None:
        await self._servers.close()

    async def _in_slot(self, work: Any) -> Any:
        self._waiting += 1
        try:
            await self._slots.acquire()
        except BaseException:
            work.close()
            raise
        finally:
            self._waiting -= 1
        self._active += 1
        try:
            return await work
        finally:
            self._active -= 1
            self._slots.release()

    async def _generate(self, request: GenerateRequest) -> Completion:
        settings = request.sampling
        body = {
            "prompt": request.prompt.tolist(),
            "max_tokens": self._bounds.room(request),
            "temperature": settings.temperature,
            "top_p": settings.top_p,
            "top_k": settings.top_k or -1,  # said even when there is no cut: some servers have a default of the model's own
            "seed": request.seed % 2**63,
            "logprobs": 0,
            "return_token_ids": True,
        }
        choice = await self._ask(body)
        token_ids, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if token_ids is None or logprobs is None:
            return self._from_text(request, choice)
        return self._bounds.completion(request, token_ids, logprobs, self._stops, self._version)

    def _from_text(self, request: GenerateRequest, choice: dict[str, Any]) -> Completion:
        """For evaluations, which read text and not tokens. Its logprobs are NaN."""
        if self._for_training:
            raise EngineError(
                f"the server of engine {KIND} gives no token ids with logprobs (return_token_ids, logprobs): what it says can be "
                "evaluated and not trained on"
            )
        token_ids = self._renderer.encode_text(choice["text"])[: self._bounds.room(request)]
        reason = "stop" if choice.get("finish_reason") == "stop" else "length"
        return Completion(request.request_id, token_ids, np.full(len(token_ids), np.nan, np.float32), reason, self._version)

    async def _score(self, row: ScoreRow, signal: Signal, wanted: int) -> ScoredRow:
        if row.start >= len(row.token_ids):
            return self._bounds.scored(row, signal, wanted, [], [], [], self._smoothing)
        body = {
            "prompt": row.token_ids.tolist(),
            "max_tokens": 1,
            "temperature": 1.0,  # some servers apply it to the prompt, too
            "prompt_logprobs": wanted,
            "return_token_ids": True,
        }
        choice = await self._ask(body)
        entries = choice.get("prompt_logprobs")
        if entries is None:
            raise EngineError(f"the server of engine {KIND} gives no logprobs of a prompt (prompt_logprobs): it cannot score")
        if len(entries) != len(row.token_ids):
            raise BadReply(f"row {row.row_id}: {len(entries)} prompt logprobs for {len(row.token_ids)} tokens")
        logprobs, ids, values = [], [], []
        for token, entry in zip(row.token_ids[row.start :].tolist(), entries[row.start :], strict=True):
            given = (entry or {}).get(str(token))
            if given is None:
                raise BadReply(f"row {row.row_id}: no logprob of the given token {token}")
            logprobs.append(given["logprob"])
            # The given token stands among the others: what is not among the most likely k has a rank above k.
            best = sorted((each["rank"], int(name), each["logprob"]) for name, each in entry.items() if each["rank"] <= wanted)
            ids.append([name for _, name, _ in best[:wanted]])
            values.append([value for _, _, value in best[:wanted]])
        return self._bounds.scored(row, signal, wanted, logprobs, ids, values, self._smoothing)

    async def _ask(self, body: dict[str, Any]) -> dict[str, Any]:
        """The one choice of a completion."""
        try:
            return await self._servers.use(lambda server, seconds: self._send(server, body, seconds))
        except (KeyError, TypeError, AttributeError) as error:
            raise BadReply(f"engine {KIND}: {type(error).__name__}: {error}") from error

    async def _send(self, server: Endpoint, body: dict[str, Any], seconds: float) -> dict[str, Any]:
        if self._model is None:
            await self._servers.probe(server)
        response = await self._servers.ask(server, PATH, {"model": self._model, **body}, seconds)
        if response.status_code != httpx.codes.OK:
            fault = f"{server.name}{PATH}: {fault_of(response)}"
            refused = response.status_code in CLIENT_FAULTS and response.status_code not in BUSY
            raise RowRefused(fault) if refused else EngineUnavailable(fault)
        reply = decoded(server, response)
        if not isinstance(reply, dict) or len(reply.get("choices") or ()) != 1:
            raise BadReply(f"{server.name}{PATH}: not one choice: {str(reply)[:200]}")
        return reply["choices"][0]

    def _seen(self, server: Endpoint, facts: Any) -> None:
        """Raises EngineError for a server that does not have the model."""
        try:
            names = [entry["id"] for entry in facts["data"]]
        except (KeyError, TypeError) as error:
            raise EngineError(f"{server.name}/v1/models does not list models: {str(facts)[:200]}") from error
        if not names or (self._model is not None and self._model not in names):
            raise EngineError(f"{server.name} has no model {self._model!r}; it lists {names} (served_model)")
        self._model = self._model or names[0]
