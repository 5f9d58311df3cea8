from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from pipeline.config.models import Engine as EngineSettings
from pipeline.config.models import Teacher
from pipeline.engines.base import GenerateRequest, ScoreRow, Version
from pipeline.engines.fixed_cost import FixedCostTeacher
from pipeline.engines.renderer import ChatRenderer
from pipeline.engines.scripted import ScriptedEngine
from pipeline.engines.weights import WeightStore
from pipeline.errors import ConfigError, EngineUnavailable, RowRefused, SwapTimeout
from pipeline.records import Sampling

pytestmark = pytest.mark.looptime
PROMPT = np.array([1, 7, 3], np.int32)


def group(ordinal: int, count: int = 4, max_tokens: int = 16) -> list[GenerateRequest]:
    return [GenerateRequest(f"{ordinal}.{i}.0", PROMPT, Sampling(max_tokens=max_tokens), 100 * ordinal + i) for i in range(count)]


def scripted(slots: int = 4, weights: WeightStore | None = None, **script) -> ScriptedEngine:
    return ScriptedEngine(EngineSettings(kind="scripted", slots=slots, swap_timeout_s=5.0, script=script), weights)


async def test_plays_tokens_and_time_by_ordinal_within_its_slots() -> None:
    engine = scripted(tokens=5, tokens_by_ordinal={2: 0, 3: 40}, seconds=10.0, seconds_by_ordinal={1: 1.0})
    loop = asyncio.get_running_loop()
    began = loop.time()
    calls = [asyncio.create_task(engine.generate(group(0, 8), Version()))]
    await asyncio.sleep(1.0)
    info = await engine.info()
    assert (info.active, info.waiting) == (4, 4)
    first = await calls[0]
    assert loop.time() - began == pytest.approx(20.0)
    assert [len(each.token_ids) for each in first] == [5] * 8
    assert all(each.finish_reason == "stop" and each.token_ids[-1] == 2 for each in first)
    assert len({tuple(each.token_ids) for each in first}) > 1
    began = loop.time()
    again = await engine.generate(group(1), Version())
    assert loop.time() - began == pytest.approx(1.0)
    assert [each.token_ids.tolist() for each in await engine.generate(group(1), Version())] == [
        each.token_ids.tolist() for each in again
    ]
    (empty,) = await engine.generate(group(2, 1), Version())
    assert len(empty.token_ids) == 0 and empty.finish_reason == "stop"
    (cut,) = await engine.generate(group(3, 1), Version())
    assert len(cut.token_ids) == 16 and cut.finish_reason == "length" and 2 not in cut.token_ids


async def test_plays_faults_by_ordinal() -> None:
    engine = scripted(
        seconds=1.0, fail_by_ordinal={1: "EngineUnavailable", 4: "hang"}, fail_once_by_ordinal={2: "RowRefused"}, slots=8
    )
    for _ in range(2):
        with pytest.raises(EngineUnavailable, match="ordinal 1"):
            await engine.generate(group(1), Version())
    with pytest.raises(RowRefused):
        await engine.generate(group(2), Version())
    assert len(await engine.generate(group(2), Version())) == 4
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1000):
            await engine.generate(group(4), Version())
    assert (await engine.info()).active == 0
    assert len(await engine.generate([GenerateRequest("probe", PROMPT, Sampling(), 0)], Version())) == 1
    with pytest.raises(ConfigError, match="NoSuchError"):
        scripted(fail_by_ordinal={1: "NoSuchError"})


async def test_follows_published_versions(tmp_path: Path, folder: Path) -> None:
    store = WeightStore(tmp_path)
    engine = scripted(weights=store)
    with pytest.raises(SwapTimeout):
        await engine.generate(group(0), Version())
    store.publish(3, lambda aside: None)
    waiting = asyncio.create_task(engine.generate(group(0), Version(minimum=4)))
    assert {each.weight_version for each in await engine.generate(group(1), Version(exact=3))} == {3}
    asyncio.get_running_loop().call_later(2.0, store.publish, 4, lambda aside: None)
    assert {each.weight_version for each in await waiting} == {4}
    with pytest.raises(SwapTimeout, match="exactly 3"):
        await engine.generate(group(0), Version(exact=3))
    with_tokenizer = ScriptedEngine(EngineSettings(kind="scripted"), store, folder)
    renderer, info = ChatRenderer.load(folder), await with_tokenizer.info()
    assert (info.vocab_size, info.tokenizer_digest) == (renderer.vocab_size, renderer.digest)
    said = await with_tokenizer.generate(group(5), Version())
    assert all(each.token_ids.max() < renderer.vocab_size for each in said)


async def test_a_fixed_cost_teacher_takes_its_time_one_call_after_another() -> None:
    teacher = FixedCostTeacher(Teacher(engine="fixed_cost", fixed_cost_s=2.0, row_cost_s=0.5), logprob=-0.25)
    rows = [ScoreRow(f"r{i}", np.array([1, 5, 6, 7], np.int32), i + 1) for i in range(4)]
    loop = asyncio.get_running_loop()
    began = loop.time()
    first, second = await asyncio.gather(teacher.score(rows, "topk", 3), teacher.score(rows[:2], "full", 0))
    assert loop.time() - began == pytest.approx(2.0 + 4 * 0.5 + 2.0 + 2 * 0.5)
    assert [len(each.logprobs) for each in first] == [3, 2, 1, 0] and set(first[0].logprobs) == {-0.25}
    assert first[0].topk_ids.shape == (3, 3) and second[1].full_logprobs.shape == (2, 64)
    assert (await teacher.info()).scored_rows == 6
    with pytest.raises(RowRefused, match="row bad"):
        await teacher.score([ScoreRow("bad", np.array([1, 64], np.int32), 1)])


async def test_a_stream_takes_the_scripts_time_token_by_token() -> None:
    engine = scripted(tokens=5, tokens_by_ordinal={2: 0}, seconds=10.0)
    loop = asyncio.get_running_loop()
    began, heard = loop.time(), []
    async for pieces in engine.stream(group(0, 2), Version(), 1):
        heard += [(round(loop.time() - began, 3), piece) for piece in pieces]
    whole = await engine.generate(group(0, 2), Version())
    for completion in whole:
        mine = [(at, piece) for at, piece in heard if piece.request_id == completion.request_id]
        assert [at for at, _ in mine] == [2.0, 4.0, 6.0, 8.0, 10.0] and [piece.start for _, piece in mine] == [0, 1, 2, 3, 4]
        assert [token for _, piece in mine for token in piece.token_ids] == completion.token_ids.tolist()
        assert [piece.finish_reason for _, piece in mine] == [None] * 4 + ["stop"]
        assert all(piece.scores.topk_ids.shape == (1, 1) for _, piece in mine)
    (empty,) = [piece async for pieces in engine.stream(group(2, 1), Version(), 1) for piece in pieces]
    assert (len(empty.token_ids), empty.finish_reason, empty.scores) == (0, "stop", None)


async def test_a_stream_plays_faults_and_ends_with_its_listener() -> None:
    engine = scripted(tokens=4, seconds=4.0, fail_by_ordinal={1: "EngineUnavailable"})
    stream = engine.stream(group(0), Version(), None)
    assert len(await anext(stream)) == 4 and (await engine.info()).active == 4
    await stream.aclose()
    assert (await engine.info()).active == 0
    with pytest.raises(EngineUnavailable):
        async for _ in engine.stream(group(1), Version(), None):
            pass
