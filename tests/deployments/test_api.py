"""The HTTP routes without Ray: OpenAI's form, errors, limits, the token, evaluations and their events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from deployments.api import make_api
from deployments.gate import GateRules
from pipeline.engines.renderer import ChatRenderer
from pipeline.errors import EngineError, EngineUnavailable, RequestRefused
from pipeline.evaluation.jobs import Jobs
from pipeline.evaluation.plan import EvalRequest, Plan
from pipeline.evaluation.store import JobStore
from pipeline.paths import SharedPaths
from pipeline.service.arguments import token_digest
from pipeline.service.front import Front, Opened
from pipeline.service.models import Model
from pipeline.service.runs import Runs
from tests.pipeline.evaluation.test_jobs import Player, plan
from tests.pipeline.evaluator.parts import inline
from tests.pipeline.service.parts import CONTEXT, Reverser, letters_folder

RULES = GateRules(loopback=True, token_sha256=None, max_body_bytes=4000)


class Backend:
    def __init__(self, engine: Reverser, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        self.fault: Exception | None = None

    async def open(self, name: str) -> Opened:
        if self.fault is not None:
            raise self.fault
        if name != "live":
            raise RequestRefused(404, "model_not_found", f"{name!r} is not there", "model")
        return Opened(Model("live", self.folder, 3), await self.engine.info(), self.engine)

    async def listed(self):
        return [Model("live", self.folder, 3), Model("r1/checkpoints/step_000002", self.folder, 2)]


class LocalJobs(Jobs):
    """`deployments.api.Evaluating` in one process."""

    async def views(self):
        return super().views()

    async def view(self, name):
        return super().view(name)

    async def sample(self, name, sample_id):
        return super().sample(name, sample_id)

    async def counts(self):
        return super().counts()


class World:
    def __init__(self, api: FastAPI, client: httpx.AsyncClient, backend: Backend, jobs: LocalJobs) -> None:
        self.api, self.client, self.backend, self.jobs = api, client, backend, jobs

    async def post(self, path: str, **body):
        return await self.client.post(path, json=body)


@asynccontextmanager
async def world(
    folder: Path,
    rules: GateRules = RULES,
    *,
    max_in_flight: int = 8,
    deadline_s: float = 5.0,
    context: int = CONTEXT,
    planned: Callable[[EvalRequest], Plan] = plan,
    **limits,
):
    renderer = ChatRenderer.load(letters_folder(folder / "letters"))
    backend = Backend(Reverser(renderer, context=context), folder / "letters")
    jobs = LocalJobs(JobStore(folder / "evals"), Player(), planned, 0.9, offload=inline, **limits)
    await jobs.start()
    front = Front(backend, deadline_s, max_in_flight, clock=lambda: 1000.0, new_seed=lambda: 5)
    runs = Runs(SharedPaths(folder / "runs"), folder, lambda arguments, output: None)
    api = make_api(backend, jobs, front, runs, rules, folder / "evals")
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app=api), base_url="http://127.0.0.1:8000") as client:
            yield World(api, client, backend, jobs)
    finally:
        await jobs.close()


@asynccontextmanager
async def listening(api: FastAPI):
    """The address of a server of it."""
    server = uvicorn.Server(uvicorn.Config(api, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            await asyncio.sleep(0.01)
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving


@pytest.fixture
async def here(tmp_path):
    async with world(tmp_path) as made:
        yield made


def error_of(response: httpx.Response, status: int) -> dict:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"type", "code", "message", "param", "request_id"} and "Traceback" not in response.text
    assert error["request_id"] == response.headers["x-request-id"]
    return error


def events_of(text: str) -> list[dict]:
    """Server-sent events as a client reads them."""
    events = []
    for block in text.split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.splitlines() if not line.startswith(":"))
        if "data" in fields:
            events.append({"id": fields.get("id"), "event": fields.get("event"), "data": fields["data"]})
    return events


async def test_health_and_models(here):
    assert (await here.client.get("/healthz")).json() == {"status": "ok", "model": "live", "weight_version": 3}
    data = (await here.client.get("/v1/models")).json()["data"]
    assert [(model["id"], model["object"], model["weight_version"]) for model in data] == [
        ("live", "model", 3),
        ("r1/checkpoints/step_000002", "model", 2),
    ]
    assert [(await here.client.get(f"/v1/models/{model['id']}")).json() for model in data] == data
    assert "known are ['live'" in error_of(await here.client.get("/v1/models/none"), 404)["message"]


async def test_a_completion_in_the_form_of_openai(here):
    reply = (await here.post("/v1/completions", prompt=["abc", "de"], n=2, max_tokens=2, return_token_ids=True)).json()
    assert (reply["object"], reply["created"], reply["model"], reply["system_fingerprint"]) == (
        "text_completion", 1000, "live", "weights-3"
    )  # fmt: skip
    assert [(c["index"], c["text"], c["finish_reason"]) for c in reply["choices"]] == [
        (0, "cb", "length"), (1, "cb", "length"), (2, "ed", "length"), (3, "ed", "length")
    ]  # fmt: skip
    assert reply["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13}
    ids = reply["choices"][0]["prompt_token_ids"]
    again = (await here.post("/v1/completions", prompt=ids, max_tokens=2, return_token_ids=True)).json()
    assert again["choices"][0]["text"] == "cb" and again["choices"][0]["token_ids"] == ids[:0:-1]


async def test_log_probabilities_as_lm_eval_reads_them(here):
    body = {"prompt": "abc", "max_tokens": 1, "echo": True, "logprobs": 1, "temperature": 0}
    choice = (await here.client.post("/v1/completions", json=body)).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "abcc" and logprobs["tokens"] == ["a", "b", "c", "c"] and logprobs["text_offset"] == [0, 1, 2, 3]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    for token, value, top in list(zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True))[1:]:
        assert top[token] == value and len(top) == 2


async def test_chat_with_log_probabilities_and_a_stop(here):
    messages = [{"role": "user", "content": [{"type": "text", "text": "ab"}, {"type": "text", "text": "cd"}]}]
    body = {"messages": messages, "logprobs": True, "top_logprobs": 2, "stop": "b", "seed": 1, "user": "me", "max_tokens": None}
    reply = (await here.client.post("/v1/chat/completions", json=body)).json()
    (choice,) = reply["choices"]
    assert (choice["message"]["content"], choice["finish_reason"], reply["object"]) == ("dc", "stop", "chat.completion")
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["<ans>", "d", "c", "b"]
    assert len(choice["logprobs"]["content"][0]["top_logprobs"]) == 2


async def test_a_stream_says_what_the_whole_reply_says(here):
    messages = [{"role": "user", "content": "abc"}]
    body = {"messages": messages, "n": 2, "stream": True, "stream_options": {"include_usage": True}}
    response = await here.client.post("/v1/chat/completions", json=body)
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, done = events_of(response.text)
    chunks = [json.loads(event["data"]) for event in events]
    assert done["data"] == "[DONE]" and {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    said = ["", ""]
    for chunk in chunks[:-1]:
        for choice in chunk["choices"]:
            said[choice["index"]] += choice["delta"].get("content", "")
    assert said == ["cba", "cba"] and chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] > 0
    response = await here.post("/v1/completions", prompt="abc", stream=True)
    assert [json.loads(event["data"])["choices"][0]["text"] for event in events_of(response.text)[:-1]] == ["c", "b", "a", ""]


def joined(text: str) -> dict[str, Any]:
    """The chunks of a stream of text completions, as the reply that they make up."""
    *events, done = events_of(text)
    *chunks, last = [json.loads(event["data"]) for event in events]
    assert done["data"] == "[DONE]" and last["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        (part,) = chunk["choices"]
        choice = choices.setdefault(part["index"], {"index": part["index"], "text": "", "finish_reason": None})
        assert choice["finish_reason"] is None, "nothing comes behind the end"
        choice |= {"text": choice["text"] + part["text"], "finish_reason": part["finish_reason"]}
        for key in ("prompt_token_ids", "token_ids"):
            choice[key] = choice.get(key, []) + part[key]
        for key, values in (part["logprobs"] or {}).items():
            choice.setdefault("logprobs", {}).setdefault(key, []).extend(values)
    head = {key: last[key] for key in ("object", "created", "model", "system_fingerprint")}
    return head | {"choices": [choices[index] for index in sorted(choices)], "usage": last["usage"]}


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("echo", [True, False])
async def test_the_chunks_of_a_stream_make_up_the_whole_reply(here, streams, echo):
    here.backend.engine.streams = streams
    body = {"prompt": ["abc", "de"], "n": 2, "logprobs": 2, "echo": echo, "return_token_ids": True, "stop": ["a"], "max_tokens": 5}
    whole = (await here.post("/v1/completions", **body)).json()
    streamed = joined((await here.post("/v1/completions", **body, stream=True, stream_options={"include_usage": True})).text)
    assert streamed == {key: whole[key] for key in streamed}


async def test_tokens_are_told_as_they_are_made_and_a_client_that_goes_frees_the_engine(here):
    engine = here.backend.engine
    engine.said = asyncio.Semaphore(1)
    body = {"messages": [{"role": "user", "content": "abc"}], "n": 2, "stream": True}
    async with listening(here.api) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            lines = response.aiter_lines()
            deltas = []
            async for line in lines:
                deltas += [json.loads(line[6:])["choices"][0]] if line.startswith("data: ") else []
                if len(deltas) == 2:
                    break
            assert [(each["index"], each["delta"]) for each in deltas] == [
                (0, {"role": "assistant", "content": ""}), (1, {"role": "assistant", "content": ""})
            ]  # fmt: skip
            engine.said.release()
            async for line in lines:
                deltas += [json.loads(line[6:])["choices"][0]] if line.startswith("data: ") else []
                if len(deltas) == 4:
                    break
            assert [(each["index"], each["delta"]["content"]) for each in deltas[2:]] == [(0, "c"), (1, "c")]
            assert engine.streaming == 1
        async with asyncio.timeout(5.0):
            while engine.streaming:
                await asyncio.sleep(0.01)


async def test_a_stream_that_fails_says_so_in_its_last_event(here):
    here.backend.engine.breaks = [EngineError("the weights are broken")]
    response = await here.post("/v1/completions", prompt="abc", stream=True)
    *_, last = [json.loads(event["data"]) for event in events_of(response.text)]
    assert last["error"]["code"] == "engine_error" and last["error"]["request_id"] == response.headers["x-request-id"]
    here.backend.fault = EngineUnavailable("gone")
    assert error_of(await here.post("/v1/completions", prompt="abc", stream=True), 503)["code"] == "engine_unavailable"


async def test_a_stream_has_a_deadline_and_counts_while_it_lasts(tmp_path):
    async with world(tmp_path, max_in_flight=1, deadline_s=0.3) as here:
        here.backend.engine.said = asyncio.Semaphore(2)
        asked = asyncio.create_task(here.post("/v1/completions", prompt="abc", stream=True))
        async with asyncio.timeout(5.0):
            while not here.backend.engine.streaming:
                await asyncio.sleep(0.01)
        assert error_of(await here.post("/v1/completions", prompt="a"), 429)["code"] == "too_many_requests"
        *_, last = [json.loads(event["data"]) for event in events_of((await asked).text)]
        assert last["error"]["code"] == "deadline" and here.backend.engine.streaming == 0
        assert (await here.post("/v1/completions", prompt="a")).status_code == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "a", "n": 0}, "n"),
        ({"prompt": "a", "temperature": -1}, "temperature"),
        ({"prompt": "a", "top_p": 0}, "top_p"),
        ({"prompt": "a", "logprobs": 21}, "logprobs"),
        ({"prompt": "a", "presence_penalty": 0.5}, "presence_penalty"),
        ({"prompt": "a", "logit_bias": {"1": 2}}, "logit_bias"),
        ({"prompt": "a", "suffix": "b"}, "suffix"),
        ({"prompt": "a", "frobnicate": 1}, "frobnicate"),
        ({"prompt": "a", "max_tokens": -1}, "max_tokens"),
        ({"prompt": "a", "best_of": 3}, "best_of"),
        ({"prompt": "a", "top_k": 2**31}, "top_k"),
        ({"prompt": "a", "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": "a" * 200}, "prompt"),
        ({"prompt": [[False]]}, "prompt"),
        ({"prompt": "a", "n": True}, "n"),
        ({"prompt": "\ud800"}, "prompt"),
        ({"prompt": ["a"] * 128, "n": 128}, "n"),
    ],
)
async def test_a_wrong_completion_names_the_key(here, body, param):
    content = json.dumps(body)  # httpx itself would refuse half a surrogate pair
    response = await here.client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    error = error_of(response, 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] is None if param is None else (error["param"] or "").startswith(param)


@pytest.mark.parametrize(
    ("path", "content", "param", "message"),
    [
        ("completions", b'{"prompt": "a", "n": 129}', "n", "n: 129 is out of bounds, must be <= 128"),
        ("completions", b'{"prompt": [-1]}', "prompt.0", "prompt.0: -1 is out of bounds, must be >= 0"),
        ("completions", b'{"prompt": {"a": 1}}', "prompt", "prompt: {'a': 1}: input should be a valid string"),
        ("completions", b'{"prompt": "a", "temprature": 1}', "temprature", "unknown key temprature; did you mean temperature?"),
        ("completions", b'{"prompt": "a", "best_of": 3}', "best_of", "best_of: 3 is not supported; leave it out"),
        ("completions", 600 * b'{"a":' + b"1" + 600 * b"}", "a", "a: lists and objects are nested deeper than 100"),
        ("completions", 1900 * b"[" + 1900 * b"]", None, "lists and objects are nested deeper than 100"),
        ("completions", b'{"prompt": "a", "user": "\\ud800"}', "user", "user: a text holds half a surrogate pair"),
        ("completions", b'{"prompt": "a", "stop": [' + 16 * b'"x",' + b'"x"]}', "stop", "stop: ['x', 'x'"),
        ("completions", b'{"prompt": "a", "stop": "' + 257 * b"x" + b'"}', "stop", "stop: 'xxx"),
        ("completions", b"", None, "a JSON body is required"),
        ("completions", b"[]", None, "the body: []: input should be a valid dictionary"),
        ("completions", b"{", None, "the body is no JSON: "),
        ("chat/completions", b'{"messages": [{"content": "a"}]}', "messages.0.role", "messages.0.role: this key is required"),
        ("completions", b'{"prompt": "a", "stop": ["b", "c\\ufffd"]}', "stop.1", "stop.1: 'c\ufffd': string should match pattern"),
        ("chat/completions", b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": 3, "max_completion_tokens": 4}',
         "max_completion_tokens", "max_completion_tokens: 4 stands beside max_tokens 3: say one of the two"),
        ("chat/completions", b'{"messages": [{"role": "assistant", "content": null, "tool_calls": [{"id": "1"}]}]}',
         "messages.0.tool_calls", "messages.0.tool_calls: [{'id': '1'}]: list should have at most 0 items"),
        ("chat/completions", b'{"messages": [{"role": "tool", "tool_call_id": "1", "content": "a"}]}', "messages.0.tool_call_id",
         "messages.0.tool_call_id: '1' is not supported"),
        ("runs", b'{"config": {"student": 1}}', "config", "student: "),
        (
            "chat/completions", b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "messages.0.content",
            "messages.0.content: a part of type 'image_url' is not supported",
        ),
        ("evals", b'{"datasets": [{"items": [{"prompt": "a", "answr": "b"}]}]}', "datasets.0.items.0.answr",
         "unknown key datasets.0.items.0.answr; did you mean datasets.0.items.0.answer?"),
        ("evals", b'{"datasets": [{"items": []}]}', "datasets.0.items", "datasets.0.items: []: list should have at least 1 item"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_told_by_key_value_and_bound(here, path, content, param, message):
    headers = {"content-type": "application/json"}
    error = error_of(await here.client.post(f"/v1/{path}", content=content, headers=headers), 400)
    assert error["param"] == param and error["message"].startswith(message), error


async def test_a_body_that_is_not_said_to_be_json_is_refused(here):
    refused = await here.client.post("/v1/completions", data={"prompt": "a"})
    assert "content-type: application/json" in error_of(refused, 400)["message"]


@pytest.mark.parametrize("path", ["/v1/models", "/v1/evals", "/v1/runs/none/events", "/healthz", "/metrics"])
async def test_a_query_parameter_is_refused_by_name(here, path):
    error = error_of(await here.client.get(path, params={"limit": 3}), 400)
    assert error["param"] == "limit" and "'limit'" in error["message"]


async def test_a_prompt_that_fills_the_context_is_refused_with_openais_code(here):
    error = error_of(await here.post("/v1/completions", prompt="a" * CONTEXT), 400)
    assert error["code"] == "context_length_exceeded"
    assert error["message"].startswith(f"This model's maximum context length is {CONTEXT} tokens"), "by which clients know it"
    assert (await here.post("/v1/completions", prompt="a" * CONTEXT, max_tokens=0, echo=True, logprobs=0)).status_code == 200


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_a_prompt_that_no_tokens_could_hold_is_refused_before_it_is_tokenized(here, path, monkeypatch):
    monkeypatch.setattr(ChatRenderer, "encode_text", lambda *_: pytest.fail("tokenized"))
    text = "a" * 3000
    body = {"prompt": text} if path == "completions" else {"messages": [{"role": "user", "content": text}]}
    error = error_of(await here.post(f"/v1/{path}", **body), 400)
    assert error["code"] == "context_length_exceeded" and "the prompt has at least " in error["message"]


@pytest.mark.parametrize("body", [{"prompt": [99999]}, {"prompt": "a", "model": "m"}, {"prompt": "a", "model": "m\0"}])
async def test_what_is_not_there_is_named(here, body):
    error = error_of(await here.post("/v1/completions", **body), 404)
    assert error["param"] in body and error["type"] == "invalid_request_error"


async def test_nothing_is_made_when_no_token_is_asked_for(here):
    reply = (await here.post("/v1/completions", prompt="abc", max_tokens=0)).json()
    assert (reply["choices"][0]["text"], reply["choices"][0]["finish_reason"]) == ("", "length")
    assert reply["system_fingerprint"] == "weights-3" and reply["usage"]["completion_tokens"] == 0
    assert here.backend.engine.requests == []


async def test_errors_have_one_form(here):
    assert error_of(await here.client.get("/nothing"), 404)["code"] == "not_found"
    refused = await here.client.put("/v1/evals/none")
    assert error_of(refused, 405)["code"] == "method_not_allowed" and refused.headers["allow"] == "DELETE, GET"
    response = await here.client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    error_of(response, 400)
    assert error_of(await here.post("/v1/completions", prompt="a", model="m"), 404)["param"] == "model"


@pytest.mark.parametrize(("given", "status"), [("bytes=99999999-", 416), ("bytes=x", 400), ("lines=1-2", 400)])
async def test_a_range_that_is_not_there_is_refused_as_all_is(here, given, status):
    response = await here.client.get("/dashboard/main.js", headers={"range": given})
    error = error_of(response, status)
    assert error["param"] == "range" and repr(given) in error["message"]
    assert ("content-range" in response.headers) == (status == 416)


async def test_a_service_that_ends_answers_what_it_has_begun_and_nothing_else(tmp_path):
    ending = tmp_path / "ending"
    async with world(tmp_path, GateRules(True, None, 4000, ending)) as here:
        assert (await here.client.get("/healthz")).headers["x-in-flight"] == "0"
        here.backend.engine.said = asyncio.Semaphore(0)
        begun = asyncio.create_task(here.post("/v1/completions", prompt="abc", stream=True))
        async with asyncio.timeout(5.0):
            while not here.backend.engine.streaming:
                await asyncio.sleep(0.01)
        ending.touch()
        refused = await here.post("/v1/completions", prompt="abc")
        assert error_of(refused, 503)["code"] == "service_ending" and int(refused.headers["retry-after"]) > 0
        assert (await here.client.get("/healthz")).headers["x-in-flight"] == "1"
        for _ in range(4):
            here.backend.engine.said.release()
        assert (await begun).text.endswith("data: [DONE]\n\n")
        assert (await here.client.get("/healthz")).headers["x-in-flight"] == "0"


async def test_a_request_is_one_line_of_the_log(here, caplog):
    caplog.set_level("INFO", "service")
    await here.client.get("/v1/evals/x%0aforged")
    assert [record.getMessage().count("\n") for record in caplog.records if "forged" in record.getMessage()] == [0]


async def test_a_client_that_goes_is_no_error_of_the_service(here, monkeypatch):
    async def long(name: str) -> Opened:
        await asyncio.sleep(60.0)
        raise AssertionError("nobody waits for this")

    with monkeypatch.context() as patched:
        patched.setattr(here.backend, "open", long)
        asked = asyncio.create_task(here.post("/v1/completions", prompt="a"))
        await asyncio.sleep(0.05)
        asked.cancel()
        await asyncio.wait([asked])
    assert 'status="499"' in (await here.client.get("/metrics")).text


async def test_what_went_wrong_inside_stays_inside(here, caplog):
    for fault, status in [(ValueError("secret /etc"), 500), (EngineError("secret /etc"), 500), (EngineUnavailable("secret"), 503)]:
        here.backend.fault = fault
        response = await here.post("/v1/completions", prompt="a")
        error = error_of(response, status)
        assert "secret" not in response.text and error["type"] == "server_error"
        assert error["request_id"] in caplog.text, "the log has the request id"
    assert int(response.headers["retry-after"]) >= 1


async def test_a_client_may_name_its_request(here):
    response = await here.client.get("/nothing", headers={"x-request-id": "mine-1"})
    assert response.json()["error"]["request_id"] == "mine-1"
    response = await here.client.get("/nothing", headers={"x-request-id": "not <fine>"})
    assert error_of(response, 404)["request_id"] != "not <fine>"


async def test_a_body_has_a_bound_said_or_not(here):
    assert error_of(await here.post("/v1/completions", prompt="a" * 5000), 413)["code"] == "body_too_large"

    async def pieces():
        for _ in range(100):
            yield b"x" * 100

    error_of(await here.client.post("/v1/completions", content=pieces(), headers={"content-type": "application/json"}), 413)


async def test_only_loopback_names_are_served_on_loopback(here):
    for host in ("evil.example:8000", "127.0.0.1.evil.example", ""):
        assert error_of(await here.client.get("/v1/models", headers={"host": host}), 403)["code"] == "foreign_host"
    for host in ("localhost:8000", "[::1]:8000"):
        assert (await here.client.get("/v1/models", headers={"host": host})).status_code == 200


async def test_a_token_is_asked_for_everywhere_but_at_the_door(tmp_path):
    rules = GateRules(loopback=False, token_sha256=token_digest("s3cret"), max_body_bytes=4000)
    async with world(tmp_path, rules) as here:
        for path in ("/healthz", "/", "/dashboard/main.js"):
            assert (await here.client.get(path, headers={"host": "public.example"})).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "Basic s3cret"}, {"authorization": "s3cret"}):
            for path in ("/v1/models", "/v1/evals", "/v1/runs", "/metrics", "/openapi.json", "/nothing"):
                response = await here.client.get(path, headers=headers)
                assert (
                    error_of(response, 401)["type"] == "authentication_error" and response.headers["www-authenticate"] == "Bearer"
                )
        good = {"authorization": "Bearer s3cret", "host": "public.example"}
        assert (await here.client.get("/v1/models", headers=good)).status_code == 200


async def test_too_many_at_once_are_told_to_come_back(tmp_path):
    async with world(tmp_path, max_in_flight=2) as here:
        gate = asyncio.Event()
        plain = here.backend.engine.generate

        async def slow(requests, version):
            await gate.wait()
            return await plain(requests, version)

        here.backend.engine.generate = slow
        waiting = [asyncio.create_task(here.post("/v1/completions", prompt="abc")) for _ in range(2)]
        while here.backend.engine.requests or not all(not task.done() for task in waiting):
            await asyncio.sleep(0)
        for _ in range(50):
            await asyncio.sleep(0)
        response = await here.post("/v1/completions", prompt="abc")
        assert error_of(response, 429)["type"] == "rate_limit_error" and int(response.headers["retry-after"]) >= 1
        gate.set()
        assert [(await task).status_code for task in waiting] == [200, 200]
        assert (await here.post("/v1/completions", prompt="abc")).status_code == 200


async def test_an_answer_has_a_deadline(tmp_path):
    async with world(tmp_path, deadline_s=0.05) as here:

        async def never(requests, version):
            await asyncio.Event().wait()

        here.backend.engine.generate = never
        assert error_of(await here.post("/v1/completions", prompt="abc"), 504)["code"] == "deadline"


async def test_the_official_client_raises_its_own_exceptions(tmp_path):
    rules = GateRules(loopback=True, token_sha256=token_digest("s3cret"), max_body_bytes=4000)
    async with world(tmp_path, rules, max_in_flight=1) as here, listening(here.api) as address:
        official = openai.AsyncOpenAI(base_url=f"{address}/v1", api_key="s3cret", max_retries=0)
        async with official, official.with_options(api_key="wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.completions.create(model="live", prompt="abc")
            assert (await official.completions.create(model="live", prompt="abc")).choices[0].text == "cba"
            for fault, raised, code in [
                (RequestRefused(429, "too_many_requests", "later", retry_after_s=1), openai.RateLimitError, "too_many_requests"),
                (EngineUnavailable("gone"), openai.InternalServerError, "engine_unavailable"),
                (RequestRefused(404, "model_not_found", "no", "model"), openai.NotFoundError, "model_not_found"),
            ]:
                here.backend.fault = fault
                with pytest.raises(raised) as caught:
                    await official.completions.create(model="live", prompt="abc")
                assert caught.value.code == code and caught.value.request_id == caught.value.body["request_id"]


async def wait_done(here: World, name: str) -> list[dict]:
    return events_of((await here.client.get(f"/v1/evals/{name}/events", timeout=30)).text)


@pytest.mark.looptime
async def test_an_evaluation_from_submission_to_artefacts(here):
    response = await here.post("/v1/evals", n=2, k=2, datasets=[{"items": [{"prompt": "x", "answer": "y"}]}])
    assert response.status_code == 202 and response.json()["status"] == "queued"
    name = response.json()["id"]
    events = await wait_done(here, name)
    assert [event["event"] for event in events] == ["sample", "progress"] * 4 + ["done"]
    view = (await here.client.get(f"/v1/evals/{name}")).json()
    assert view["status"] == "done" and view["progress"] == {"done": 4, "total": 4} and view["weight_version"] == 7
    assert set(view["results"]["words"]) == {"accuracy", "accuracy_all", "solved", "scored", "done", "total", "pass@k"}
    assert (await here.client.get("/v1/evals")).json()["data"] == [view]
    rest = await here.client.get(f"/v1/evals/{name}/events", headers={"last-event-id": events[3]["id"]})
    assert events_of(rest.text) == events[4:]
    over = await here.client.get(f"/v1/evals/{name}/events", headers={"last-event-id": events[-1]["id"]})
    assert over.status_code == 204
    for file, path in view["artefacts"].items():
        assert (await here.client.get(path)).text, file
    lines = (await here.client.get(view["artefacts"]["samples.jsonl"])).text.splitlines()
    assert len(lines) == 4
    sample = (await here.client.get(f"/v1/evals/{name}/samples/1.1")).json()
    assert sample["messages"] == [["user", "hi"]] and sample["reward"] == 0.0
    error_of(await here.client.delete(f"/v1/evals/{name}"), 409)


@pytest.mark.looptime
async def test_keys_queues_and_cancellation_over_http(tmp_path):
    async with world(tmp_path, waiting=1) as here:
        headers = {"idempotency-key": "k1"}
        first = await here.client.post("/v1/evals", json={"n": 2}, headers=headers)
        again = await here.client.post("/v1/evals", json={"n": 2}, headers=headers)
        assert (first.status_code, again.status_code) == (202, 202) and first.json()["id"] == again.json()["id"]
        other = await here.client.post("/v1/evals", json={"n": 3}, headers=headers)
        assert error_of(other, 409)["code"] == "idempotency_key_reused"
        second = (await here.post("/v1/evals")).json()["id"]
        third = await here.post("/v1/evals")
        assert error_of(third, 429)["code"] == "queue_full" and int(third.headers["retry-after"]) >= 1
        assert (await here.client.delete(f"/v1/evals/{second}")).json()["status"] == "cancelled"
        error_of(await here.client.delete(f"/v1/evals/{second}"), 409)


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/v1/evals/none", 404),
        ("/v1/evals/none/events", 404),
        ("/v1/evals/none/samples/0.0", 404),
        ("/v1/evals/none/artefacts/request.json", 404),
        ("/v1/evals/..%2f..%2fx/artefacts/request.json", 404),
    ],
)
async def test_evaluations_that_are_not_there(here, path, status):
    error_of(await here.client.get(path), status)


async def test_wrong_evaluations_name_the_key(here):
    cases = [
        ({"n": 0}, "n"), ({"datasets": [{}]}, "datasets.0"), ({"datasets": [{"items": []}]}, "datasets.0.items"),
        ({"datasets": [{"items": [{"prompt": "a", "answr": "b"}]}]}, "datasets.0.items.0.answr"), ({"k": "many"}, "k"),
    ]  # fmt: skip
    for body, param in cases:
        assert error_of(await here.client.post("/v1/evals", json=body), 400)["param"].startswith(param)
    long = await here.client.post("/v1/evals", json={}, headers={"idempotency-key": "k" * 300})
    assert error_of(long, 400)["param"] == "idempotency-key"
    error_of(await here.client.get("/v1/evals/none/events", headers={"last-event-id": "-1"}), 400)


async def test_runs_over_http(here):
    assert (await here.client.get("/v1/runs")).json() == {"object": "list", "data": []}
    for method, path in [
        ("GET", ""), ("GET", "/events"), ("GET", "/metrics"), ("GET", "/timeline"), ("GET", "/evaluations/eval_000000/samples"),
        ("DELETE", ""), ("POST", "/resume"),
    ]:  # fmt: skip
        error_of(await here.client.request(method, f"/v1/runs/none{path}"), 404)
    assert error_of(await here.post("/v1/runs"), 400)["param"] == "config"
    for name in ("a\0b", "a" * 3000):
        assert error_of(await here.post("/v1/runs", config=name), 404)["param"] == "config"
    error_of(await here.client.get(f"/v1/runs/{'a' * 500}"), 404)
    error_of(await here.client.get("/v1/runs/a%00b"), 404)
    assert error_of(await here.post("/v1/runs", config="nothing.yaml"), 404)["param"] == "config"
    assert "unknown key studnt" in error_of(await here.post("/v1/runs", config={"studnt": {}}), 400)["message"]


async def test_the_page_asks_for_nothing_from_elsewhere(here):
    """Its parts, and theirs, are all there, and none of them names another host."""
    seen, left = {}, {"/"}
    while left:
        path = left.pop()
        part = await here.client.get(path)
        assert part.status_code == 200, path
        seen[path] = part
        named = re.findall(r"""(?:src|href)="(?!data:|#)([^"]+)"|from "([^"]+)";|@import|url\(""", part.text)
        left |= {str(httpx.URL("/dashboard/").join(one or other)) for one, other in named} - seen.keys()
        addresses = re.findall(r"""https?://[^"'`\s]+""", part.text)
        assert set(addresses) <= {"http://www.w3.org/2000/svg"}, "a name space, which nobody fetches"
    kinds = {path: part.headers["content-type"].partition(";")[0] for path, part in seen.items()}
    assert (
        kinds["/"] == "text/html"
        and kinds["/dashboard/style.css"] == "text/css"
        and kinds["/dashboard/run.js"].endswith("javascript")
    )
    assert "default-src 'self'" in seen["/"].headers["content-security-policy"]
    error_of(await here.client.get("/dashboard/none.js"), 404)
    error_of(await here.client.get("/dashboard/..%2fapi.py"), 404)


async def test_metrics_have_names_and_help(here):
    await here.client.get("/nothing")
    text = (await here.client.get("/metrics")).text
    for line in (
        'rollout_http_requests_total{method="GET",route="unknown",status="404"} 1.0',
        "# HELP rollout_live_weight_version Weight version of the live model.",
        "rollout_completions_in_flight 0.0",
        'rollout_evaluations{status="running"} 0.0',
    ):
        assert line in text


async def test_the_openapi_document_names_every_route_and_the_form_of_errors(here):
    document = (await here.client.get("/openapi.json")).json()
    paths = {
        "/healthz",
        "/metrics",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/evals",
        "/v1/evals/{name}",
    }
    assert paths <= set(document["paths"])
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            refused = operation["responses"]["400"]["content"]["application/json"]["schema"]["$ref"]
            assert refused.endswith("/FaultReply") and "422" not in operation["responses"], (path, method)
