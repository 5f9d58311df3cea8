"""The HTTP routes. Thin: each one hands its checked request on and writes down the answer. Knows nothing of Ray."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Depends, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from prometheus_client import CONTENT_TYPE_LATEST
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import Match

from deployments.gate import PAGE_PARTS, Gate, GateRules
from deployments.metrics import ServiceMetrics
from deployments.responses import File, TokenStream, refused
from pipeline.config.base import TOO_DEEP
from pipeline.errors import EngineError, RequestRefused
from pipeline.evaluation.plan import EvalRequest
from pipeline.evaluation.store import ARTEFACTS
from pipeline.service.faults import FaultReply, Refusal, invalid
from pipeline.service.front import Backend, Front
from pipeline.service.openai import ChatRequest, CompletionRequest, Reply
from pipeline.service.runs import RunRequest, Runs

DASHBOARD = Path(__file__).with_name("dashboard")
PAGE = "index.html"
PAGE_POLICY = "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src data:; frame-ancestors 'none'"
EventsOf = Callable[[str, int, float], Awaitable[list[dict[str, Any]]]]
EVENT_WAIT_S = 10.0
"""Silence after which an event stream says that it is alive."""
EVENT_PAUSE_S = 0.02
KEY_CHARACTERS = 255
FAULTS: dict[int | str, dict[str, Any]] = {
    status: {"model": FaultReply, "description": text}
    for status, text in {
        400: "The request is wrong; `param` says where.",
        401: "The bearer token is missing or wrong.",
        403: "The host name is not one of loopback.",
        404: "There is no such thing: a route, a model, a data set, an evaluation, ...",
        409: "It contradicts itself, or what is there.",
        416: "The Range header names bytes that are not there.",
        413: "The body is too large.",
        429: "Too much at the same time; see Retry-After.",
        500: "A fault of the service; its log has the request id.",
        503: "The engine is being replaced; see Retry-After.",
        504: "No answer within the deadline.",
    }.items()
}
EVENTS = {
    200: {"content": {"text/event-stream": {}}, "description": "Server-sent events."},
    204: {"description": "No more events."},
}
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {}}, "description": "The reply; with `stream` as server-sent events."}
}
TEXT = {200: {"content": {"text/plain": {}}, "description": "The exposition format of Prometheus."}}
ARTEFACT = {200: {"content": {"application/json": {}, "application/octet-stream": {}}, "description": "The file."}}


class Evaluating(Protocol):
    """The evaluation jobs, wherever they are (`pipeline.evaluation.jobs.Jobs`). Every method has a deadline."""

    async def submit(self, request: EvalRequest, key: str) -> dict[str, Any]: ...
    async def views(self) -> list[dict[str, Any]]: ...
    async def view(self, name: str) -> dict[str, Any]: ...
    async def sample(self, name: str, sample_id: str) -> dict[str, Any]: ...
    async def events(self, name: str, after: int, wait_s: float) -> list[dict[str, Any]]: ...
    async def cancel(self, name: str) -> dict[str, Any]: ...
    async def counts(self) -> dict[str, int]: ...


def make_api(backend: Backend, evaluating: Evaluating, front: Front, runs: Runs, rules: GateRules, evaluations: Path) -> FastAPI:
    """evaluations: the folder of evaluations, for their artefacts."""
    metrics = ServiceMetrics()
    api = FastAPI(title="rollout", version="1", docs_url=None, redoc_url=None, responses=FAULTS)
    api.add_middleware(Gate, rules=rules, seen=metrics.seen)
    api.add_exception_handler(RequestValidationError, _invalid)
    api.add_exception_handler(HTTPException, _no_route)
    _dashboard(api)
    routes = APIRouter(dependencies=[Depends(_no_query)])
    _health(routes, backend, evaluating, front, metrics)
    _models(routes, front)
    _evaluations(routes, evaluating, evaluations)
    _runs(routes, runs)
    api.include_router(routes)
    describe = api.openapi
    api.openapi = lambda: _without_422(describe())  # type: ignore[method-assign]
    return api


async def _no_query(request: Request) -> None:
    """No route takes one: what would be ignored is refused."""
    for name in request.query_params:
        raise RequestRefused(400, "unknown_parameter", f"unknown query parameter {name!r}: this route takes none", name)


def _without_422(document: dict[str, Any]) -> dict[str, Any]:
    """FastAPI says that it answers bad input with 422; this service answers 400, in the form of all its errors."""
    for methods in document["paths"].values():
        for operation in methods.values():
            operation["responses"].pop("422", None)
    for name in ("HTTPValidationError", "ValidationError"):
        document["components"]["schemas"].pop(name, None)
    return document


def _health(api: APIRouter, backend: Backend, evaluating: Evaluating, front: Front, metrics: ServiceMetrics) -> None:
    @api.get("/healthz", tags=["service"])
    async def healthz() -> dict[str, Any]:
        """The live model answers."""
        opened = await backend.open("live")
        return {"status": "ok", "model": opened.model.name, "weight_version": opened.info.weight_version}

    @api.get("/metrics", tags=["service"], response_class=Response, responses=TEXT)
    async def metrics_text() -> Response:
        """Prometheus text. What cannot be asked now keeps its last value."""
        try:
            live, jobs = (await backend.open("live")).info, await evaluating.counts()
        except EngineError:
            live, jobs = None, None
        return Response(metrics.render(front.in_flight, jobs, live), media_type=CONTENT_TYPE_LATEST)


def _dashboard(api: FastAPI) -> None:
    """A page that asks for nothing but this service's own routes; the browser is told to hold it to that."""
    parts = {path.name: path for path in DASHBOARD.iterdir()}
    fresh = {"cache-control": "no-cache"}

    @api.get("/", include_in_schema=False)
    async def page() -> File:
        return File(parts[PAGE], headers=fresh | {"content-security-policy": PAGE_POLICY})

    @api.get(PAGE_PARTS + "{file}", include_in_schema=False)
    async def part(file: str) -> File:
        if file not in parts:
            raise RequestRefused(404, "not_found", f"the page has no part {file!r}")
        return File(parts[file], headers=fresh)


