"""Requests to an actor of this machine through a socket beside Ray, which takes a millisecond where the socket takes a tenth.

Invariant: a channel decides nothing. Whatever is odd about it closes it, and whoever asked asks through Ray, which knows whether
the actor lives and where; that a request is then done twice, every method allows.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import os
import pickle
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from ray.exceptions import RayError

from deployments.multiplex import Answer, Call, pack

log = logging.getLogger("channel")  # of no interest on the screen, where `deployments` speaks

AGAIN_S = 5.0
"""An actor that cannot be reached so, on another machine for instance, is not tried again before."""
ADDRESS_S = 60.0
SENT_BYTES = 4 * 1024 * 1024
"""On the way in a channel; a system may allow less."""
_HEAD = struct.Struct("<QQI")
"""Number of the request, bytes of the pickle, arrays beside it."""
_SIZE = struct.Struct("<Q")
"""Bytes of an array."""
_CREDENTIALS = struct.Struct("=iII")
"""Pid, user and group of who listens."""

Answering = Callable[[Sequence[Call]], AsyncIterator[Sequence[Answer]]]
"""Yields answers as they come, one a call in all."""


class Closed(Exception):
    """Nothing came of the request here."""


class Channel:
    """The caller's side."""

    def __init__(self) -> None:
        self._connection: _Connection | None = None
        self._opening: asyncio.Task[None] | None = None
        self._again = -math.inf

    @property
    def is_open(self) -> bool:
        return self._connection is not None and not self._connection.ended

    def request(self, calls: Sequence[Call]) -> AsyncIterator[Sequence[Answer]]:
        """The answers as they come. Raises Closed, at any time."""
        if self._connection is None:
            raise Closed
        return self._connection.request(calls)

    def open(self, address: Callable[[], Awaitable[Path]]) -> None:
        """In the background, for later requests."""
        now = asyncio.get_running_loop().time()
        if now < self._again or self.is_open:
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
            log.debug("no channel: %s", error)


class _Connection:
    """Any number of requests at a time, answered in any order."""

    def __init__(self, peer: socket.socket) -> None:
        _ready(peer)
        self._peer = peer
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Queue[Sequence[Answer] | None]] = {}
        """What has come for each request. None: the channel has ended."""
        self.ended = False
        self._sending = asyncio.Lock()
        self._receiving = asyncio.create_task(self._receive(), name="answers of a channel")

    async def request(self, calls: Sequence[Call]) -> AsyncIterator[Sequence[Answer]]:
        number, left = next(self._numbers), len(calls)
        parts = self._waiting[number] = asyncio.Queue()
        try:
            await self._send(number, calls)
            while left:
                answers = await parts.get()
                if answers is None:
                    raise Closed
                left -= len(answers)
                yield answers
        finally:
            del self._waiting[number]

    async def _send(self, number: int, calls: Sequence[Call]) -> None:
        async with self._sending:
            if self.ended:
                raise Closed
            try:
                with _closed_if_it_fails(self._peer):
                    await _send(self._peer, number, calls)
            except OSError as error:
                raise Closed from error

    async def _receive(self) -> None:
        try:
            while True:
                number, answers = await _received(self._peer)
                if number in self._waiting:  # not given up
                    self._waiting[number].put_nowait(answers)
        except Exception as error:
            log.info("a channel has ended: %r", error)
        finally:
            self.ended = True
            _shut(self._peer)
            for parts in self._waiting.values():
                parts.put_nowait(None)
            async with self._sending:  # a socket is closed when nobody waits for it any more
                self._peer.close()


class Door:
    """The actor's side: answers whoever connects, until its process ends.

    gives_up: what a caller asked for ends with the caller; else it is done to its end.
    """

    def __init__(self, path: Path, answer: Answering, *, gives_up: bool = False) -> None:
        """Folder and socket are their owner's alone, because what arrives is unpickled. Raises OSError."""
        self.path = path
        self._answer = answer
        self._gives_up = gives_up
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.unlink(missing_ok=True)  # of a process that had this pid before
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.setblocking(False)
        self._listener.bind(str(path))
        path.chmod(0o600)
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
            if self._gives_up:
                for reply in replies:
                    reply.cancel()
            await asyncio.gather(*replies, return_exceptions=True)
            peer.close()

    async def _reply(self, peer: socket.socket, sending: asyncio.Lock, number: int, calls: Sequence[Call]) -> None:
        try:
            with _closed_if_it_fails(peer):
                async with aclosing(self._answer(calls)) as parts:
                    async for answers in parts:
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
        _refuse_others(peer)
    except BaseException:
        peer.close()
        raise
    return _Connection(peer)


def _refuse_others(peer: socket.socket) -> None:
    """Ray opens its folder to every user, who can put another one in the place of the channels'; and an answer is unpickled.
    Raises OSError, also on a system that does not say who listens."""
    if not hasattr(socket, "SO_PEERCRED"):
        raise OSError("this system does not say whose a socket is")
    _, user, _ = _CREDENTIALS.unpack(peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    if user != os.geteuid():
        raise PermissionError(f"user {user} listens in the place of an actor")


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
