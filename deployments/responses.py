"""Replies that are more than a body. Invariant: a fault is told in the one form, whoever found it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from fastapi import Request
from fastapi.responses import FileResponse, JSONResponse, StreamingResponse
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from pipeline.service.faults import Refusal


def refused(request: Request, refusal: Refusal, headers: dict[str, str] | None = None) -> JSONResponse:
    return JSONResponse(refusal.body(request.state.request_id), refusal.status, headers)


class TokenStream(StreamingResponse):
    """Closes what it sends, also when its client has gone."""

    def __init__(self, first: str, rest: AsyncGenerator[str]) -> None:
        self._first, self._rest = first, rest
        super().__init__(self._events(), media_type="text/event-stream", headers={"cache-control": "no-store"})

    async def _events(self) -> AsyncIterator[str]:
        yield self._first
        async for events in self._rest:
            yield events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await self._rest.aclose()


class File(FileResponse):
    """What it has against a Range header is told as all faults are."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fault: Message | None = None

        async def told(message: Message) -> None:
            nonlocal fault
            if message["type"] == "http.response.start" and message["status"] >= 400:
                fault = message
            elif fault is None:
                await send(message)

        await super().__call__(scope, receive, told)
        if fault is not None:
            text = f"{Headers(scope=scope)['range']!r} names no bytes that are there"
            refusal = Refusal(fault["status"], "invalid_range", text, "range")
            size = {key: value for key, value in Headers(raw=fault["headers"]).items() if key == "content-range"}
            await refused(Request(scope), refusal, size)(scope, receive, send)
