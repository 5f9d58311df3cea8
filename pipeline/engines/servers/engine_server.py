"""One small JSON protocol for every engine that runs in an environment of its own: info, generate, stream, score, load.

Invariant: a call is served by one weight version, and its reply names it. Weights are loaded while no call runs; a call that wants
another version than the one held is answered 409 with the version held, and never waits for weights.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Protocol

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

OK, CONFLICT, REFUSED, FAILED = 200, 409, 422, 500
CHECK_S = 1.0
Json = dict[str, Any]


class Refused(Exception):
    """A request that this engine will never answer, for what it holds."""


class OtherVersion(Exception):
    """Another weight version is held than the one that was asked for."""


class Backend(Protocol):
    """What an engine adds to the protocol."""

    name: str
    engine_version: str
    vocab_size: int
    """Rows of the output matrix."""

    async def generate(self, request: Json) -> Json:
        """{prompt, temperature, top_p, top_k, max_tokens, seed, stop_ids} -> {token_ids, logprobs}."""
        ...

    def stream(self, request: Json) -> AsyncIterator[list[int]]:
        """The token ids of such a request, as they are made. To cancel it ends the sequence."""
        ...

    async def score(self, token_ids: list[int], start: int, top_k: int) -> Json:
        """-> {logprobs, topk_ids, topk_logprobs} of the tokens start.., at temperature 1; top-k lists are empty for top_k 0."""
        ...

    async def load(self, path: str) -> None:
        """New weights in place, and nothing cached of the old ones. Nothing runs meanwhile."""
        ...

    async def check(self) -> None:
        """Raises when the engine is dead."""
        ...


class Gate:
    """Calls pass together, a change of weights alone."""

    def __init__(self, version: int, path: str) -> None:
        self.version: int | None = version
        """None while no whole set of weights is held."""
        self.path = path
        self.running: set[asyncio.Task[Any]] = set()
        self._waiting_loads = 0
        self._loading = False
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def call(self, minimum: int, exact: int | None) -> AsyncIterator[int]:
        """The version held. A call for exactly the held version passes a waiting change: later it could not be answered."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._may_pass(exact))
            if self.version is None or self.version < minimum or exact not in (None, self.version):
                raise OtherVersion(f"held is {self.version}")
            version = self.version
            task = asyncio.current_task()
            self.running.add(task)
        try:
            yield version
        finally:
            self.running.discard(task)
            async with self._changed:
                self._changed.notify_all()

    async def change(self, version: int, path: str, load: Callable[[str], Awaitable[None]], abort: bool) -> None:
        """Hold these weights. abort: running calls are cancelled instead of waited for."""
        async with self._changed:
            self._waiting_loads += 1
            try:
                if abort:
                    for task in self.running:
                        task.cancel()
                await self._changed.wait_for(lambda: not self.running and not self._loading)
                if (self.version, self.path) == (version, path):
                    return
                self._loading, self.version = True, None
            finally:
                self._waiting_loads -= 1
                self._changed.notify_all()
        try:
            await load(path)
            self.version, self.path = version, path
        finally:
            self._loading = False
            async with self._changed:
                self._changed.notify_all()

    def _may_pass(self, exact: int | None) -> bool:
        if self._loading:
            return False
        return not self._waiting_loads or (exact is not None and exact == self.version)


