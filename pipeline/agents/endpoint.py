"""The address that a sample's program is given: a model at `/v1/chat/completions`, and a shell at `/sandbox/run`.

Invariant: it listens on loopback alone, answers who has the sample's key, and is gone when the context ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import socket
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from pydantic import Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from pipeline.agents.capture import Capture
from pipeline.config.base import Request as Body
from pipeline.errors import RequestRefused
from pipeline.sandboxes.base import Ran
from pipeline.service.completing import Answer
from pipeline.service.faults import refusal_of
from pipeline.service.openai import ChatRequest
from pipeline.service.replies import Head, Prompt, chat_reply

T = TypeVar("T")
CLOSE_S = 5
"""For replies that are being written."""


class RunRequest(Body):
    """Of `POST /sandbox/run`."""

    command: str
    timeout_s: float | None = Field(None, gt=0)
    """None: `sandbox.command_timeout_s`, which is also the longest."""


Execute = Callable[[RunRequest], Awaitable[Ran]]


@dataclass(frozen=True, slots=True)
class Address:
    """The program finds these in its environment."""

    url: str
    key: str

    def environment(self) -> dict[str, str]:
        base, shell = f"{self.url}/v1", f"{self.url}/sandbox/run"
        return {"OPENAI_BASE_URL": base, "OPENAI_API_BASE": base, "OPENAI_API_KEY": self.key, "SANDBOX_URL": shell}


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """They are this process's."""
        yield


@asynccontextmanager
async def serving(capture: Capture, execute: Execute, key: str) -> AsyncIterator[Address]:
    listener = socket.create_server(("127.0.0.1", 0))
    settings = uvicorn.Config(_app(capture, execute, key), log_config=None, access_log=False, lifespan="off")
    settings.timeout_graceful_shutdown = CLOSE_S
    server = _Server(settings)
    task = asyncio.create_task(server.serve(sockets=[listener]), name="endpoint of a sample")
    try:
        yield Address(f"http://127.0.0.1:{listener.getsockname()[1]}", key)
    finally:
        server.should_exit = True
        await task


async def _unless_ended(capture: Capture, work: Coroutine[Any, Any, T]) -> T:
    """What is still being done when the episode ends is given up."""
    doing = asyncio.create_task(work, name="answer to a program")
    ending = asyncio.create_task(capture.ended.wait(), name="end of a sample")
    try:
        await asyncio.wait({doing, ending}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        doing.cancel()
        ending.cancel()
        await asyncio.gather(doing, ending, return_exceptions=True)
    if doing.cancelled():
        capture.check_open()
    return doing.result()


def _app(capture: Capture, execute: Execute, key: str) -> Starlette:
    async def chat(request: Request) -> dict[str, Any]:
        body = ChatRequest.model_validate(await request.json())
        if body.n != 1 or body.stops or body.stream or body.logprobs:
            raise RequestRefused(400, "unsupported", "n above 1, stop, stream and logprobs are not served to a program", None)
        said = await capture.answer([(message.role, message.text()) for message in body.messages], body.most_tokens)
        head = Head(uuid.uuid4().hex, int(time.time()), body.model)
        return chat_reply(
            head, Prompt("", said.prompt), Answer([[said.made]], said.weight_version), token_ids=body.return_token_ids
        )

    async def run(request: Request) -> dict[str, Any]:
        body = RunRequest.model_validate(await request.json())
        capture.check_open()
        ran = await execute(body)
        return {"output": ran.output, "exit_code": ran.exit_code, "timed_out": ran.timed_out, "left_out": ran.left_out}

    def route(path: str, answer: Callable[[Request], Coroutine[Any, Any, dict[str, Any]]]) -> Route:
        async def guarded(request: Request) -> Response:
            try:
                if not hmac.compare_digest(request.headers.get("authorization", ""), f"Bearer {key}"):
                    raise RequestRefused(401, "wrong_key", "the key is not that of this sample")
                return JSONResponse(await _unless_ended(capture, answer(request)))
            except ValidationError as error:
                fault: Exception = RequestRefused(
                    400, "invalid_request", str(error.errors()[0]["msg"]), str(error.errors()[0]["loc"])
                )
            except Exception as error:
                fault = error
            refusal = refusal_of(fault)
            return JSONResponse(refusal.body(""), refusal.status)

        return Route(path, guarded, methods=["POST"])

    return Starlette(routes=[route("/v1/chat/completions", chat), route("/sandbox/run", run)])