def _models(api: APIRouter, front: Front) -> None:
    @api.get("/v1/models", tags=["models"])
    async def models() -> dict[str, Any]:
        """The live model and the checkpoints of its run."""
        return await front.models()

    @api.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str) -> dict[str, Any]:
        """One of them."""
        return await front.model(name)

    @api.post("/v1/completions", tags=["models"], response_model=Reply, responses=STREAMED)
    async def completions(body: CompletionRequest, request: Request) -> Any:
        """Complete a text or token ids."""
        return await _answer(front, body, request.state.request_id)

    @api.post("/v1/chat/completions", tags=["models"], response_model=Reply, responses=STREAMED)
    async def chat(body: ChatRequest, request: Request) -> Any:
        """Answer messages, by the model's own chat template."""
        return await _answer(front, body, request.state.request_id)


async def _answer(front: Front, body: CompletionRequest | ChatRequest, request_id: str) -> Response:
    if not body.stream:
        return JSONResponse(await front.complete(body, request_id))
    events = front.stream(body, request_id)
    first = await anext(events)  # what cannot be answered is refused by its status
    return TokenStream(first, events)


def _evaluations(api: APIRouter, evaluating: Evaluating, folder: Path) -> None:
    @api.post("/v1/evals", status_code=202, tags=["evaluations"])
    async def submit(
        body: EvalRequest, request: Request, idempotency_key: Annotated[str | None, Header(max_length=KEY_CHARACTERS)] = None
    ) -> dict[str, Any]:
        """Queue an evaluation. The same Idempotency-Key and body give the same evaluation."""
        # without a key the request's own id is one, so that a call which a dying replica lost can be repeated
        return await evaluating.submit(body, idempotency_key or f"request {request.state.request_id}")

    @api.get("/v1/evals", tags=["evaluations"])
    async def listed() -> dict[str, Any]:
        """All evaluations, the newest first."""
        return {"object": "list", "data": await evaluating.views()}

    @api.get("/v1/evals/{name}", tags=["evaluations"])
    async def one(name: str) -> dict[str, Any]:
        """Where an evaluation stands, and what it has found so far."""
        return await evaluating.view(name)

    @api.delete("/v1/evals/{name}", tags=["evaluations"])
    async def cancel(name: str) -> dict[str, Any]:
        """Cancel an evaluation that has not ended."""
        return await evaluating.cancel(name)

    @api.get("/v1/evals/{name}/events", tags=["evaluations"], response_class=Response, responses=EVENTS)
    async def events(name: str, last_event_id: Annotated[int, Header(ge=0)] = 0) -> Response:
        """`sample`, `progress`, and at the end `done` or `error`. Last-Event-ID goes on behind that event; 204: nothing is left."""
        ended = (await evaluating.view(name))["status"] in ("done", "failed", "cancelled")
        return await _events(evaluating.events, name, last_event_id, ended)

    @api.get("/v1/evals/{name}/samples/{sample_id}", tags=["evaluations"])
    async def sample(name: str, sample_id: str) -> dict[str, Any]:
        """One sample with its conversation."""
        return await evaluating.sample(name, sample_id)

    @api.get("/v1/evals/{name}/artefacts/{file}", tags=["evaluations"], response_class=File, responses=ARTEFACT)
    async def artefact(name: str, file: str) -> File:
        """`request.json`, `samples.jsonl` (a sample a line) or `summary.json`."""
        await evaluating.view(name)
        path = folder / name / file
        if file not in ARTEFACTS or not path.is_file():
            raise RequestRefused(404, "not_found", f"evaluation {name!r} has no artefact {file!r}")
        kind = "application/json" if path.suffix == ".json" else "application/octet-stream"
        return File(path, filename=f"{name}.{file}", media_type=kind)


