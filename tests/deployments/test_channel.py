"""Requests beside Ray: both sides in one loop, over a real socket."""

from __future__ import annotations

import asyncio
import os
import pickle
import socket
import tempfile
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from deployments.calls import RemoteStage, RemoteWorker
from deployments.channel import AGAIN_S, Channel, Closed, Door
from deployments.multiplex import Answer, pack

WAIT_S = 10.0


@pytest.fixture
def folder():
    with tempfile.TemporaryDirectory() as short:  # a socket's path is short
        yield Path(short)


class Actor:
    """Answers each call with its arguments, those of `held` not before it is told to."""

    def __init__(self, path: Path) -> None:
        self.asked: list[object] = []
        self.go_on = asyncio.Event()
        self.door = Door(path, self.answer)

    async def answer(self, calls):
        self.asked += [call[0] for call in calls]
        if calls[0][0] == "held":
            await self.go_on.wait()
        yield [Answer(number, call[1:]) for number, call in enumerate(calls)]

    async def has_been_asked(self, count: int) -> None:
        async with asyncio.timeout(WAIT_S):
            while len(self.asked) < count:
                await asyncio.sleep(0.001)

    async def dies(self) -> None:
        """As its process would: the kernel closes its sockets."""
        tasks = [self.door._accepting, *self.door._peers]
        for task in tasks:
            task.cancel()
        self.go_on.set()
        await asyncio.gather(*tasks, return_exceptions=True)


async def request(channel: Channel, calls: list) -> list[Answer]:
    return [answer async for part in channel.request(calls) for answer in part]


async def opened(path: Path) -> Channel:
    channel = Channel()

    async def address() -> Path:
        return path

    channel.open(address)
    await channel._opening
    return channel


async def test_a_request_arrives_as_it_was_whatever_its_size(folder):
    actor = Actor(folder / "door")
    channel = await opened(actor.door.path)
    arrays = [np.arange(size, dtype=dtype) for size in (0, 5, 100_000, 3_000_000) for dtype in ("u1", "<f4")]
    async with asyncio.timeout(WAIT_S):
        [first, second] = await request(channel, [("commit", *arrays), ("read", "text", {"key": 7})])
    assert second.value == ("text", {"key": 7})
    for sent, arrived in zip(arrays, first.value, strict=True):
        assert arrived.dtype == sent.dtype and arrived.tobytes() == sent.tobytes()
        assert arrived.flags.writeable and arrived.flags.aligned


async def test_nobody_else_can_ask(folder):
    door = Door(folder / "channels" / "door", Actor(folder / "other").answer)
    assert door.path.stat().st_mode & 0o777 == 0o600 and door.path.parent.stat().st_mode & 0o777 == 0o700


async def test_nobody_else_is_asked(folder, monkeypatch):
    """Who can write to a folder above the door can put another door in its place."""
    actor, owner = Actor(folder / "door"), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    channel = await opened(actor.door.path)
    with pytest.raises(Closed):
        await request(channel, [("quick", 1)])
    assert not channel.is_open and actor.asked == []


async def test_a_request_that_takes_long_holds_up_no_other(folder):
    actor = Actor(folder / "door")
    channel = await opened(actor.door.path)
    held = asyncio.ensure_future(request(channel, [("held", "late")]))
    async with asyncio.timeout(WAIT_S):
        rows = np.zeros(500_000, np.uint8)
        answers = await asyncio.gather(*(request(channel, [("quick", number, rows)]) for number in range(20)))
        assert [answer.value[0] for [answer] in answers] == list(range(20))
        assert not held.done()
        actor.go_on.set()
        assert [answer.value for answer in await held] == [("late",)]


async def test_who_waits_for_an_actor_that_dies_hears_it_at_once(folder):
    actor = Actor(folder / "door")
    channel = await opened(actor.door.path)
    held = asyncio.ensure_future(request(channel, [("held", 1)]))
    await actor.has_been_asked(1)
    dying = asyncio.ensure_future(actor.dies())
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(Closed):
            await held
        await dying
    with pytest.raises(Closed):
        await request(channel, [("quick", 2)])


async def test_answers_come_as_they_are_there(folder):
    more = asyncio.Event()

    async def answer(calls):
        yield [Answer(1, "quick")]
        await more.wait()
        yield [Answer(0, "slow")]

    channel = await opened(Door(folder / "door", answer).path)
    async with asyncio.timeout(WAIT_S):
        parts = channel.request([("slow",), ("quick",)])
        assert [answer.value for answer in await anext(parts)] == ["quick"]
        more.set()
        assert [answer.value for part in [part async for part in parts] for answer in part] == ["slow"]


