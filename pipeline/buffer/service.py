"""The replay buffer: every finished group of a run, durable, and the truth about each ordinal.

Invariant: what a method has acknowledged survives the death of every process. Writes go through one fenced writer and share
transactions; reads see committed data only; waiting is for a committed change, never a poll.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from pipeline.buffer import contents, ledger, progress, reader, retrieval, selection
from pipeline.buffer.api import Assignment, Attempt, AttemptEnd, BacklogItem, Outcome, Selection, StageReport
from pipeline.buffer.contents import EncodedGroup
from pipeline.buffer.filesystem import mounts, refuse_network_fs
from pipeline.buffer.group_commit import GroupCommit
from pipeline.buffer.ledger import Ledger
from pipeline.buffer.schema import open_reader
from pipeline.buffer.settings import BufferSettings
from pipeline.buffer.store import Store
from pipeline.errors import CapacityFull, NotSelectable, RolloutError, StoreError
from pipeline.paths import RunPaths
from pipeline.records import Column, Group, Sample

T = TypeVar("T")


class BufferService:
    """Implements `buffer.api.BufferClient`; the documentation of the methods is there. One event loop.

    threaded: writer, reader and encoder threads. Without them everything happens in the event loop, in a fixed order.
    """

    def __init__(
        self, paths: RunPaths, settings: BufferSettings, *, clock: Callable[[], float] = time.time, threaded: bool = True
    ) -> None:
        self._paths = paths
        self._settings = settings
        self._clock = clock
        self._threaded = threaded
        self._store: Store | None = None
        self._writes: GroupCommit | None = None
        self._reads: sqlite3.Connection | None = None
        self._read_pool: ThreadPoolExecutor | None = None
        self._encode_pool: ThreadPoolExecutor | None = None
        self._committing: dict[object, float] = {}
        self._commits = 0

    async def open(self, new_run_epoch: bool = False, run_epoch: int | None = None) -> None:
        """Take the run over from an earlier writer.

        new_run_epoch: True for a new cluster (run, resume): attempts that run are lost. False for a buffer that restarts
        alone: workers live on, and may commit what they have.
        run_epoch: the one that this process belongs to, where that is known. Raises FencedOut when it is over: a cluster that
        should be gone must not take the run from its successor.
        Raises UserError without a run, or on a network file system.
        """
        if not self._settings.allow_network_fs:
            refuse_network_fs(self._paths.root, mounts())
        self._store = await self._off_loop(None, partial(Store, self._paths, self._settings, self._clock, new_run_epoch, run_epoch))
        self._reads = open_reader(self._paths.database)
        if self._threaded:
            self._read_pool = ThreadPoolExecutor(1, "buffer-reader")
            self._encode_pool = ThreadPoolExecutor(contents.ENCODERS, "buffer-encoder")
        self._writes = GroupCommit(self._store, self._threaded)

    @property
    def run_epoch(self) -> int:
        if self._store is None:
            raise RolloutError("the replay buffer is not open")
        return self._store.run_epoch

    async def close(self) -> None:
        """Writes what was submitted; calls and waiters after it raise."""
        if self._writes is None or self._store is None or self._reads is None:
            return
        await self._writes.close()
        for pool in (self._read_pool, self._encode_pool):
            if pool is not None:
                await asyncio.to_thread(pool.shutdown)
        self._reads.close()
        self._store.close()

    # slots

    async def assign(self, step: int, count: int, limit: int | None) -> list[Assignment]:
        self._refuse_more_than_all(count)
        return await self._write(lambda led: ledger.assign(led, step, count, limit))

    async def wait_capacity(self, count: int, wait_s: float) -> bool:
        self._refuse_more_than_all(count)
        return await self._wait(lambda db: ledger.free_capacity(db, self._settings) >= count, wait_s)

    async def replace(self, ordinal: int, limit: int | None) -> Assignment | None:
        return await self._write(lambda led: ledger.replace(led, ordinal, limit))

    async def discard(self, ordinal: int, reason: str) -> bool:
        return await self._write(lambda led: ledger.discard(led, ordinal, reason))

    async def close_rollout(self, step: int) -> None:
        await self._write(lambda led: ledger.close_rollout(led, step))

    # attempts and rows

    async def start_attempt(self, ordinal: int, weight_version: int, worker: str) -> Attempt:
        return await self._write(lambda led: ledger.start_attempt(led, ordinal, weight_version, worker))

    async def end_attempt(self, attempt: Attempt, outcome: Outcome, reason: str) -> AttemptEnd:
        return await self._write(lambda led: ledger.end_attempt(led, attempt, outcome, reason))

    async def commit(self, attempt: Attempt, group: Group | EncodedGroup) -> bool:
        call = object()
        self._committing[call] = asyncio.get_running_loop().time()
        try:
            if isinstance(group, Group):
                encoded = await self._encode(partial(contents.encode_group, group), group.tokens())
            else:
                encoded = group
            payloads = [encoded.rows, *(column.payload for column in encoded.columns)]
            new = await self._writer.submit(lambda led: contents.commit(led, attempt, encoded), payloads)
        finally:
            del self._committing[call]
        self._commits += new
        return new

    async def store_sample(self, attempt: Attempt, sample: Sample) -> None:
        payload = await self._encode(partial(contents.encode_sample, attempt.ordinal, sample), len(sample.token_ids))
        await self._writer.submit(lambda led: contents.store_sample(led, attempt, payload), [payload])

    async def stored_samples(self, ordinal: int) -> list[Sample]:
        return await self._read(lambda db: retrieval.samples(db, self._paths.groups, ordinal))

    async def read(self, ordinals: list[int], columns: bool) -> list[Group]:
        return await self._read(lambda db: retrieval.groups(db, self._paths.groups, ordinals, columns))

    # fields

    async def backlog(self, field_name: str, limit: int) -> list[BacklogItem]:
        return await self._read(lambda db: contents.backlog(db, self._settings, field_name, limit))

    async def mark_produced(self, columns: list[Column]) -> dict[int, str]:
        entries = sum(array.size for column in columns for arrays in column.samples.values() for array in arrays.values())
        encoded = await self._encode(lambda: [contents.encode_column(column) for column in columns], entries)
        payloads = [column.payload for column in encoded]
        return await self._writer.submit(lambda led: contents.mark_produced(led, encoded), payloads)

    async def wait_scored(self, step: int, wait_s: float) -> bool:
        return await self._wait(lambda db: selection.scored(db, step), wait_s)

    # training

    async def wait_selection(self, step: int, wait_s: float) -> Selection | None:
        if not await self._wait(lambda db: selection.selectable(db, self._settings, step), wait_s):
            return None
        try:
            return await self.select(step)
        except NotSelectable:  # a ready group was discarded since
            return None

    async def select(self, step: int) -> Selection:
        return await self._write(lambda led: selection.select(led, step))

    async def record_step(self, step: int, metrics: dict[str, Any]) -> None:
        await self._write(lambda led: progress.record_step(led, step, metrics))

    async def mark_trained(self, checkpoint_step: int, path: str) -> None:
        await self._write(lambda led: progress.mark_trained(led, checkpoint_step, path))

    async def forget_checkpoint(self, checkpoint_step: int) -> None:
        await self._write(lambda led: progress.forget_checkpoint(led, checkpoint_step))

    async def steps(self, after: int = 0) -> dict[str, Any]:
        return await self._read(lambda db: progress.steps(db, after))

    async def gc(self) -> dict[str, int]:
        """Retention now; `mark_trained` does the same. `{groups, bytes}`: groups whose rows went, bytes of segments freed."""
        before = _segment_bytes(self._paths.groups)
        groups = await self._write(progress.collect)
        return {"groups": groups, "bytes": before - _segment_bytes(self._paths.groups)}

    # the run

    async def status(self) -> dict[str, Any]:
        return await self._read(reader.status)

    async def claim(self, role: str) -> int:
        return await self._write(lambda led: progress.claim(led, role))

    async def report_stage(self, report: StageReport) -> None:
        await self._write(lambda led: progress.report_stage(led, report))

    async def set_run(self, state: str, error: str | None = None, **facts: Any) -> None:
        await self._write(lambda led: progress.set_run(led, state, error, facts))

    def report(self) -> StageReport:
        """Of this process: groups committed. Other writes are no progress."""
        waiting = asyncio.get_running_loop().time() - min(self._committing.values()) if self._committing else 0.0
        started, backlog = self._commits + len(self._committing), len(self._committing)
        return StageReport(
            "replay_buffer", "", os.getpid(), "", started, self._commits, backlog, waiting, busy_s=self._writer.busy_s
        )

    # how

    @property
    def _writer(self) -> GroupCommit:
        if self._writes is None:
            raise RolloutError("the replay buffer is not open")
        return self._writes

    async def _write(self, operation: Callable[[Ledger], T]) -> T:
        return await self._writer.submit(operation)

    async def _read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """In one read transaction."""
        self._writer.check()
        return await self._off_loop(self._read_pool, partial(_in_snapshot, self._reads, query))

    async def _encode(self, encode: Callable[[], T], tokens: int) -> T:
        return encode() if tokens <= contents.LARGE_TOKENS else await self._off_loop(self._encode_pool, encode)

    async def _off_loop(self, pool: ThreadPoolExecutor | None, call: Callable[[], T]) -> T:
        if not self._threaded:
            return call()
        return await asyncio.get_running_loop().run_in_executor(pool, call)

    async def _wait(self, condition: Callable[[sqlite3.Connection], bool], wait_s: float) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + wait_s
        while True:
            changed = self._writer.changed  # before looking: what changes afterwards wakes us
            if await self._read(condition):
                return True
            try:
                async with asyncio.timeout_at(deadline):
                    await changed.wait()
            except TimeoutError:
                return False

    def _refuse_more_than_all(self, count: int) -> None:
        if count > self._settings.capacity:
            raise CapacityFull(f"{count} groups can never be held at once: buffer.capacity is {self._settings.capacity}")


def _in_snapshot(db: sqlite3.Connection, query: Callable[[sqlite3.Connection], T]) -> T:
    try:
        db.execute("BEGIN")
        try:
            return query(db)
        finally:
            db.execute("COMMIT")
    except sqlite3.Error as error:
        raise StoreError(f"the run's database cannot be read: {error}") from error


def _segment_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.seg"))
