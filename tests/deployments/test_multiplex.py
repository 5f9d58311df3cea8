"""Many calls in one request: who is answered when, and what a fault costs."""

from __future__ import annotations

import asyncio
import pickle

import numpy as np
import pytest

from deployments.multiplex import GATHER_S, LARGE_BYTES, Multiplexer, answers, pack
from pipeline.engines.base import Completion
from pipeline.errors import StageFailed

pytestmark = pytest.mark.looptime


def over(play, lanes: int = 1) -> tuple[Multiplexer, list[int]]:
    """Both sides without a process between them, and the size of each request."""
    requests: list[int] = []

    async def carry(calls):
        requests.append(len(calls))
        async for part in answers(calls, play):
            yield part

    return Multiplexer(carry, lanes), requests


async def sleeps(seconds: float) -> float:
    await asyncio.sleep(seconds)
    return seconds


async def test_a_short_call_does_not_wait_for_a_long_one():
    calls, requests = over(sleeps)
    loop = asyncio.get_running_loop()
    long = asyncio.ensure_future(calls.call(100.0))
    assert await calls.call(1.0) == 1.0
    assert loop.time() == pytest.approx(1.0, abs=2 * GATHER_S) and not long.done()
    assert await long == 100.0 and loop.time() == pytest.approx(100.0)
    assert requests == [2]


async def test_answers_that_come_one_after_the_other_travel_together_and_the_last_does_not_wait():
    loop, parts = asyncio.get_running_loop(), []
    async for part in answers([(1.0 + number / 10_000,) for number in range(50)], sleeps):
        parts.append((loop.time(), len(part)))
    assert sum(size for _, size in parts) == 50 and len(parts) <= 4
    assert parts[-1][0] == pytest.approx(1.0049)


async def test_calls_are_spread_over_the_lanes():
    calls, requests = over(sleeps, lanes=3)
    await asyncio.gather(*(calls.call(1.0) for _ in range(8)))
    assert sorted(requests) == [2, 3, 3]


async def test_one_that_raises_or_cancels_itself_leaves_the_others():
    async def play(kind: str) -> str:
        if kind == "raises":
            raise ValueError("odd")
        if kind == "cancels":
            raise asyncio.CancelledError
        return kind

    calls, _ = over(play)
    found = await asyncio.gather(*(calls.call(kind) for kind in ("raises", "cancels", "fine")), return_exceptions=True)
    assert isinstance(found[0], ValueError) and isinstance(found[1], StageFailed) and found[2] == "fine"


async def test_an_error_that_cannot_be_pickled_still_arrives():
    class Local(Exception):
        pass

    async def play() -> None:
        raise Local("here only")

    calls, _ = over(play)
    with pytest.raises(StageFailed, match="Local: here only"):
        await calls.call()


async def test_what_nobody_waits_for_any_more_ends():
    ended: list[float] = []

    async def play(seconds: float) -> None:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(asyncio.get_running_loop().time())

    calls, _ = over(play)
    waiting = [asyncio.ensure_future(calls.call(50.0)) for _ in range(2)]
    await asyncio.sleep(1.0)
    waiting[0].cancel()
    await asyncio.sleep(1.0)
    assert not ended
    waiting[1].cancel()
    await asyncio.sleep(1.0)
    assert ended == [pytest.approx(2.0)] * 2


async def test_a_request_that_ends_too_early_is_an_error_for_those_it_left_out():
    async def carry(calls):
        yield []

    with pytest.raises(ConnectionError, match="without an answer"):
        await Multiplexer(carry).call(1)


async def test_arrays_of_every_kind_arrive_as_they_were_and_can_be_written_to():
    sent = [
        np.arange(5, dtype=np.int32),
        np.arange(5, dtype=">f4"),
        np.arange(10, dtype=np.uint8)[::3],
        np.empty(0, np.float32),
        np.arange(6).reshape(2, 3),
        np.array(7),
        np.array(["text"]),
        np.arange(LARGE_BYTES, dtype=np.int64),
    ]
    beside: list[pickle.PickleBuffer] = []
    block = pack(sent, beside)
    assert beside[-1].raw().nbytes > LARGE_BYTES > len(block)
    for array, arrived in zip(sent * 2, pickle.loads(pack(sent)) + pickle.loads(block, buffers=beside), strict=True):
        assert (arrived.dtype, arrived.shape, arrived.tolist()) == (array.dtype, array.shape, array.tolist())
        assert arrived.flags.writeable


async def test_a_record_arrives_with_its_fields():
    sent = Completion("3.1.0", np.array([4, 5], np.int32), np.array([np.nan, -1.0], np.float32), "stop", 6)
    arrived = pickle.loads(pack([sent]))[0]
    assert (arrived.request_id, arrived.finish_reason, arrived.weight_version) == ("3.1.0", "stop", 6)
    assert arrived.token_ids.tolist() == [4, 5] and np.isnan(arrived.logprobs).tolist() == [True, False]
