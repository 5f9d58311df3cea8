"""Blocking work in threads: many small pieces, and one that takes long."""

from __future__ import annotations

import asyncio
import threading

import pytest

from pipeline.evaluator.offload import Offload


async def test_every_piece_has_its_own_result_or_exception():
    offload = Offload()
    found = await asyncio.gather(*(offload(divmod, 7, number) for number in range(-50, 51)), return_exceptions=True)
    assert isinstance(found[50], ZeroDivisionError)
    assert [one for one in found if one is not found[50]] == [divmod(7, number) for number in range(-50, 51) if number]


async def test_one_that_takes_long_holds_up_nothing():
    offload, release = Offload(), threading.Event()
    long = asyncio.ensure_future(offload(release.wait, 30.0))
    assert await asyncio.gather(*(offload(abs, -number) for number in range(20))) == list(range(20))
    assert not long.done()
    release.set()
    assert await long


async def test_one_that_nobody_waits_for_any_more_is_no_fault():
    offload, release = Offload(), threading.Event()
    left = asyncio.ensure_future(offload(release.wait, 30.0))
    await asyncio.sleep(0)
    left.cancel()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await left
    assert await offload(abs, -1) == 1