class EngineServer:
    def __init__(self, backend: Backend, gate: Gate, max_context: int) -> None:
        self._backend, self._gate, self._max_context = backend, gate, max_context
        self._instance = uuid.uuid4().hex
        self._generated_tokens = self._scored_rows = 0

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/info", self.info),
                Route("/generate", self.generate, methods=["POST"]),
                Route("/stream", self.stream, methods=["POST"]),
                Route("/score", self.score, methods=["POST"]),
                Route("/load", self.load, methods=["POST"]),
            ]
        )

    async def info(self, request: Request) -> Response:
        return await self._answer(self._info())

    async def generate(self, request: Request) -> Response:
        body = await request.json()
        return await self._answer(self._cancelled_with(request, self._generate(body)))

    async def stream(self, request: Request) -> Response:
        """A line {version}, a line {id, token_ids} of each piece of each sequence, and a line {} behind the last."""
        lines = self._stream(await request.json())
        return await self._answer(anext(lines), lambda first: StreamingResponse(_chained(first, lines)))

    async def score(self, request: Request) -> Response:
        body = await request.json()
        return await self._answer(self._cancelled_with(request, self._score(body)))

    async def load(self, request: Request) -> Response:
        return await self._answer(self._load(await request.json()))

    async def _info(self) -> Json:
        await self._backend.check()
        return {
            "instance": self._instance,
            "engine": self._backend.name,
            "engine_version": self._backend.engine_version,
            "vocab_size": self._backend.vocab_size,
            "max_context": self._max_context,
            "version": self._gate.version,
            "path": self._gate.path,
            "running": len(self._gate.running),
            "generated_tokens": self._generated_tokens,
            "scored_rows": self._scored_rows,
        }

    async def _generate(self, body: Json) -> Json:
        async with self._gate.call(body["minimum"], body["exact"]) as version:
            replies = await _all(self._backend.generate(request) for request in body["requests"])
        self._generated_tokens += sum(len(reply["token_ids"]) for reply in replies)
        ids = [request["id"] for request in body["requests"]]
        return {"version": version, "completions": [{"id": i, **reply} for i, reply in zip(ids, replies, strict=True)]}

    async def _stream(self, body: Json) -> AsyncIterator[Json]:
        async with self._gate.call(body["minimum"], body["exact"]) as version:
            yield {"version": version}
            said: asyncio.Queue[Json | None] = asyncio.Queue()
            work = asyncio.ensure_future(_all(self._say(request, said) for request in body["requests"]))
            work.add_done_callback(lambda _: said.put_nowait(None))
            try:
                while (piece := await said.get()) is not None:
                    yield piece
                await work
                yield {}
            finally:
                work.cancel()
                await asyncio.wait({work})

    async def _say(self, request: Json, said: asyncio.Queue[Json | None]) -> None:
        async for token_ids in self._backend.stream(request):
            self._generated_tokens += len(token_ids)
            said.put_nowait({"id": request["id"], "token_ids": token_ids})

    async def _score(self, body: Json) -> Json:
        async with self._gate.call(body["minimum"], body["exact"]) as version:
            asked = [(row["token_ids"], row["start"], body["top_k"]) for row in body["rows"]]
            replies = await _all(self._score_row(*row) for row in asked)
        self._scored_rows += len(replies)
        ids = [row["id"] for row in body["rows"]]
        return {"version": version, "rows": [{"id": i, **reply} for i, reply in zip(ids, replies, strict=True)]}

    async def _score_row(self, token_ids: list[int], start: int, top_k: int) -> Json:
        if start >= len(token_ids):
            return {"logprobs": [], "topk_ids": [], "topk_logprobs": []}
        return await self._backend.score(token_ids, start, top_k)

    async def _load(self, body: Json) -> Json:
        if not await asyncio.to_thread(Path(body["path"]).is_dir):
            raise Refused(f"this server sees no folder {body['path']}")
        await self._gate.change(body["version"], body["path"], self._backend.load, body["abort"])
        return {"version": self._gate.version, "path": self._gate.path}

    async def _cancelled_with(self, request: Request, work: Awaitable[Json]) -> Json:
        """What nobody waits for any more is not worked on. Work that a change of weights cancelled is answered as such."""
        task = asyncio.ensure_future(work)
        gone = asyncio.ensure_future(_disconnected(request))
        try:
            await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
            await asyncio.wait({task})
        finally:
            task.cancel()
            gone.cancel()
        if task.cancelled():
            raise OtherVersion("the weights changed meanwhile")
        return task.result()

    async def _answer(self, work: Awaitable[Json], respond: Callable[[Json], Response] = JSONResponse) -> Response:
        try:
            return respond(await work)
        except OtherVersion as error:
            return JSONResponse({"error": str(error), "version": self._gate.version}, CONFLICT)
        except (Refused, KeyError) as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}"}, REFUSED)
        except Exception as error:
            return JSONResponse({"error": f"{type(error).__name__}: {error}".splitlines()[0]}, FAILED)


async def _chained(first: Json, lines: AsyncIterator[Json]) -> AsyncIterator[str]:
    yield json.dumps(first) + "\n"
    async for line in lines:
        yield json.dumps(line) + "\n"


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _all(work: Any) -> list[Any]:
    """Results in order. The first failure cancels the others and waits for their end."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def arguments() -> argparse.Namespace:
    """Of every engine's program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder in Hugging Face format")
    parser.add_argument("--version", type=int, default=0, help="weight version of that folder")
    parser.add_argument("--max-context", type=int, required=True, help="tokens of a sequence")
    parser.add_argument("--slots", type=int, default=64, help="sequences at the same time")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--address-file", type=Path, help="written once the server answers")
    parser.add_argument("--engine-args", type=json.loads, default={}, help="JSON object: the engine's own arguments")
    return parser.parse_args()


def serve(args: argparse.Namespace, open_backend: Callable[[argparse.Namespace], Backend]) -> None:
    """Runs until it is ended."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # engines make their sockets and locks while they open
    backend = open_backend(args)
    app = EngineServer(backend, Gate(args.version, args.model), args.max_context).app()
    listener = socket.create_server((args.host, args.port))
    if args.address_file is not None:
        aside = args.address_file.with_suffix(".new")
        aside.write_text(f"http://{args.host}:{listener.getsockname()[1]}")
        os.replace(aside, args.address_file)
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_keep_alive=600))
    watch = loop.create_task(end_when_dead(backend))
    loop.run_until_complete(server.serve(sockets=[listener]))
    watch.cancel()


async def end_when_dead(backend: Backend) -> None:
    """Whoever looks after this process sees it end: a server without its engine answers nobody."""
    while True:
        await asyncio.sleep(CHECK_S)
        try:
            await backend.check()
        except Exception:
            logging.getLogger("engine_server").exception("the engine is dead: this process ends")
            os._exit(1)