@pytest.mark.parametrize("gives_up", [True, False])
async def test_what_a_caller_asked_for_that_has_gone_is_given_up_where_nobody_else_needs_it(folder, gives_up):
    began, go_on, ends = asyncio.Event(), asyncio.Event(), []

    async def answer(calls):
        began.set()
        try:
            await go_on.wait()
            ends.append("done")
        except asyncio.CancelledError:
            ends.append("given up")
            raise
        yield [Answer(0)]

    door = Door(folder / "door", answer, gives_up=gives_up)
    channel = await opened(door.path)
    asked = asyncio.ensure_future(request(channel, [("held",)]))
    async with asyncio.timeout(WAIT_S):
        await began.wait()
        channel._connection._peer.shutdown(socket.SHUT_RDWR)
        with pytest.raises(Closed):
            await asked
        [serving] = door._peers
        await asyncio.wait({serving}, timeout=None if gives_up else 0.05)
        go_on.set()
        await asyncio.wait({serving})
    assert ends == ["given up" if gives_up else "done"]


async def test_a_caller_that_gives_up_takes_nothing_from_the_others(folder):
    actor = Actor(folder / "door")
    channel = await opened(actor.door.path)
    left = asyncio.ensure_future(request(channel, [("held", 1)]))
    await actor.has_been_asked(1)
    left.cancel()
    actor.go_on.set()
    async with asyncio.timeout(WAIT_S):
        assert [answer.value for answer in await request(channel, [("quick", 2)])] == [(2,)]


async def test_a_request_that_was_sent_in_part_ends_the_channel(folder):
    """The other side would take what follows for the rest of it."""
    actor = Actor(folder / "door")
    channel = await opened(actor.door.path)
    large = asyncio.ensure_future(request(channel, [("quick", np.zeros(50_000_000, np.uint8))]))
    while not channel._connection._sending.locked():
        await asyncio.sleep(0)
    large.cancel()
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(Closed):
            await request(channel, [("quick", 2)])
    assert actor.asked == []


async def test_an_answer_that_cannot_travel_is_asked_in_another_way(folder):
    async def answer(calls):
        yield [Answer(0, lambda: None)]

    channel = await opened(Door(folder / "door", answer).path)
    async with asyncio.timeout(WAIT_S):
        with pytest.raises(Closed):
            await request(channel, [("quick", 1)])


class Ray:
    """A handle that answers by itself, and names a door."""

    def __init__(self, path: Path) -> None:
        self.path, self.asked = path, []
        self.answer = self.channel = self

    def remote(self, *calls):
        future: Future = Future()
        if calls:
            self.asked += [method for method, _, _ in calls[0]]
            future.set_result([Answer(number, "by Ray") for number in range(len(calls[0]))])
        else:
            future.set_result(self.path)
        return SimpleNamespace(future=lambda: future)


async def test_a_stage_is_asked_beside_ray_while_that_works(folder):
    actor, ray = Actor(folder / "door"), Ray(folder / "door")
    buffer = RemoteStage("r", "replay_buffer")
    buffer._handle = ray
    assert await buffer.read([1]) == "by Ray"
    await buffer._channel._opening
    assert await buffer.read([2]) == (([2],), {})
    held = asyncio.ensure_future(buffer.held())
    await actor.has_been_asked(2)
    dying = asyncio.ensure_future(actor.dies())
    assert await asyncio.wait_for(held, WAIT_S) == "by Ray"
    await dying
    assert await buffer.read([3]) == "by Ray" and ray.asked == ["read", "held", "read"]


class Plays:
    """What Ray answers for a worker: one request, at once."""

    def __init__(self) -> None:
        self.requests = 0

    def options(self, **_):
        return self

    async def remote(self, calls):
        self.requests += 1
        for number, call in enumerate(pickle.loads(calls)):
            yield _packed([Answer(number, f"{call[0]} by Ray")])


async def _packed(answers):
    return pack(answers)


async def test_a_worker_plays_what_it_is_asked_beside_ray_and_its_death_then_is_a_lost_connection(folder):
    actor, ray = Actor(folder / "door"), Ray(folder / "door")
    ray.play_all = Plays()
    worker = RemoteWorker("r", "evaluator_worker_0", "local")
    worker._stage._handle = ray
    async with asyncio.timeout(WAIT_S):
        assert await worker.run_samples("first") == "first by Ray"
        await worker._channel._opening
        assert await worker.run_samples("second", 2) == (2, "student")
        held = asyncio.ensure_future(worker.run_samples("held"))
        await actor.has_been_asked(2)
        dying = asyncio.ensure_future(actor.dies())
        with pytest.raises(ConnectionError, match="evaluator_worker_0 died while it played"):
            await held
        await dying
        assert await worker.run_samples("again") == "again by Ray"
    assert ray.play_all.requests == 2


async def test_an_actor_that_cannot_be_reached_so_is_left_alone_for_a_while(folder):
    channel, asked = Channel(), []

    async def address() -> Path:
        asked.append(None)
        return folder / "of another machine"

    for _ in range(3):
        channel.open(address)
        await channel._opening
    assert len(asked) == 1
    channel._again -= AGAIN_S
    channel.open(address)
    await channel._opening
    assert len(asked) == 2
