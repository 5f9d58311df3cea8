"""A server of the engines' protocol in this process, backed by the embedded engine, so that parity is exact. It plays faults."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn

from pipeline.config.models import Engine as EngineSettings
from pipeline.engines.base import GenerateRequest, ScoreRow, Version
from pipeline.engines.servers.engine_server import EngineServer, Gate
from pipeline.engines.torch_engine import TorchEngine
from pipeline.records import Sampling


class TorchBackend:
    """Implements engine_server.Backend. gate: an event that generation waits for."""

    name, engine_version = "torch", "0"

    def __init__(self, folder: Path) -> None:
        self._engine = self._open(folder)
        self.vocab_size = self._engine._model.vocab_size
        self.go_on = asyncio.Event()
        self.go_on.set()
        self.generating = 0
        self.loads: list[str] = []

    async def generate(self, request: dict[str, Any]) -> dict[str, Any]:
        sampling = Sampling(request["temperature"], request["top_p"], request["top_k"], request["max_tokens"])
        self.generating += 1
        try:
            await self.go_on.wait()
            prompt = np.asarray(request["prompt"], np.int32)
            said = (await self._engine.generate([GenerateRequest("0", prompt, sampling, request["seed"])], Version()))[0]
        finally:
            self.generating -= 1
        return {"token_ids": said.token_ids.tolist(), "logprobs": said.logprobs.tolist()}

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[list[int]]:
        sampling = Sampling(request["temperature"], request["top_p"], request["top_k"], request["max_tokens"])
        asked = GenerateRequest("0", np.asarray(request["prompt"], np.int32), sampling, request["seed"])
        self.generating += 1
        try:
            async with aclosing(self._engine.stream([asked], Version(), None)) as stream:
                async for pieces in stream:
                    for piece in pieces:
                        yield piece.token_ids.tolist()
                    await self.go_on.wait()
        finally:
            self.generating -= 1

    async def score(self, token_ids: list[int], start: int, top_k: int) -> dict[str, Any]:
        signal = "topk" if top_k else "sampled"
        row = (await self._engine.score([ScoreRow("0", np.asarray(token_ids, np.int32), start)], signal, top_k))[0]
        empty: list[list[float]] = [[] for _ in row.logprobs]
        return {
            "logprobs": row.logprobs.tolist(),
            "topk_ids": empty if row.topk_ids is None else row.topk_ids.tolist(),
            "topk_logprobs": empty if row.topk_logprobs is None else row.topk_logprobs.tolist(),
        }

    async def load(self, path: str) -> None:
        self.loads.append(path)
        old, self._engine = self._engine, self._open(Path(path))
        await old.close()

    async def check(self) -> None:
        await self._engine.info()

    async def close(self) -> None:
        await self._engine.close()

    def _open(self, folder: Path) -> TorchEngine:
        return TorchEngine(folder, None, EngineSettings(slots=8))


class Standin:
    """faults: taken one a request of /generate or /score, oldest first: `fail`, `slow`, `half`, `drop`, `nan`, `text`."""

    def __init__(self, folder: Path, version: int = 0) -> None:
        self.backend = TorchBackend(folder)
        self.gate = Gate(version, str(folder.resolve()))
        self.app = EngineServer(self.backend, self.gate, 48).app()
        self.faults: list[str] = []
        self.asked = 0
        self.url = ""

    async def __call__(self, scope: dict, receive: Any, send: Any) -> None:
        if scope["type"] != "http" or scope["path"] not in ("/generate", "/score"):
            return await self.app(scope, receive, send)
        self.asked += 1
        fault = self.faults.pop(0) if self.faults else None
        if fault == "slow":
            await asyncio.sleep(3600)
        parts: list[dict] = []

        async def keep(message: dict) -> None:
            parts.append(message)

        await self.app(scope, receive, keep if fault else send)
        if fault:
            await _play(fault, b"".join(part.get("body", b"") for part in parts), send)


async def _play(fault: str, body: bytes, send: Any) -> None:
    status, length = 200, None
    if fault == "fail":
        status, body = 500, b'{"error": "RuntimeError: out of memory"}'
    elif fault == "text":
        body = b"<html>gateway</html>"
    elif fault == "half":
        length, body = len(body), body[: len(body) // 2]
    else:
        record = json.loads(body)
        entries = record.get("completions") or record["rows"]
        if fault == "drop":
            entries.pop()
        else:
            entries[0]["logprobs"][0] = float("nan")
        body = json.dumps(record).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(length or len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def serving(app: Any) -> AsyncIterator[str]:
    """The address where `app` is served."""
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off", timeout_graceful_shutdown=1))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = server.force_exit = True
        await task


@asynccontextmanager
async def standin(folder: Path, version: int = 0) -> AsyncIterator[Standin]:
    made = Standin(folder, version)
    async with serving(made) as url:
        made.url = url
        try:
            yield made
        finally:
            made.backend.go_on.set()
            await made.backend.close()
