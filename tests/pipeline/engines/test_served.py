from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.models import Engine as EngineSettings
from pipeline.engines.base import GenerateRequest, ScoreRow, Version
from pipeline.engines.renderer import ChatRenderer
from pipeline.engines.served import ServedEngine
from pipeline.engines.torch_engine import TorchEngine
from pipeline.engines.weights import WeightStore
from pipeline.errors import BadReply, ConfigError, EngineUnavailable, RowRefused, SwapTimeout
from pipeline.records import Sampling
from tests.pipeline.engines.conftest import WORDS, make_model
from tests.pipeline.engines.standin import Standin, standin

SAMPLED = Sampling(temperature=1.3, top_p=0.95, max_tokens=12)


@asynccontextmanager
async def served(folder: Path, *servers: Standin, weights: WeightStore | None = None, **options) -> AsyncIterator[ServedEngine]:
    smoothing = options.pop("smoothing", 0.0)
    urls = tuple(options.pop("urls", [server.url for server in servers]))
    settings = EngineSettings(kind="vllm", url=urls, **{"swap_timeout_s": 5.0, "call_timeout_s": 5.0, **options})
    made = ServedEngine("vllm", folder, weights, settings, urls=urls, smoothing=smoothing)
    try:
        yield made
    finally:
        await made.close()


def requests(folder: Path, count: int, sampling: Sampling = SAMPLED) -> list[GenerateRequest]:
    renderer = ChatRenderer.load(folder)
    texts = [WORDS[i % len(WORDS)] * (1 + i % 3) for i in range(count)]
    return [GenerateRequest(f"{i}.0.0", renderer.render((("user", text),)), sampling, 7 + i) for i, text in enumerate(texts)]


def rows(folder: Path, count: int) -> list[ScoreRow]:
    found = [request.prompt for request in requests(folder, count)]
    return [ScoreRow(f"{i}.0", ids, 1 + i % (len(ids) - 1)) for i, ids in enumerate(found)]


async def wait_for(condition) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("other")
    make_model(path, seed=9)
    return path


async def test_says_what_the_engine_behind_the_server_says(folder: Path) -> None:
    asked = [*requests(folder, 9), *requests(folder, 3, Sampling(temperature=0.0, max_tokens=5))]
    asked = [GenerateRequest(str(i), each.prompt, each.sampling, each.seed) for i, each in enumerate(asked)]
    plain = TorchEngine(folder, None, EngineSettings())
    async with standin(folder) as server, served(folder, server) as engine:
        for ours, theirs in zip(await engine.generate(asked, Version()), await plain.generate(asked, Version()), strict=True):
            assert ours.token_ids.tolist() == theirs.token_ids.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
            assert (ours.request_id, ours.finish_reason, ours.weight_version) == (theirs.request_id, theirs.finish_reason, 0)
        info, plain_info = await engine.info(), await plain.info()
        assert (info.vocab_size, info.tokenizer_digest, info.digest) == (
            plain_info.vocab_size,
            plain_info.tokenizer_digest,
            plain_info.digest,
        )
    await plain.close()


@pytest.mark.parametrize(("signal", "top_k"), [("sampled", 0), ("topk", 4), ("full", 0)])
@pytest.mark.parametrize("smoothing", [0.0, 0.05])
async def test_scores_what_the_engine_behind_the_server_scores(folder: Path, signal: str, top_k: int, smoothing: float) -> None:
    asked = [*rows(folder, 7), ScoreRow("nothing", np.asarray([3, 4, 5], np.int32), 3)]
    plain = TorchEngine(folder, None, EngineSettings(), smoothing=smoothing)
    async with standin(folder) as server, served(folder, server, smoothing=smoothing) as engine:
        for ours, theirs in zip(await engine.score(asked, signal, top_k), await plain.score(asked, signal, top_k), strict=True):
            assert ours.row_id == theirs.row_id
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
            for name in ("topk_logprobs", "full_logprobs"):
                assert (getattr(ours, name) is None) == (getattr(theirs, name) is None)
                if getattr(ours, name) is not None:
                    np.testing.assert_allclose(getattr(ours, name), getattr(theirs, name), atol=1e-5)
    await plain.close()


async def test_a_padded_vocabulary_is_scored_and_a_foreign_token_is_refused(tmp_path: Path) -> None:
    make_model(tmp_path, rows=40)
    async with standin(tmp_path) as server, served(tmp_path, server) as engine:
        scored = await engine.score([ScoreRow("a", np.asarray([3, 39, 4], np.int32), 1)], "full", 0)
        assert scored[0].full_logprobs.shape == (2, 40)
        with pytest.raises(RowRefused, match="vocabulary of 40"):
            await engine.score([ScoreRow("a", np.asarray([3, 40], np.int32), 1)])
        with pytest.raises(RowRefused, match="49 tokens"):
            await engine.score([ScoreRow("a", np.full(49, 3, np.int32), 1)])
        longest = np.full(48, 3, np.int32)
        assert len((await engine.score([ScoreRow("a", longest, 47)]))[0].logprobs) == 1
        with pytest.raises(RowRefused, match="outside 1..47"):
            await engine.generate([GenerateRequest("0", longest, SAMPLED, 1)], Version())


