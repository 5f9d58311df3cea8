"""What every HTTP request passes before and after its route.

Invariant: every reply carries a request id, every fault is answered in one form, a body has a bound, and beyond loopback (or when a
token is set) nothing that the models or the runs hold is served without the token.
"""

from __future__ import annotations

import hmac
import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pipeline.errors import RequestRefused
from pipeline.service.arguments import is_loopback, token_digest
from pipeline.service.faults import Refusal, refusal_of

log = logging.getLogger("service")
HEALTH, EVENTS = "/healthz", "/events"
OPEN_PATHS = (HEALTH, "/")
PAGE_PARTS = "/dashboard/"
"""Served without a token: whether it lives, and the page with its parts, which hold nothing and ask for the token themselves."""
MAX_BODY_BYTES = 8 << 20
IN_FLIGHT = "x-in-flight"
"""Header of `/healthz`: requests that are being answered, event streams aside."""
BACK_AFTER_S = 10.0
"""For a service that was ended and is begun again."""
CLIENT_GONE = 499
"""The status, in log and metrics, of a request whose client did not wait for the reply."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


@dataclass(frozen=True, slots=True)
class GateRules:
    loopback: bool
    token_sha256: str | None
    max_body_bytes: int
    ending: Path | None = None
    """While this file is there, nothing new is begun."""


class Gate:
    """ASGI middleware. seen: told (method, route, status, seconds) of every request."""

    def __init__(self, app: ASGIApp, rules: GateRules, seen: Callable[[str, str, int, float], None]) -> None:
        self._app, self._rules, self._seen = app, rules, seen
        self._in_flight = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = request_id_of(scope)  # Serve's proxy gives one to every request, and to its reply
        request_id = given or uuid.uuid4().hex
        path = quote(scope["path"])  # a line of the log is one request, whatever was asked for
        scope.setdefault("state", {})["request_id"] = request_id
        headers = {} if given else {"x-request-id": request_id}
        if scope["path"] == HEALTH:
            headers[IN_FLIGHT] = str(self._in_flight)
        reply = _Reply(send, headers)
        started = time.monotonic()
        counts = scope["path"] != HEALTH and not scope["path"].endswith(EVENTS)
        self._in_flight += counts
        try:
            self._check(scope)
            await self._app(scope, self._bounded(receive, reply), reply.send)
        except Exception as error:
            refusal = refusal_of(error)
            if refusal.status >= 500 and not isinstance(error, RequestRefused):
                log.exception("request %s: %s %s", request_id, scope["method"], path)
            if not reply.started:
                await send_refusal(refusal, request_id, reply.send)
        finally:
            self._in_flight -= counts
            seconds = time.monotonic() - started
            route = getattr(scope.get("route"), "path", "unknown")
            self._seen(scope["method"], route, reply.status, seconds)
            log.info("%s %s %s %d %.3f s", request_id, scope["method"], path, reply.status, seconds)

    def _check(self, scope: Scope) -> None:
        headers, rules = Headers(scope=scope), self._rules
        if rules.ending is not None and rules.ending.exists():
            raise RequestRefused(503, "service_ending", "the service is being ended; try again", None, BACK_AFTER_S)
        if rules.loopback and rules.token_sha256 is None and not is_loopback(_host(headers.get("host", ""))):
            # a page in a browser of this machine may have had its own name point here
            raise RequestRefused(403, "foreign_host", f"this service answers to loopback names only, not {headers.get('host')!r}")
        if rules.token_sha256 is not None and scope["path"] not in OPEN_PATHS and not scope["path"].startswith(PAGE_PARTS):
            kind, _, token = headers.get("authorization", "").partition(" ")
            good = hmac.compare_digest(token_digest(token.strip()), rules.token_sha256)
            if kind.lower() != "bearer" or not good:
                raise RequestRefused(401, "invalid_token", "a bearer token is required: Authorization: Bearer TOKEN")
        length = headers.get("content-length", "0")
        if length.isdigit() and int(length) > rules.max_body_bytes:
            raise _too_large(rules.max_body_bytes)

    def _bounded(self, receive: Receive, reply: _Reply) -> Receive:
        """A body whose length was not said is counted as it comes; above the bound, what the route makes of it is not sent."""
        received = 0

        async def bounded() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self._rules.max_body_bytes:
                reply.instead = _too_large(self._rules.max_body_bytes)
                raise reply.instead
            return message

        return bounded


class _Reply:
    """headers: to be added."""

    def __init__(self, send: Send, headers: dict[str, str]) -> None:
        self._send, self._headers = send, headers
        self.started, self.status = False, CLIENT_GONE
        self.instead: RequestRefused | None = None

    async def send(self, message: Message) -> None:
        if self.instead is not None and not self.started:
            refused, self.instead = self.instead, None
            raise refused
        if message["type"] == "http.response.start":
            self.started, self.status = True, message["status"]
            if self._headers:
                MutableHeaders(scope=message).update(self._headers)
        await self._send(message)


def request_id_of(scope: Scope) -> str | None:
    """The id that came with a request, if it can be written into a log."""
    given = Headers(scope=scope).get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else None


async def send_refusal(refusal: Refusal, request_id: str, send: Send) -> None:
    body = json.dumps(refusal.body(request_id)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    if refusal.retry_after_s is not None:
        headers.append((b"retry-after", str(max(1, round(refusal.retry_after_s))).encode()))
    if refusal.status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": refusal.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _too_large(bound: int) -> RequestRefused:
    return RequestRefused(413, "body_too_large", f"the body is above {bound} bytes")


def _host(value: str) -> str:
    """Without the port."""
    if value.startswith("["):
        return value[1:].partition("]")[0]
    return value.partition(":")[0]
