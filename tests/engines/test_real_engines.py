from __future__ import annotations

import asyncio
import os
import shutil
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from functools import cache
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.config.models import Engine as EngineSettings
from pipeline.engines.base import Completion, GenerateRequest, ScoreRow, Version
from pipeline.engines.launcher import Launcher
from pipeline.engines.served import ServedEngine
from pipeline.engines.weights import WeightStore
from pipeline.errors import RowRefused
from pipeline.records import Sampling
from tests.engines.conftest import FACTS, PARITY

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("versions")]

BOUND = 1e-4
SWAPS = 20
MAX_CONTEXT = 48


@asynccontextmanager
async def engine(
    server: Launcher, folder: Path, weights: WeightStore | None = None, max_context: int | None = None
) -> AsyncIterator[ServedEngine]:
    settings = EngineSettings(kind="vllm", url=server.address(), slots=16, max_context=max_context, call_timeout_s=120.0)
    made = ServedEngine("vllm", folder, weights, settings, urls=settings.urls)
    try:
        yield made
    finally:
        await made.close()


def requests(sampling: Sampling, count: int = 12) -> list[GenerateRequest]:
    random = np.random.default_rng(5)
    prompts = [random.integers(3, 31, 2 + 2 * i).astype(np.int32) for i in range(count)]
    return [GenerateRequest(f"{i}.0.0", prompt, sampling, 2**62 + i) for i, prompt in enumerate(prompts)]


def rows(count: int = 8) -> list[ScoreRow]:
    """The last fills the whole context."""
    random = np.random.default_rng(6)
    lengths = [*(3 + 5 * i for i in range(count - 1)), MAX_CONTEXT]
    return [ScoreRow(f"{i}.0", random.integers(0, 31, n).astype(np.int32), 1 + i % 2) for i, n in enumerate(lengths)]


@cache
def reference(folder: Path) -> AutoModelForCausalLM:
    torch.set_num_threads(1)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@torch.no_grad()
def logits(folder: Path, token_ids: np.ndarray) -> torch.Tensor:
    return reference(folder)(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0]


def sampled_logprobs(folder: Path, request: GenerateRequest, completion: Completion) -> np.ndarray:
    """Of the distribution that was to be sampled from."""
    whole = np.concatenate([request.prompt, completion.token_ids])
    start, settings = len(request.prompt), request.sampling
    scaled = logits(folder, whole)[start - 1 : -1] / (settings.temperature or 1.0)
    if settings.temperature and settings.top_k:
        scaled[scaled < scaled.topk(settings.top_k, -1).values[:, -1:]] = -torch.inf
    if settings.temperature and settings.top_p < 1:
        best, order = scaled.softmax(-1).sort(-1, descending=True)
        outside = torch.zeros_like(scaled, dtype=torch.bool).scatter_(-1, order, best.cumsum(-1) - best >= settings.top_p)
        scaled[outside] = -torch.inf
    logprobs = scaled.log_softmax(-1)
    return logprobs.gather(1, torch.from_numpy(completion.token_ids.astype(np.int64))[:, None])[:, 0].numpy()


def generate_gap(folder: Path, asked: list[GenerateRequest], said: list[Completion]) -> float:
    gaps = [np.abs(sampled_logprobs(folder, a, s) - s.logprobs).max() for a, s in zip(asked, said, strict=True)]
    return float(max(gaps))


async def score_gap(made: ServedEngine, folder: Path) -> float:
    gap = 0.0
    for wanted, top_k in (("sampled", 0), ("topk", 5), ("full", 0)):
        for row, scored in zip(rows(), await made.score(rows(), wanted, top_k), strict=True):
            expected = logits(folder, row.token_ids)[row.start - 1 : -1].log_softmax(-1)
            given = expected.gather(1, torch.from_numpy(row.token_ids[row.start :].astype(np.int64))[:, None])[:, 0]
            pairs = [(scored.logprobs, given)]
            if wanted == "topk":
                best = expected.topk(5, -1)
                assert (best.indices.numpy() == scored.topk_ids).all()
                pairs.append((scored.topk_logprobs, best.values))
            if wanted == "full":
                pairs.append((scored.full_logprobs, expected))
            gap = max(gap, *(float(np.abs(ours - theirs.numpy()).max()) for ours, theirs in pairs))
    return gap


SETTINGS = {
    "generate greedy": Sampling(temperature=0.0, max_tokens=20),
    "generate at temperature 1": Sampling(max_tokens=20),
    "generate at temperature 0.6": Sampling(temperature=0.6, max_tokens=20),
    "generate with top_k 7, top_p 0.9": Sampling(temperature=1.2, top_k=7, top_p=0.9, max_tokens=20),
}


@pytest.mark.parametrize("what", SETTINGS)
async def test_generated_logprobs(
    request: pytest.FixtureRequest, kind: str, server: Launcher, models: list[Path], what: str
) -> None:
    if kind == "sglang" and SETTINGS[what].top_k:
        pytest.skip("SGLang's logprobs are of the uncut distribution: the configuration refuses cuts in training")
    async with engine(server, models[0]) as made:
        asked = requests(SETTINGS[what])
        said = await made.generate(asked, Version())
    request.config.stash[PARITY][kind, what] = gap = generate_gap(models[0], asked, said)
    assert gap < BOUND
    assert {each.finish_reason for each in said} <= {"stop", "length"}
    assert all((each.token_ids[-1] == 2) == (each.finish_reason == "stop") for each in said)
    assert all(2 not in each.token_ids[:-1] for each in said)