@pytest.mark.parametrize("fault", ["fail", "half", "drop", "nan", "text"])
async def test_a_fault_costs_another_try_and_never_a_wrong_answer(folder: Path, fault: str) -> None:
    async with standin(folder) as server, served(folder, server) as engine:
        expected = await engine.generate(requests(folder, 3), Version())
        server.faults = [fault, fault]
        again = await engine.generate(requests(folder, 3), Version())
        assert [each.token_ids.tolist() for each in again] == [each.token_ids.tolist() for each in expected]
        assert server.asked == 4


@pytest.mark.parametrize(("fault", "error"), [("fail", EngineUnavailable), ("drop", BadReply), ("nan", BadReply)])
async def test_a_lasting_fault_is_told_by_its_class(folder: Path, fault: str, error: type[Exception]) -> None:
    async with standin(folder) as server, served(folder, server) as engine:
        server.faults = [fault] * 3
        with pytest.raises(error):
            await engine.score(rows(folder, 2))
        assert len(await engine.score(rows(folder, 2))) == 2


async def test_a_mute_server_ends_the_call_at_its_deadline(folder: Path) -> None:
    async with standin(folder) as server, served(folder, server, call_timeout_s=0.3) as engine:
        await engine.info()
        server.faults = ["slow"]
        with pytest.raises(EngineUnavailable, match="did not answer within"):
            await engine.generate(requests(folder, 1), Version())


async def test_calls_spread_over_servers_and_pass_a_dead_one_by(folder: Path) -> None:
    async with standin(folder) as first, standin(folder) as second:
        async with served(folder, urls=[first.url, "http://127.0.0.1:9", second.url]) as engine:
            await asyncio.gather(*(engine.generate(requests(folder, 1), Version()) for _ in range(10)))
            assert first.asked > 0 and second.asked > 0 and first.asked + second.asked == 10
            first.faults = ["fail"]
            before = second.asked
            await asyncio.gather(*(engine.generate(requests(folder, 1), Version()) for _ in range(4)))
            assert second.asked > before
    async with served(folder, urls=["http://127.0.0.1:9"], call_timeout_s=0.5) as engine:
        with pytest.raises(EngineUnavailable, match=r"http://127.0.0.1:9/info"):
            await engine.generate(requests(folder, 1), Version())


async def test_a_server_of_another_model_is_refused_by_its_shape(folder: Path, tmp_path: Path) -> None:
    make_model(tmp_path, rows=40)
    async with standin(tmp_path) as server, served(folder, server) as engine:
        with pytest.raises(ConfigError, match="40 output rows"):
            await engine.info()


async def test_a_teacher_has_its_own_folder_loaded_into_a_server_that_exists(folder: Path, other: Path) -> None:
    plain = TorchEngine(folder, None, EngineSettings())
    async with standin(other, version=3) as server, served(folder, server) as engine:
        ours, theirs = await engine.score(rows(folder, 1)), await plain.score(rows(folder, 1))
        np.testing.assert_allclose(ours[0].logprobs, theirs[0].logprobs, atol=1e-5)
    await plain.close()


@pytest.mark.fault(31)
async def test_new_weights_wait_for_running_calls_and_no_call_mixes_versions(folder: Path, other: Path, tmp_path: Path) -> None:
    weights = WeightStore(tmp_path / "weights")
    publish(weights, 1, folder)
    engines = {1: TorchEngine(folder, None, EngineSettings()), 2: TorchEngine(other, None, EngineSettings())}
    asked = requests(folder, 4)
    expected = {version: await each.generate(asked, Version()) for version, each in engines.items()}
    async with (
        standin(folder) as server,
        served(folder, server, weights=weights) as engine,
        served(folder, server, weights=weights) as beside,
    ):
        await engine.generate(asked, Version(1))
        server.backend.go_on.clear()
        running = asyncio.create_task(engine.generate(asked, Version(1)))
        await wait_for(lambda: server.backend.generating == 4)
        publish(weights, 2, other)
        later = [asyncio.create_task(each.generate(asked, Version(2))) for each in (engine, beside)]
        pinned = asyncio.create_task(beside.generate(asked, Version(exact=1)))
        await wait_for(lambda: server.backend.generating == 8)  # the pinned one passes the waiting change
        server.backend.go_on.set()
        for version, task in ((1, running), (1, pinned), (2, later[0]), (2, later[1])):
            for ours, theirs in zip(await task, expected[version], strict=True):
                assert ours.weight_version == version
                assert ours.token_ids.tolist() == theirs.token_ids.tolist()
        assert [Path(path).name for path in server.backend.loads] == ["v000001", "v000002"]
        with pytest.raises(SwapTimeout, match="exactly 1"):
            await engine.generate(asked, Version(exact=1))
    for each in engines.values():
        await each.close()


