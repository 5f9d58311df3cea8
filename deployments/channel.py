"""Requests to an actor of this machine through a socket beside Ray, which takes a millisecond where the socket takes a tenth.

Invariant: a channel decides nothing. Whatever is odd about it closes it, and whoever asked asks through Ray, which knows whether
the actor lives and where; that a request is then done twice, every method allows.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import pickle
import socket
import struct
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import RayError

from deployments.multiplex import Answer, Call, pack

log = logging.getLogger(__name__)

AGAIN_S = 5.0
"""An actor that cannot be reached so, on another machine for instance, is not tried again before."""
ADDRESS_S = 60.0
SENT_BYTES = 4 * 1024 * 1024
"""On the way in a channel; a system may allow less."""
_HEAD = struct.Struct("<QQI")
"""Number of the request, bytes of the pickle, arrays beside it."""
_SIZE = struct.Struct("<Q")
"""Bytes of an array."""

Answering = Callable[[Sequence[Call]], Awaitable[Sequence[Answer]]]


class Closed(Exception):
    """Nothing came of the request here."""


class Channel:
    """The caller's side."""

    def __init__(self) -> None:
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._again = -math.inf

    async def request(self, calls: Sequence[Call]) -> Sequence[Answer]:
        """Raises Closed, at any time."""
        if self._connection is None or self._connection.closed:
            raise Closed
        return await self._connection.request(calls)

    def open(self, address: Callable[[], Awaitable[Path]]) -> None:
        """In the background, for later requests."""
        now = asyncio.get_running_loop().time()
        if now < self._again or (self._connection is not None and not self._connection.closed):
            return
        if self._opening is None or self._opening.done():
            self._again = now + AGAIN_S
            self._opening = asyncio.create_task(self._open(address), name="opens a channel")

    async def _open(self, address: Callable[[], Awaitable[Path]]) -> None:
        try:
            async with asyncio.timeout(ADDRESS_S):
                path = await address()
            self._connection = await _connect(path)
        except (OSError, RayError) as error:
            log.info("no channel: %s", error)


class _Connection:
    """Any number of requests at a time, answered in any order."""

    def __init__(self, peer: socket.socket) -> None:
        _ready(peer)
        self._peer = peer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Sequence[Answer] | None]] = {}
        """None: the channel has ended."""
        self._sending = asyncio.Lock()
        self._receiving = asyncio.create_task(self._receive(), name="answers of a channel")

    @property
    def closed(self) -> bool:
        return self._receiving.done()

    async def request(self, calls: Sequence[Call]) -> Sequence[Answer]:
        number = next(self._numbers)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with self._sending:
                with _closed_if_it_fails(self._peer):
                    await _send(self._peer, number, calls)
            answers = await future
        except OSError as error:
            raise Closed from error
        finally:
            del self._waiting[number]
        if answers is None:
            raise Closed
        return answers

    async def _receive(self) -> None:
        try:
            while True:
                number, answers = await _received(self._peer)
                self._settle(number, answers)
        except Exception as error:
            log.info("a channel has ended: %r", error)
        finally:
            _shut(self._peer)
            for number in self._waiting:
                self._settle(number, None)
            async with self._sending:  # a socket is closed when nobody waits for it any more
                self._peer.close()

    def _settle(self, number: int, answers: Sequence[Answer] | None) -> None:
        future = self._waiting.get(number)
        if future is not None and not future.done():
            future.set_result(answers)


class Door:
    """The actor's side: answers whoever connects, until its process ends."""

    def __init__(self, path: Path, answer: Answering) -> None:
        """In a folder of its owner alone, because what arrives is unpickled. Raises OSError."""
        self.path = path
        self._answer = answer
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a process that had this pid before
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        self._listener.listen()
        self._peers: set[asyncio.Task[None]] = set()
        self._accepting = asyncio.create_task(self._accept(), name="door of an actor")

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        with self._listener:
            while True:
                peer, _ = await loop.sock_accept(self._listener)
                _keep(self._peers, self._serve(peer), "requests of a channel")

    async def _serve(self, peer: socket.socket) -> None:
        """What was asked is done to its end, also for a caller that has gone."""
        _ready(peer)
        replies: set[asyncio.Task[None]] = set()
        sending = asyncio.Lock()
        try:
            while True:
                number, calls = await _received(peer)
                _keep(replies, self._reply(peer, sending, number, calls), "answers through a channel")
        except Exception as error:
            log.info("a channel has ended: %r", error)
        finally:
            _shut(peer)
            await asyncio.gather(*replies, return_exceptions=True)
            peer.close()

    async def _reply(self, peer: socket.socket, sending: asyncio.Lock, number: int, calls: Sequence[Call]) -> None:
        try:
            with _closed_if_it_fails(peer):
                answers = await self._answer(calls)
                async with sending:
                    await _send(peer, number, answers)
        except Exception as error:
            log.info("no answer through a channel: %r", error)


def _keep(tasks: set[asyncio.Task[None]], work: Coroutine[Any, Any, None], name: str) -> None:
    task = asyncio.create_task(work, name=name)
    tasks.add(task)
    task.add_done_callback(tasks.discard)


async def _connect(path: Path) -> _Connection:
    peer = socket.socket(socket.AF_UNIX)
    try:
        peer.setblocking(False)
        await asyncio.get_running_loop().sock_connect(peer, str(path))
    except BaseException:
        peer.close()
        raise
    return _Connection(peer)


def _ready(peer: socket.socket) -> None:
    """What fits into the kernel is handed over at once, and not whenever a busy process comes round to the next part."""
    peer.setblocking(False)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SENT_BYTES)


def _shut(peer: socket.socket) -> None:
    """Both sides hear of it at once."""
    with suppress(OSError):
        peer.shutdown(socket.SHUT_RDWR)


@contextmanager
def _closed_if_it_fails(peer: socket.socket) -> Iterator[None]:
    """Of something that was sent in part, the other side would wait for the rest."""
    try:
        yield
    except BaseException:
        _shut(peer)
        raise


async def _send(peer: socket.socket, number: int, value: Any) -> None:
    loop = asyncio.get_running_loop()
    arrays: list[pickle.PickleBuffer] = []
    block = pack(value, arrays)
    views = [array.raw() for array in arrays]
    sizes = b"".join(_SIZE.pack(view.nbytes) for view in views)
    await loop.sock_sendall(peer, b"".join((_HEAD.pack(number, len(block), len(views)), sizes, block)))
    for view in views:
        await loop.sock_sendall(peer, view)


async def _received(peer: socket.socket) -> tuple[int, Any]:
    """Number and value. Raises OSError, and EOFError at the end."""
    number, length, count = _HEAD.unpack(await _part(peer, _HEAD.size))
    sizes = _SIZE.iter_unpack(await _part(peer, count * _SIZE.size))
    block = await _part(peer, length)
    return number, pickle.loads(block, buffers=[await _part(peer, size) for (size,) in sizes])


async def _part(peer: socket.socket, size: int) -> memoryview:
    """So many bytes, aligned for arrays of any type."""
    loop, part = asyncio.get_running_loop(), memoryview(np.empty(size, np.uint8))
    left = part
    while left:
        count = await loop.sock_recv_into(peer, left)
        if not count:
            raise EOFError("the other side has closed")
        left = left[count:]
    return part
