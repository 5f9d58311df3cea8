"""Deadlines that share a timer: each is met to the moment, and cancels what is inside it and nothing else."""

from __future__ import annotations

import asyncio

import pytest

from pipeline.evaluator.deadlines import Deadlines

pytestmark = pytest.mark.looptime


def now() -> float:
    return asyncio.get_running_loop().time()


async def ended_after(deadlines: Deadlines, seconds: float, work_s: float) -> tuple[float, bool]:
    started = now()
    try:
        with deadlines.within(seconds):
            await asyncio.sleep(work_s)
    except TimeoutError:
        return now() - started, True
    return now() - started, False


async def test_each_is_met_to_the_moment_whatever_the_order_they_begin_in():
    deadlines = Deadlines()
    asked = [(5.0, 9.0), (1.0, 9.0), (3.0, 2.0), (2.0, 9.0), (1.0, 1.5), (8.0, 9.0)]
    ended = await asyncio.gather(*(ended_after(deadlines, *each) for each in asked))
    assert ended == [(min(each), each[0] < each[1]) for each in asked]


async def test_one_that_begins_later_and_ends_earlier_is_met():
    deadlines = Deadlines()
    first = asyncio.create_task(ended_after(deadlines, 10.0, 20.0))
    await asyncio.sleep(1.0)
    assert await ended_after(deadlines, 2.0, 20.0) == (2.0, True)
    assert await first == (10.0, True)


async def test_of_two_the_one_that_passed_says_so():
    deadlines = Deadlines()
    with pytest.raises(TimeoutError):
        with deadlines.within(5.0) as outer:
            assert await ended_after(deadlines, 2.0, 9.0) == (2.0, True)
            assert not outer.expired and now() == 2.0
            await asyncio.sleep(9.0)
    assert outer.expired and now() == 5.0


async def test_a_cancellation_from_elsewhere_stays_one_even_at_the_deadline():
    deadlines = Deadlines()

    async def inside() -> None:
        with deadlines.within(3.0):
            await asyncio.sleep(9.0)

    for cancelled_at in (1.0, 3.0):
        task = asyncio.create_task(inside())
        asyncio.get_running_loop().call_later(cancelled_at, task.cancel)
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_another_fault_than_the_deadline_passes_as_it_is():
    deadlines = Deadlines()
    with pytest.raises(ZeroDivisionError):
        with deadlines.within(1.0):
            try:
                await asyncio.sleep(2.0)
            except asyncio.CancelledError:
                raise ZeroDivisionError from None
    assert asyncio.current_task().cancelling() == 0


async def test_what_begins_after_the_end_has_its_deadline():
    deadlines = Deadlines()
    await ended_after(deadlines, 60.0, 1.0)
    deadlines.close()
    await asyncio.sleep(100.0)
    assert await ended_after(deadlines, 2.0, 3.0) == (2.0, True)
