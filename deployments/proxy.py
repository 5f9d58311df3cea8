"""What stands in Serve's HTTP proxy: a request that a dying replica of the service lost is asked again, which Serve does not.

Invariant: a reply that has begun is not begun twice, what must not happen twice is asked once, and what nobody can answer now is
told in the form of all faults.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from functools import partial

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.gate import MAX_BODY_BYTES, request_id_of, send_refusal
from pipeline.service.faults import BUSY_AFTER_S, Refusal

WAITS_S = (0.2, 0.5, 1.0, 2.0)
"""Before a lost request is asked again. Serve itself holds it until another replica is ready."""
REPEATABLE = ("/v1/completions", "/v1/chat/completions", "/v1/evals", "/v1/runs")
"""Of the routes that change something, those that make of a second request with the same id what they made of the first."""
AWAY = Refusal(503, "service_unavailable", "the service is being replaced; try again", None, BUSY_AFTER_S)


def middlewares() -> list[Middleware]:
    return [Middleware(AskAgain)]


class AskAgain:
    def __init__(self, app: ASGIApp, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        self._app, self._sleep = app, sleep

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope) or uuid.uuid4().hex
        MutableHeaders(scope=scope)["x-request-id"] = request_id
        request = _Request(receive)
        repeatable = scope["method"] == "GET" or scope["path"] in REPEATABLE
        for wait_s in (*WAITS_S, None) if repeatable else (None,):
            reply = _Reply(send)
            await self._app(scope | {"headers": list(scope["headers"])}, request.from_the_start(), reply.send)
            if reply.begun or request.gone:
                return
            if wait_s is None or not request.kept:
                break
            await self._sleep(wait_s)
        await send_refusal(AWAY, request_id, partial(_named, send, request_id))


async def _named(send: Send, request_id: str, message: Message) -> None:
    if message["type"] == "http.response.start":
        MutableHeaders(scope=message)["x-request-id"] = request_id
    await send(message)


class _Request:
    """Keeps what came, so that it can be read again."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._came: list[Message] = []
        self._bytes = 0
        self.gone = False
        """The client, which waits for no answer then."""

    @property
    def kept(self) -> bool:
        return self._bytes <= MAX_BODY_BYTES

    def from_the_start(self) -> Receive:
        place = 0

        async def receive() -> Message:
            nonlocal place
            if place == len(self._came):
                message = await self._receive()
                self.gone = message["type"] == "http.disconnect"
                self._bytes += len(message.get("body", b""))
                if not self.kept:  # the service refuses it: it is passed on, and forgotten
                    return message
                self._came.append(message)
            place += 1
            return self._came[place - 1]

        return receive


class _Reply:
    """Passes on what the service says. What Serve says in its place, a text, when it has no replica, is left out."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.begun = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = Headers(raw=message["headers"]).get("content-type", "")
            self.begun = message["status"] not in (404, 503) or kind.startswith("application/json")
        if self.begun:
            await self._send(message)
