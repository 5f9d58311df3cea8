"""Requests of many samples in few calls."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pipeline.engines.base import GenerateRequest, Version
from pipeline.errors import EngineUnavailable, RowRefused
from pipeline.evaluator.sharing import WAYS, SharedCalls
from pipeline.records import Sampling
from tests.pipeline.evaluator.parts import Echo


def request(number: int) -> GenerateRequest:
    return GenerateRequest(f"{number}.0.0", np.asarray([number, 99], np.int32), Sampling(), number)


@pytest.mark.looptime
async def test_a_moment_of_requests_is_a_few_calls_and_each_gets_its_own_answer():
    engine = Echo(1.0)
    shared = SharedCalls(engine, 10.0)
    answers = await asyncio.gather(*(shared.generate([request(number)], Version(exact=3)) for number in range(40)))
    assert [answer[0].token_ids.tolist() for answer in answers] == [[99, number] for number in range(40)]
    assert len(engine.calls) == WAYS and {len(call) for call in engine.calls} == {40 // WAYS}
    assert {answer[0].weight_version for answer in answers} == {3}
    await shared.close()


@pytest.mark.looptime
async def test_a_lost_call_is_lost_for_those_who_were_in_it():
    engine = Echo(1.0, faults=[EngineUnavailable("died")])
    shared = SharedCalls(engine, 10.0)
    answers = await asyncio.gather(*(shared.generate([request(n)], Version(exact=0)) for n in range(16)), return_exceptions=True)
    lost = [answer for answer in answers if isinstance(answer, EngineUnavailable)]
    assert len(lost) == 16 // WAYS and len(engine.calls) == WAYS, "it is for the callers to try again"


@pytest.mark.looptime
async def test_a_bad_row_does_not_take_its_neighbours():
    class Picky(Echo):
        async def generate(self, requests, version):
            if any(entry.request_id == "0.0.0" for entry in requests):
                raise RowRefused("row 0 is too long")
            return await super().generate(requests, version)

    shared = SharedCalls(Picky(0.0), 10.0)
    answers = await asyncio.gather(*(shared.generate([request(n)], Version(exact=0)) for n in range(16)), return_exceptions=True)
    assert [isinstance(answer, RowRefused) for answer in answers] == [True] + [False] * 15
