"""What stands in Serve's proxy, over an app that does what Serve does when a replica dies."""

from __future__ import annotations

import httpx
import pytest
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, StreamingResponse

from deployments.gate import MAX_BODY_BYTES
from deployments.proxy import WAITS_S, AskAgain


class Serve:
    """losses: what happens to the first requests: `lost` without a word, or `away`, which Serve says as a text."""

    def __init__(self, *losses: str) -> None:
        self.losses = list(losses)
        self.asked: list[tuple[str, bytes]] = []
        self.waited: list[float] = []

    async def __call__(self, scope, receive, send) -> None:
        request = Request(scope, receive)
        self.asked.append((request.headers["x-request-id"], await request.body()))
        loss = self.losses.pop(0) if self.losses else None
        if loss == "away":
            await PlainTextResponse("Deployment is unavailable", 503)(scope, receive, send)
        elif loss == "torn":
            await StreamingResponse(torn())(scope, receive, send)
        elif loss is None:
            await JSONResponse({"said": "yes"}, 404 if scope["path"] == "/nothing" else 200)(scope, receive, send)

    async def sleep(self, seconds: float) -> None:
        self.waited.append(seconds)

    def client(self) -> httpx.AsyncClient:
        app = AskAgain(self, self.sleep)
        return httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://127.0.0.1:8000")


async def torn():
    yield b"one"
    raise ConnectionError("the replica died")


async def test_what_a_dying_replica_lost_is_asked_again_with_the_same_id_and_body():
    serve = Serve("lost", "away", "lost")
    async with serve.client() as client:
        reply = await client.post("/v1/completions", content=b"abc")
    assert (reply.status_code, reply.json()) == (200, {"said": "yes"})
    assert len(serve.asked) == 4 and len(set(serve.asked)) == 1 and serve.asked[0][1] == b"abc"
    assert serve.waited == list(WAITS_S[:3])


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/v1/evals/e"), ("POST", "/v1/runs/r/resume")])
async def test_what_must_not_happen_twice_is_asked_once(method, path):
    serve = Serve("lost")
    async with serve.client() as client:
        reply = await client.request(method, path, headers={"x-request-id": "mine"})
    assert len(serve.asked) == 1 and reply.status_code == 503
    error = reply.json()["error"]
    assert (error["type"], error["request_id"], reply.headers["x-request-id"]) == ("server_error", "mine", "mine")


async def test_a_service_that_stays_away_is_told_in_the_form_of_all_faults():
    serve = Serve(*["away"] * 9)
    async with serve.client() as client:
        reply = await client.get("/v1/models")
    assert reply.status_code == 503 and int(reply.headers["retry-after"]) >= 1
    assert reply.json()["error"]["code"] == "service_unavailable" and len(serve.asked) == len(WAITS_S) + 1


async def test_what_the_service_itself_says_is_passed_on():
    serve = Serve()
    async with serve.client() as client:
        assert (await client.get("/nothing")).json() == {"said": "yes"}
    assert len(serve.asked) == 1


async def test_a_reply_that_has_begun_is_not_begun_again():
    serve = Serve("torn")
    async with serve.client() as client:
        with pytest.raises(ConnectionError):
            await client.get("/v1/evals/e/events")
    assert len(serve.asked) == 1


async def test_a_body_above_the_bound_is_not_kept():
    serve = Serve("lost")
    async with serve.client() as client:
        reply = await client.post("/v1/completions", content=b"x" * (MAX_BODY_BYTES + 1))
    assert reply.status_code == 503 and len(serve.asked) == 1


async def test_nobody_is_asked_for_a_client_that_has_gone():
    asked = []

    async def app(scope, receive, send) -> None:
        asked.append(scope["path"])
        with pytest.raises(ClientDisconnect):
            await Request(scope, receive).body()

    async def receive():
        return {"type": "http.disconnect"}

    async def send(message) -> None:
        raise AssertionError("nobody listens")

    await AskAgain(app)({"type": "http", "method": "GET", "path": "/v1/models", "headers": []}, receive, send)
    assert asked == ["/v1/models"]
