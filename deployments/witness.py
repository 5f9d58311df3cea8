"""What was played, acknowledged and trained, said by those who did it and kept beside the ledger, for whoever doubts the ledger.

Invariant: lines are one write to a file opened for appending: processes share the file, and a kill tears no line. The run reads
none of it.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.buffer import contents
from pipeline.buffer.api import Attempt
from pipeline.records import Group


def append_line(path: Path, **facts: Any) -> None:
    append_lines(path, [facts])


def append_lines(path: Path, records: Sequence[dict[str, Any]]) -> None:
    """The time (seconds since the epoch), the process and the facts, each as one line of JSON."""
    head = {"t": round(time.time(), 3), "pid": os.getpid()}
    path.parent.mkdir(exist_ok=True)
    with open(path, "ab", buffering=0) as file:
        file.write("".join(json.dumps(head | facts) + "\n" for facts in records).encode())


class CommitWitness:
    """The replay buffer as the evaluator pool sees it: groups travel as they will be stored. A line follows the acknowledgement of
    a commit, with the digest of what was sent."""

    def __init__(self, buffer: Any, path: Path) -> None:
        self._buffer, self._path = buffer, path
        self._encoders = ThreadPoolExecutor(contents.ENCODERS, "encoder")
        self._facts: list[dict[str, Any]] = []
        self._written: asyncio.Future[None] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    async def commit(self, attempt: Attempt, group: Group) -> bool:
        encoded = await contents.encode(group, self._encoders)
        new = await self._buffer.commit(attempt, encoded)
        digest = encoded.rows.sha256
        facts = {"ordinal": attempt.ordinal, "attempt": attempt.number, "epoch": attempt.epoch, "sha256": digest}
        await asyncio.shield(self._said(facts))
        return new

    def _said(self, facts: dict[str, Any]) -> asyncio.Future[None]:
        """Acknowledgements come many at a time: their lines are one write."""
        self._facts.append(facts)
        if self._written is None:
            loop = asyncio.get_running_loop()
            self._written = loop.create_future()
            loop.call_soon(self._write, self._written)
        return self._written

    def _write(self, written: asyncio.Future[None]) -> None:
        facts, self._facts, self._written = self._facts, [], None
        try:
            append_lines(self._path, facts)
        except OSError as error:
            written.set_exception(error)
        else:
            written.set_result(None)


class TrainWitness:
    """The replay buffer as the trainer sees it. A line says what the step was trained on, as read, before it is recorded."""

    def __init__(self, buffer: Any, path: Path) -> None:
        self._buffer, self._path = buffer, path
        self._read: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    async def read(self, ordinals: list[int], columns: bool) -> list[Group]:
        groups = await self._buffer.read(ordinals, columns)
        self._read = [group.ordinal for group in groups]
        return groups

    async def record_step(self, step: int, metrics: dict[str, Any]) -> None:
        append_line(self._path, step=step, ordinals=self._read, weights=metrics["weights"])
        await self._buffer.record_step(step, metrics)
