"""Many callers, one transaction: what arrives while a commit is under way shares the next one.

Invariant: a caller hears of success only after its transaction is durable. `changed` is set after every transaction, so that
waiters look again; whoever takes `changed` before looking misses nothing.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.buffer.contents import Payload
from pipeline.buffer.ledger import Ledger
from pipeline.buffer.store import Job, Outcome, Store
from pipeline.errors import RolloutError

MAX_JOBS = 256
MAX_BYTES = 64 * 1024 * 1024

Pending = tuple[Job, "asyncio.Future[Any]"]


class GroupCommit:
    """Threaded: one writer thread. Otherwise the jobs of one turn of the event loop are written in the loop itself, which makes
    the buffer deterministic, for tests on a virtual clock."""

    def __init__(self, store: Store, threaded: bool) -> None:
        self._store = store
        self._loop = asyncio.get_running_loop()
        self._pending: list[Pending] = []
        self._queue: queue.SimpleQueue[Pending | None] = queue.SimpleQueue()
        self._closed = False
        self.changed = asyncio.Event()
        self.busy_s = 0.0
        """Seconds spent writing."""
        self._thread = threading.Thread(target=self._serve, name="buffer-writer", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    async def submit(self, operation: Callable[[Ledger], Any], payloads: Sequence[Payload] = ()) -> Any:
        """Returns the operation's value once it is durable, or raises what the operation or the storage raised.

        A caller that is cancelled may find its operation done or not: all operations can be repeated.
        """
        self.check()
        future: asyncio.Future[Any] = self._loop.create_future()
        pending = (Job(operation, payloads), future)
        if self._thread is not None:
            self._queue.put(pending)
        else:
            self._pending.append(pending)
            if len(self._pending) == 1:
                self._loop.call_soon(self._flush)
        return await future

    def check(self) -> None:
        if self._closed:
            raise RolloutError("the replay buffer is closed")
        self._store.check_fence()

    async def close(self) -> None:
        """Write what was submitted, then end the thread."""
        if self._closed:
            return
        self._closed = True
        if self._thread is not None:
            self._queue.put(None)
            await asyncio.to_thread(self._thread.join)
        else:
            self._flush()
        self._announce()

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        if pending:
            self._settle(pending, self._write(pending))

    def _serve(self) -> None:
        """The writer thread."""
        open_ = True
        while open_:
            pending, open_ = self._take()
            if pending:
                outcomes = self._write(pending)
                self._loop.call_soon_threadsafe(self._settle, pending, outcomes)

    def _take(self) -> tuple[list[Pending], bool]:
        """Wait for a job, then take what else is there. The second value is False after the last."""
        first = self._queue.get()
        if first is None:
            return [], False
        taken, size = [first], _size(first)
        while len(taken) < MAX_JOBS and size < MAX_BYTES:
            try:
                following = self._queue.get_nowait()
            except queue.Empty:
                break
            if following is None:
                return taken, False
            taken.append(following)
            size += _size(following)
        return taken, True

    def _write(self, pending: list[Pending]) -> list[Outcome]:
        began = time.perf_counter()
        try:
            return self._store.write([job for job, _ in pending])
        except Exception as error:  # a fault of our own: every caller hears it, and the writer lives on
            return [Outcome(error=error) for _ in pending]
        finally:
            self.busy_s += time.perf_counter() - began

    def _settle(self, pending: list[Pending], outcomes: list[Outcome]) -> None:
        for (_, future), outcome in zip(pending, outcomes, strict=True):
            if future.done():  # its caller was cancelled
                continue
            if outcome.error is not None:
                future.set_exception(outcome.error)
            else:
                future.set_result(outcome.value)
        self._announce()

    def _announce(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


def _size(pending: Pending) -> int:
    return sum(len(payload.data) for payload in pending[0].payloads)
