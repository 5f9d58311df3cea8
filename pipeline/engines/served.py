"""vLLM, SGLang or anything else behind the protocol of `servers.engine_server`, as an engine.

Invariant: a call is answered by one weight version and names it. The newest publication is loaded before a call is sent, and a
server that serves several of us loads it once.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx

from pipeline.config.models import Engine as EngineSettings
from pipeline.engines.base import Completion, EngineInfo, GenerateRequest, Piece, ScoredRow, ScoreRow, Signal, Version
from pipeline.engines.digests import model_digest, text_digest
from pipeline.engines.endpoints import Endpoint, Endpoints, decoded, fault_of
from pipeline.engines.launcher import Launcher
from pipeline.engines.renderer import ChatRenderer, stop_ids
from pipeline.engines.rows import Bounds
from pipeline.engines.streaming import Hearing, heard
from pipeline.engines.weights import Published, WeightStore
from pipeline.errors import BadReply, ConfigError, EngineError, EngineUnavailable, RowRefused, SwapTimeout

POLL_S = 0.02
Reply = TypeVar("Reply")


class _OtherVersion(Exception):
    """The server holds this version, and the call wants another."""


class ServedEngine:
    """Implements engines.base.StreamingEngine; its streams have no log-probabilities.

    folder: the model; what is served without `weights`, as `version`. urls: servers that exist. launcher: a server of our own.
    settings: the student's engine's; a teacher goes by the same context and time-outs.
    """

    def __init__(
        self,
        kind: str,
        folder: Path,
        weights: WeightStore | None,
        settings: EngineSettings,
        *,
        urls: tuple[str, ...] = (),
        launcher: Launcher | None = None,
        smoothing: float = 0.0,
        version: int = 0,
    ) -> None:
        self._kind, self._folder, self._weights, self._settings = kind, folder, weights, settings
        self._smoothing = smoothing
        self._fixed = Published(version, folder.resolve())
        self._bounds = Bounds.of(folder, settings.max_context)
        self._renderer = ChatRenderer.load(folder)
        self._stops = stop_ids(folder, self._renderer)
        self._digest = model_digest(folder)
        self._launcher = launcher
        endpoints = [Endpoint(url, lambda url=url: url.rstrip("/")) for url in urls]
        if launcher is not None:
            endpoints.append(Endpoint(launcher.name, launcher.address))
        self._servers = Endpoints(endpoints, settings.call_timeout_s, "/info", self._seen)
        self._served: int | None = None
        self._active = self._generated_tokens = self._scored_rows = 0

    async def info(self) -> EngineInfo:
        """Says what it last heard while its server is started again. Raises EngineError once a launched server was given up."""
        if self._launcher is not None:
            self._launcher.address()
        if self._served is None:
            await self._servers.reach()
        return EngineInfo(
            kind=self._kind,
            model=self._folder.name,
            digest=text_digest([self._digest, self._smoothing, *([] if self._weights is None else [self._served])]),
            vocab_size=self._bounds.vocab_size,
            tokenizer_digest=self._renderer.digest,
            weight_version=-1 if self._served is None else self._served,
            max_context=self._bounds.max_context,
            slots=self._settings.slots,
            active=min(self._active, self._settings.slots),
            waiting=max(0, self._active - self._settings.slots),
            generated_tokens=self._generated_tokens,
            scored_rows=self._scored_rows,
            streams=True,
        )

    async def generate(self, requests: list[GenerateRequest], version: Version) -> list[Completion]:
        for request in requests:
            self._bounds.check_request(request)
        body = {"requests": [self._asked(request) for request in requests]}
        self._active += len(requests)
        try:
            reply = await self._call("/generate", body, version, lambda reply: self._completions(requests, reply))
        finally:
            self._active -= len(requests)
        self._generated_tokens += sum(len(completion.token_ids) for completion in reply)
        return reply

    def stream(self, requests: list[GenerateRequest], version: Version, top_logprobs: int | None) -> AsyncIterator[list[Piece]]:
        if top_logprobs is not None:
            raise EngineError(f"engine {self._kind} streams no log-probabilities")
        for request in requests:
            self._bounds.check_request(request)
        pieces: asyncio.Queue[list[Piece] | None] = asyncio.Queue()
        rooms = {request.request_id: self._bounds.room(request) for request in requests}
        hear = partial(Hearing, rooms, self._stops, self._bounds.vocab_size, pieces.put_nowait)

        async def work() -> None:
            self._active += len(requests)
            try:
                body = {"requests": [self._asked(request) for request in requests]}
                self._generated_tokens += await self._call("/stream", body, version, lambda reply: reply["tokens"], hear)
            finally:
                self._active -= len(requests)

        return heard(work, pieces)

    async def score(self, rows: list[ScoreRow], signal: Signal = "sampled", top_k: int = 0) -> list[ScoredRow]:
        for row in rows:
            self._bounds.check_row(row)
        wanted = self._bounds.wanted(signal, top_k)
        asked = [{"id": row.row_id, "token_ids": row.token_ids.tolist(), "start": row.start} for row in rows]
        body = {"rows": asked, "top_k": wanted}
        reply = await self._call("/score", body, Version(), lambda reply: self._scored(rows, signal, wanted, reply))
        self._scored_rows += len(rows)
        return reply

    async def close(self) -> None:
        await self._servers.close()
        if self._launcher is not None:
            await asyncio.to_thread(self._launcher.close)

    def _asked(self, request: GenerateRequest) -> dict[str, Any]:
        return {
            "id": request.request_id,
            "prompt": request.prompt.tolist(),
            "temperature": request.sampling.temperature,
            "top_p": request.sampling.top_p,
            "top_k": request.sampling.top_k,
            "max_tokens": self._bounds.room(request),
            "seed": request.seed,
            "stop_ids": sorted(self._stops),
        }

    def _completions(self, requests: list[GenerateRequest], reply: dict[str, Any]) -> list[Completion]:
        found = _by_id(reply["completions"], [request.request_id for request in requests])
        return [
            self._bounds.completion(request, entry["token_ids"], entry["logprobs"], self._stops, reply["version"])
            for request, entry in zip(requests, found, strict=True)
        ]

    def _scored(self, rows: list[ScoreRow], signal: Signal, wanted: int, reply: dict[str, Any]) -> list[ScoredRow]:
        found = _by_id(reply["rows"], [row.row_id for row in rows])
        return [
            self._bounds.scored(row, signal, wanted, entry["logprobs"], entry["topk_ids"], entry["topk_logprobs"], self._smoothing)
            for row, entry in zip(rows, found, strict=True)
        ]

    async def _call(
        self,
        path: str,
        body: dict[str, Any],
        version: Version,
        read: Callable[[dict[str, Any]], Reply],
        hear: Callable[[], Hearing] | None = None,
    ) -> Reply:
        """Raises SwapTimeout when no server holds the wanted version in time. hear: what a reply that is a stream is told to, anew
        at each attempt."""
        give_up = time.monotonic() + self._settings.swap_timeout_s
        body = body | {"minimum": version.minimum, "exact": version.exact}
        while True:
            try:
                return await self._servers.use(lambda server, seconds: self._send(server, path, body, version, read, hear, seconds))
            except _OtherVersion as found:
                newest = self._newest()
                passed = version.exact is not None and newest is not None and newest.version > version.exact
                if passed or time.monotonic() >= give_up:
                    wanted = f"exactly {version.exact}" if version.exact is not None else f"at least {version.minimum}"
                    raise SwapTimeout(
                        f"engine {self._kind} was asked for version {wanted}; {found}; newest published "
                        f"{newest and newest.version} (engine.swap_timeout_s {self._settings.swap_timeout_s})"
                    ) from None
            await asyncio.sleep(POLL_S)

    async def _send(
        self,
        server: Endpoint,
        path: str,
        body: dict[str, Any],
        version: Version,
        read: Callable[[dict[str, Any]], Reply],
        hear: Callable[[], Hearing] | None,
        seconds: float,
    ) -> Reply:
        await self._bring(server, version)
        if server.held is not None and (server.held[0] is None or server.held[0] < version.minimum):
            raise _OtherVersion(f"{server.name} holds {server.held[0]}")
        if hear is None:
            reply = self._checked(server, path, await self._servers.ask(server, path, body, seconds))
        else:
            reply = await self._heard(server, path, body, hear(), seconds)
        try:
            if server.held is None or reply["version"] != server.held[0]:
                server.held = None  # somebody else changed the weights
            self._served = reply["version"]
            return read(reply)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise BadReply(f"{server.name}{path}: {type(error).__name__}: {error}") from error

    async def _heard(self, server: Endpoint, path: str, body: dict[str, Any], hearing: Hearing, seconds: float) -> dict[str, Any]:
        """A stream to its end: its version, and how many tokens it had."""
        async with self._servers.opened(server, path, body, seconds) as response:
            if response.status_code != httpx.codes.OK:
                await response.aread()
                return self._checked(server, path, response)
            try:
                async for line in response.aiter_lines():
                    hearing.hear(json.loads(line))
                return hearing.reply()
            except (KeyError, TypeError, ValueError) as error:
                raise BadReply(f"{server.name}{path}: {type(error).__name__}: {error}") from error

    async def _bring(self, server: Endpoint, version: Version) -> None:
        """Have the server hold the newest weights, unless it holds exactly what is asked for: later it could not answer."""
        if server.held is None:
            await self._servers.probe(server)
        newest = self._newest()
        if newest is None:
            raise _OtherVersion("no weights are published")
        if server.held == (newest.version, str(newest.path)) or (version.exact is not None and server.held[0] == version.exact):
            return
        async with server.changing:
            newest = self._newest()
            if server.held == (newest.version, str(newest.path)):
                return
            body = {"version": newest.version, "path": str(newest.path), "abort": self._settings.swap == "abort"}
            try:
                response = await self._servers.ask(server, "/load", body, self._settings.swap_timeout_s)
            except EngineUnavailable as error:
                if isinstance(error.__cause__, httpx.TimeoutException):
                    raise SwapTimeout(f"{error}: weights {newest.version} (engine.swap_timeout_s)") from error
                raise
            reply = self._checked(server, "/load", response)
            server.held = (reply["version"], reply["path"])

    def _checked(self, server: Endpoint, path: str, response: httpx.Response) -> dict[str, Any]:
        if response.status_code == httpx.codes.OK:
            reply = decoded(server, response)
            if not isinstance(reply, dict):
                raise BadReply(f"{server.name}{path}: {type(reply).__name__} instead of an object")
            return reply
        fault = f"{server.name}{path}: {fault_of(response)}"
        if response.status_code == httpx.codes.CONFLICT:
            server.held = None
            raise _OtherVersion(fault)
        if response.status_code == httpx.codes.UNPROCESSABLE_ENTITY:
            raise RowRefused(fault) if path != "/load" else EngineError(fault)
        if response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise EngineUnavailable(fault)
        raise EngineError(fault)

    def _seen(self, server: Endpoint, facts: Any) -> None:
        """Raises ConfigError for a server that holds a model of another shape."""
        try:
            rows, context = facts["vocab_size"], facts["max_context"]
            server.held = (facts["version"], facts["path"])
        except (KeyError, TypeError) as error:
            raise ConfigError(f"{server.name} does not speak the protocol of pipeline/engines/servers: {facts!r:.200}") from error
        if rows != self._bounds.vocab_size or context < self._bounds.max_context:
            raise ConfigError(
                f"{server.name} holds a model of {rows} output rows and {context} tokens of context; {self._folder.name} has "
                f"{self._bounds.vocab_size} and needs {self._bounds.max_context}"
            )
        self._served = facts["version"]

    def _newest(self) -> Published | None:
        if self._weights is None:
            return self._fixed
        newest = self._weights.latest()
        return newest and Published(newest.version, newest.path.resolve())


def _by_id(entries: list[dict[str, Any]], ids: list[str]) -> list[dict[str, Any]]:
    """In the order of `ids`. Raises BadReply unless there is exactly one entry for each."""
    found = {entry["id"]: entry for entry in entries}
    if len(entries) != len(ids) or set(found) != set(ids):
        raise BadReply(f"{len(entries)} entries for {len(ids)} rows; missing {sorted(set(ids) - set(found))[:3]}")
    return [found[each] for each in ids]