def _runs(api: APIRouter, runs: Runs) -> None:
    @api.post("/v1/runs", status_code=202, tags=["runs"])
    async def submit(
        body: RunRequest, request: Request, idempotency_key: Annotated[str | None, Header(max_length=KEY_CHARACTERS)] = None
    ) -> dict[str, Any]:
        """Start a training run. The same Idempotency-Key and body give the same run."""
        return await asyncio.to_thread(runs.submit, body, idempotency_key or f"request {request.state.request_id}")

    @api.get("/v1/runs", tags=["runs"])
    async def listed() -> dict[str, Any]:
        """All runs, the newest first."""
        return {"object": "list", "data": await asyncio.to_thread(runs.views)}

    @api.get("/v1/runs/{run_id}", tags=["runs"])
    async def one(run_id: str) -> dict[str, Any]:
        """As `rollout status --json`, with what its evaluations found."""
        return await asyncio.to_thread(runs.view, run_id)

    @api.delete("/v1/runs/{run_id}", tags=["runs"])
    async def cancel(run_id: str) -> dict[str, Any]:
        """End a run that has not finished."""
        return await runs.cancel(run_id)

    @api.post("/v1/runs/{run_id}/resume", status_code=202, tags=["runs"])
    async def resume(run_id: str) -> dict[str, Any]:
        """Go on with a run that was stopped, cancelled, killed, or failed."""
        return await asyncio.to_thread(runs.resume, run_id)

    @api.get("/v1/runs/{run_id}/metrics", tags=["runs"])
    async def metrics(run_id: str) -> dict[str, Any]:
        """A record a training step."""
        return {"object": "list", "data": await asyncio.to_thread(runs.metrics, run_id)}

    @api.get("/v1/runs/{run_id}/timeline", tags=["runs"])
    async def timeline(run_id: str) -> dict[str, Any]:
        """Groups by state, and backlog, age and occupancy of each stage, over the seconds that the run ran."""
        return {"object": "list", "data": await asyncio.to_thread(runs.timeline, run_id)}

    @api.get("/v1/runs/{run_id}/evaluations/{evaluation}/samples", tags=["runs"])
    async def samples(run_id: str, evaluation: str) -> dict[str, Any]:
        """The samples of one evaluation of the run, with their turns."""
        return {"object": "list", "data": await asyncio.to_thread(runs.samples, run_id, evaluation)}

    @api.get("/v1/runs/{run_id}/events", tags=["runs"], response_class=Response, responses=EVENTS)
    async def events(run_id: str, last_event_id: Annotated[int, Header(ge=0)] = 0) -> Response:
        """`progress` of each step, and at the end `done` or `error`. Last-Event-ID goes on behind that event."""
        ended = (await asyncio.to_thread(runs.view, run_id))["status"] in ("finished", "failed", "cancelled", "stopped")
        return await _events(runs.events, run_id, last_event_id, ended)


async def _events(events: EventsOf, name: str, after: int, ended: bool) -> Response:
    if ended and not await events(name, after, 0.0):
        return Response(status_code=204)
    stream = event_stream(events, name, after)
    return StreamingResponse(stream, media_type="text/event-stream", headers={"cache-control": "no-store"})


async def event_stream(events: EventsOf, name: str, after: int) -> AsyncIterator[str]:
    """Ends behind the last event. A silence longer than EVENT_WAIT_S is a comment, so that proxies keep the connection.

    What is there travels in one piece, and what comes within EVENT_PAUSE_S in the next: a piece costs a core a millisecond.
    """
    yield "retry: 1000\n\n"
    while True:
        found = await events(name, after, EVENT_WAIT_S)
        yield "".join(_sent(event) for event in found) or ": waiting\n\n"
        if found and found[-1]["event"] in ("done", "error"):
            return
        after = found[-1]["id"] if found else after
        await asyncio.sleep(EVENT_PAUSE_S)


def _sent(event: dict[str, Any]) -> str:
    return f"id: {event['id']}\nevent: {event['event']}\ndata: {json.dumps(event['data'], ensure_ascii=False)}\n\n"


async def _invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    body = getattr(request.scope["route"], "body_field", None)
    return refused(request, invalid(error.errors(), error.body, body.field_info.annotation if body is not None else BaseModel))


async def _no_route(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, RecursionError):  # the body's own parser had enough of it
        return refused(request, Refusal(400, "invalid_request", TOO_DEEP))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    message = f"{request.method} {request.url.path}: {error.detail}"
    headers = {"allow": _methods(request)} if error.status_code == 405 else None
    return refused(request, Refusal(error.status_code, code, message), headers)


def _methods(request: Request) -> str:
    """All that the path knows: routes that share it are separate ones, of which the router names the first."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] != Match.NONE]
    return ", ".join(sorted({method for route in routes for method in route.methods}))
