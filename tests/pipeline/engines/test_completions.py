from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from pipeline.config.models import Engine as EngineSettings
from pipeline.engines.base import GenerateRequest, ScoreRow, Version
from pipeline.engines.completions import CompletionsEngine
from pipeline.engines.renderer import ChatRenderer
from pipeline.engines.torch_engine import TorchEngine
from pipeline.errors import BadReply, EngineError, EngineUnavailable, RowRefused, SwapTimeout
from pipeline.records import Sampling
from tests.pipeline.engines.standin import serving

SAMPLED = Sampling(temperature=1.3, top_p=0.95, max_tokens=12)
REQUESTS = [GenerateRequest(f"{i}.0.0", np.asarray([3, 4 + i, 6], np.int32), SAMPLED, 7 + i) for i in range(5)]
ROWS = [ScoreRow(f"{i}.0", np.arange(3, 6 + i, dtype=np.int32), 1 + i) for i in range(4)]


class Api:
    """A completions API over the embedded engine. leaves_out: fields that its replies lack; status: of every reply."""

    def __init__(self, engine: TorchEngine, renderer: ChatRenderer) -> None:
        self._engine, self._renderer = engine, renderer
        self.leaves_out: set[str] = set()
        self.status = 200
        self.change: Any = None
        routes = [Route("/v1/models", self.models), Route("/v1/completions", self.completions, methods=["POST"])]
        self.app = Starlette(routes=routes)

    async def models(self, request: Request) -> JSONResponse:
        return JSONResponse({"data": [{"id": "tiny"}]})

    async def completions(self, request: Request) -> JSONResponse:
        body = await request.json()
        if self.status != 200 or body["model"] != "tiny":
            return JSONResponse({"error": "no"}, self.status if self.status != 200 else 404)
        choice = await self._choice(body)
        for name in self.leaves_out:
            choice.pop(name, None)
        if self.change is not None:
            self.change(choice)
        return JSONResponse({"choices": [choice]})

    async def _choice(self, body: dict[str, Any]) -> dict[str, Any]:
        prompt = np.asarray(body["prompt"], np.int32)
        if "prompt_logprobs" in body:
            row = (await self._engine.score([ScoreRow("0", prompt, 1)], "full"))[0]
            return {"prompt_logprobs": [None, *map(self._entry, prompt[1:], row.full_logprobs, [body["prompt_logprobs"]] * 99)]}
        sampling = Sampling(body["temperature"], body["top_p"], max(0, body["top_k"]), body["max_tokens"])
        said = (await self._engine.generate([GenerateRequest("0", prompt, sampling, body["seed"])], Version()))[0]
        return {
            "text": self._renderer.decode(said.token_ids),
            "token_ids": said.token_ids.tolist(),
            "logprobs": {"token_logprobs": said.logprobs.tolist()},
            "finish_reason": said.finish_reason,
        }

    def _entry(self, token: int, logprobs: np.ndarray, count: int) -> dict[str, Any]:
        order = np.argsort(-logprobs).tolist()
        named = dict.fromkeys([int(token), *order[:count]])
        return {str(each): {"logprob": float(logprobs[each]), "rank": order.index(each) + 1} for each in named}


@asynccontextmanager
async def api(folder: Path, **options: Any) -> AsyncIterator[tuple[Api, CompletionsEngine, TorchEngine]]:
    plain = TorchEngine(folder, None, EngineSettings(slots=8))
    made = Api(plain, ChatRenderer.load(folder))
    async with serving(made.app) as url:
        settings = EngineSettings(kind="openai", url=f"{url}/v1", call_timeout_s=5.0)
        engine = CompletionsEngine(folder, settings, settings, **options)
        yield made, engine, plain
        await engine.close()
    await plain.close()


async def test_says_and_scores_what_the_engine_behind_the_api_does(folder: Path) -> None:
    async with api(folder, for_training=True) as (_, engine, plain):
        for ours, theirs in zip(await engine.generate(REQUESTS, Version()), await plain.generate(REQUESTS, Version()), strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
            assert (ours.request_id, ours.finish_reason) == (theirs.request_id, theirs.finish_reason)
        for ours, theirs in zip(await engine.score(ROWS, "topk", 3), await plain.score(ROWS, "topk", 3), strict=True):
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
            assert (ours.topk_ids == theirs.topk_ids).all()
            np.testing.assert_allclose(ours.topk_logprobs, theirs.topk_logprobs, atol=1e-5)
        assert (await engine.info()).model == "tiny"


@pytest.mark.parametrize("missing", ["token_ids", "logprobs"])
async def test_a_server_without_token_ids_is_for_evaluations_and_not_for_training(folder: Path, missing: str) -> None:
    async with api(folder, for_training=True) as (server, engine, _):
        server.leaves_out = {missing}
        with pytest.raises(EngineError, match="evaluated and not trained on"):
            await engine.generate(REQUESTS, Version())
    async with api(folder) as (server, engine, plain):
        server.leaves_out = {missing}
        renderer = ChatRenderer.load(folder)
        for ours, theirs in zip(await engine.generate(REQUESTS, Version()), await plain.generate(REQUESTS, Version()), strict=True):
            assert renderer.decode(ours.token_ids) == renderer.decode(theirs.token_ids)
            assert np.isnan(ours.logprobs).all()


async def test_a_server_that_does_not_score_a_prompt_is_told_so(folder: Path) -> None:
    async with api(folder) as (server, engine, _):
        server.leaves_out = {"prompt_logprobs"}
        with pytest.raises(EngineError, match="cannot score"):
            await engine.score(ROWS)


async def test_a_missing_entry_is_an_error_and_not_a_zero(folder: Path) -> None:
    async with api(folder) as (server, engine, _):
        server.change = lambda choice: choice["prompt_logprobs"][-1].clear()
        with pytest.raises(BadReply, match="no logprob of the given token"):
            await engine.score(ROWS[:1])
        server.change = lambda choice: choice["prompt_logprobs"].pop()
        with pytest.raises(BadReply, match="2 prompt logprobs for 3 tokens"):
            await engine.score(ROWS[:1])


@pytest.mark.parametrize(("status", "error"), [(400, RowRefused), (429, EngineUnavailable), (500, EngineUnavailable)])
async def test_faults_by_status(folder: Path, status: int, error: type[Exception]) -> None:
    async with api(folder) as (server, engine, _):
        server.status = status
        with pytest.raises(error, match=str(status)):
            await engine.generate(REQUESTS[:1], Version())
        server.status = 200
        assert len(await engine.generate(REQUESTS, Version())) == 5


async def test_it_takes_no_new_weights(folder: Path) -> None:
    async with api(folder, version=2) as (_, engine, _):
        assert (await asyncio.wait_for(engine.generate(REQUESTS[:1], Version(exact=2)), 5))[0].weight_version == 2
        with pytest.raises(SwapTimeout, match="takes no new weights"):
            await engine.generate(REQUESTS, Version(3))


async def test_a_model_that_the_server_does_not_have_is_refused(folder: Path) -> None:
    async with api(folder) as (_, engine, _):
        engine._model = "large"
        with pytest.raises(EngineError, match=r"no model 'large'; it lists \['tiny'\]"):
            await engine.info()