async def test_streams(kind: str, server: Launcher, models: list[Path]) -> None:
    asked = requests(SETTINGS["generate greedy"])
    async with engine(server, models[0]) as made:
        whole = await made.generate(asked, Version())
        pieces = [piece async for found in made.stream(asked, Version(), None) for piece in found]
        async with aclosing(made.stream(asked, Version(), None)) as left:
            assert await anext(left)
        assert len(await made.generate(asked[:1], Version())) == 1
    for completion in whole:
        mine = [piece for piece in pieces if piece.request_id == completion.request_id]
        assert [token for piece in mine for token in piece.token_ids.tolist()] == completion.token_ids.tolist()
        assert mine[-1].finish_reason == completion.finish_reason and len(mine) >= min(2, len(completion.token_ids))


async def test_scored_logprobs(request: pytest.FixtureRequest, kind: str, server: Launcher, models: list[Path]) -> None:
    async with engine(server, models[0]) as made:
        request.config.stash[PARITY][kind, "score: given, top-k, full"] = gap = await score_gap(made, models[0])
        with pytest.raises(RowRefused):
            await made.score([ScoreRow("a", np.asarray([3, 31], np.int32), 1)])
    assert gap < BOUND


async def test_swaps(request: pytest.FixtureRequest, kind: str, server: Launcher, models: list[Path], tmp_path: Path) -> None:
    weights = WeightStore(tmp_path / "weights")
    asked, seconds = requests(SETTINGS["generate at temperature 1"]), []
    async with engine(server, models[0], weights) as made:
        for version in range(1, SWAPS + 1):
            publish(weights, version, models[version % 3])
            started = time.monotonic()
            await made.generate(asked[:1], Version(exact=version))
            seconds.append(time.monotonic() - started)
        said = await made.generate(asked, Version(exact=SWAPS))
        generated = generate_gap(models[SWAPS % 3], asked, said)
        scored = await score_gap(made, models[SWAPS % 3])
    table = request.config.stash[PARITY]
    table[kind, f"generate after {SWAPS} swaps"], table[kind, f"score after {SWAPS} swaps"] = generated, scored
    request.config.stash[FACTS].append(f"{kind}: swap and one short sequence: median {sorted(seconds)[SWAPS // 2] * 1e3:.0f} ms")
    assert max(generated, scored) < BOUND


@pytest.mark.fault(31)
async def test_swaps_while_requests_run(
    request: pytest.FixtureRequest, kind: str, server: Launcher, models: list[Path], tmp_path: Path
) -> None:
    """No token carries a version that did not make it."""
    weights = WeightStore(tmp_path / "weights")
    publish(weights, 1, models[1])
    answers: list[tuple[GenerateRequest, Completion]] = []
    async with engine(server, models[0], weights) as made:

        async def play(turns: int) -> None:
            for _ in range(turns):
                asked = requests(SETTINGS["generate at temperature 1"], 4)
                answers.extend(zip(asked, await made.generate(asked, Version()), strict=True))

        players = [asyncio.create_task(play(6)) for _ in range(4)]
        for version in range(2, 7):
            seen = len(answers)
            while len(answers) < seen + 8 and not all(player.done() for player in players):
                await asyncio.sleep(0.005)
            publish(weights, version, models[version % 3])
        await asyncio.gather(*players)
    made_by = {completion.weight_version for _, completion in answers}
    gap = max(generate_gap(models[said.weight_version % 3], [asked], [said]) for asked, said in answers)
    request.config.stash[PARITY][kind, f"generate, {len(made_by)} versions in between"] = gap
    assert len(made_by) >= 3
    assert gap < BOUND


async def test_a_server_that_is_killed_comes_back(
    request: pytest.FixtureRequest, kind: str, launch: Callable[..., Launcher], models: list[Path], tmp_path: Path
) -> None:
    server = launch(models[0])
    weights = WeightStore(tmp_path / "weights")
    publish(weights, 1, models[1])
    settings = EngineSettings(kind="vllm", url="http://127.0.0.1:9", slots=16, call_timeout_s=300.0)
    made = ServedEngine("vllm", models[0], weights, settings, launcher=server)
    asked = requests(SETTINGS["generate at temperature 1"])
    await made.generate(asked, Version(1))
    running = [asyncio.create_task(made.generate(asked, Version(1))) for _ in range(30)]
    await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
    victims = [each for each in psutil.Process(server.pid()).children(recursive=True)]
    started = time.monotonic()
    for victim in victims:
        os.kill(victim.pid, signal.SIGKILL)
    await asyncio.wait({asyncio.create_task(made.generate(asked, Version(1)))})
    request.config.stash[FACTS].append(f"{kind}: killed in the middle, answered again after {time.monotonic() - started:.1f} s")
    for task in running:
        said = await task
        assert generate_gap(models[1], asked, said) < BOUND
    await made.close()


def publish(weights: WeightStore, version: int, source: Path) -> None:
    weights.publish(version, lambda folder: shutil.copytree(source, folder, dirs_exist_ok=True))