@pytest.mark.fault(31)
async def test_abort_starts_running_calls_again_on_the_new_weights(folder: Path, other: Path, tmp_path: Path) -> None:
    weights = WeightStore(tmp_path / "weights")
    publish(weights, 1, folder)
    async with standin(folder) as server, served(folder, server, weights=weights, swap="abort") as engine:
        await engine.info()
        server.backend.go_on.clear()
        running = asyncio.create_task(engine.generate(requests(folder, 2), Version(1)))
        await wait_for(lambda: server.backend.generating == 2)
        publish(weights, 2, other)
        later = asyncio.create_task(engine.generate(requests(folder, 1), Version(2)))
        await wait_for(lambda: len(server.backend.loads) == 2)
        server.backend.go_on.set()
        assert {each.weight_version for each in [*await running, *await later]} == {2}


async def test_a_version_that_is_never_published_is_a_swap_time_out(folder: Path, tmp_path: Path) -> None:
    weights = WeightStore(tmp_path / "weights")
    publish(weights, 1, folder)
    async with standin(folder) as server, served(folder, server, weights=weights, swap_timeout_s=0.5) as engine:
        await engine.generate(requests(folder, 1), Version(1))
        with pytest.raises(SwapTimeout, match="at least 4.*newest published 1"):
            await engine.generate(requests(folder, 1), Version(4))


async def test_a_stream_says_what_a_call_says_as_it_is_made(folder: Path) -> None:
    asked = requests(folder, 5)
    async with standin(folder) as server, served(folder, server) as engine:
        whole = await engine.generate(asked, Version())
        server.backend.go_on.clear()
        stream = engine.stream(asked, Version(), None)
        pieces = await anext(stream)
        assert pieces[0].start == 0 and server.backend.generating > 0
        server.backend.go_on.set()
        pieces += [piece async for found in stream for piece in found]
    for completion in whole:
        mine = [piece for piece in pieces if piece.request_id == completion.request_id]
        assert [token for piece in mine for token in piece.token_ids] == completion.token_ids.tolist()
        assert [piece.finish_reason for piece in mine] == [None] * (len(mine) - 1) + [completion.finish_reason]
        assert [piece.start for piece in mine] == np.cumsum([0, *(len(piece.token_ids) for piece in mine[:-1])]).tolist()


async def test_a_stream_that_nobody_hears_ends_in_the_server_and_a_version_is_waited_for(folder: Path) -> None:
    async with standin(folder) as server, served(folder, server, swap_timeout_s=0.2) as engine:
        server.backend.go_on.clear()
        stream = engine.stream(requests(folder, 2), Version(), None)
        await anext(stream)
        await stream.aclose()
        await wait_for(lambda: server.backend.generating == 0 and not server.gate.running)
        with pytest.raises(SwapTimeout, match="at least 4"):
            await anext(engine.stream(requests(folder, 1), Version(4), None))


async def test_weights_that_end_a_stream_begin_it_anew(folder: Path, other: Path, tmp_path: Path) -> None:
    weights = WeightStore(tmp_path / "weights")
    publish(weights, 1, folder)
    async with standin(folder) as server, served(folder, server, weights=weights, swap="abort") as engine:
        server.backend.go_on.clear()
        stream = engine.stream(requests(folder, 1), Version(), None)
        assert {piece.weight_version for piece in await anext(stream)} == {1}
        publish(weights, 2, other)
        later = asyncio.create_task(engine.generate(requests(folder, 1), Version(2)))
        await wait_for(lambda: len(server.backend.loads) == 2)
        server.backend.go_on.set()
        (first, *_) = [piece async for found in stream for piece in found if piece.weight_version == 2]
        assert first.start == 0 and (await later)[0].weight_version == 2


async def test_what_nobody_waits_for_ends_in_the_server(folder: Path) -> None:
    async with standin(folder) as server, served(folder, server) as engine:
        server.backend.go_on.clear()
        running = asyncio.create_task(engine.generate(requests(folder, 2), Version()))
        await wait_for(lambda: server.backend.generating == 2)
        running.cancel()
        await wait_for(lambda: server.backend.generating == 0)


def publish(weights: WeightStore, version: int, source: Path) -> None:
    weights.publish(version, lambda folder: shutil.copytree(source, folder, dirs_exist_ok=True))
