"""Rows and produced fields: what a group holds, and when it is ready.

Invariant: rows, fields and state change together. A group is ready when nothing of what its task needs is missing; the buffer
knows fields by name only, and no stage.
"""

from __future__ import annotations

import asyncio
import sqlite3
from concurrent.futures import Executor
from dataclasses import dataclass

import numpy as np

from pipeline.buffer import codec, selection
from pipeline.buffer.api import Attempt, BacklogItem
from pipeline.buffer.ledger import Ledger, Refusal
from pipeline.buffer.settings import BufferSettings
from pipeline.errors import DataError, LateCommit, RolloutError
from pipeline.pickling import by_fields
from pipeline.records import Column, Group, Sample

ROWS = "rows"
LARGE_TOKENS = 32 * 1024
"""Groups of more tokens are encoded outside the event loop."""
ENCODERS = 2
"""Threads that encode. Of more, groups that end together are all ready late, and the buffer has nothing to write meanwhile."""


@by_fields
@dataclass(slots=True)
class Payload:
    """Encoded bytes on their way into the store; `segment` and `offset` are set once a segment holds them."""

    ordinal: int
    name: str
    data: np.ndarray
    """uint8: an array crosses to another process of the machine without being copied."""
    sha256: str
    segment: int | None = None
    offset: int | None = None


@by_fields
@dataclass(frozen=True, slots=True)
class EncodedColumn:
    name: str
    ordinal: int
    producer: str
    digest: str
    payload: Payload


@by_fields
@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """A group as it is stored, and what the ledger says of it."""

    ordinal: int
    step: int
    attempt: int
    weight_version: int
    dataset: str
    teacher: str | None
    samples: int
    tokens: int
    missing: tuple[str, ...]
    """Fields that the task needs and the group does not bring along."""
    rows: Payload
    columns: tuple[EncodedColumn, ...]


async def encode(group: Group, pool: Executor) -> EncodedGroup:
    """For whoever made the group: the buffer is spared the work, and what travels is one block of bytes."""
    if group.tokens() <= LARGE_TOKENS:
        return encode_group(group)
    return await asyncio.get_running_loop().run_in_executor(pool, encode_group, group)


def encode_group(group: Group) -> EncodedGroup:
    _check_columns(group)
    task = group.task
    return EncodedGroup(
        ordinal=group.ordinal,
        step=group.step,
        attempt=group.attempt,
        weight_version=group.weight_version,
        dataset=task.dataset,
        teacher=task.teacher,
        samples=len(group.samples),
        tokens=group.tokens(),
        missing=tuple(name for name in task.needs if name not in group.columns),
        rows=_payload(group.ordinal, ROWS, codec.encode_group(group)),
        columns=tuple(encode_column(column) for column in group.columns.values()),
    )


def encode_column(column: Column) -> EncodedColumn:
    payload = _payload(column.ordinal, f"field:{column.name}", codec.encode_column(column))
    return EncodedColumn(column.name, column.ordinal, column.producer, column.digest, payload)


def encode_sample(ordinal: int, sample: Sample) -> Payload:
    return _payload(ordinal, f"sample:{sample.sample_id}", codec.encode_sample(sample))


def commit(ledger: Ledger, attempt: Attempt, encoded: EncodedGroup) -> bool | Refusal:
    """See BufferClient.commit. Fields that the group brings along are produced in the same transaction."""
    named = (encoded.ordinal, encoded.attempt)
    if named != (attempt.ordinal, attempt.number):
        raise RolloutError(f"group of (ordinal, attempt) {named} committed by attempt {(attempt.ordinal, attempt.number)}")
    row = ledger.ordinal(attempt.ordinal)
    if row["committed"] == attempt.number:
        return False
    if not _current(ledger, row, attempt):
        return _late(ledger, row, attempt)
    if encoded.step != row["step"]:
        raise RolloutError(f"ordinal {encoded.ordinal} belongs to step {row['step']}, its group says step {encoded.step}")
    now = ledger.clock()
    ledger.end(row, attempt.number, "committed", None)
    ledger.move(
        encoded.ordinal, "running", "written" if encoded.missing else "ready", committed=attempt.number,
        rows_sha256=encoded.rows.sha256, weight_version=encoded.weight_version, dataset=encoded.dataset, teacher=encoded.teacher,
        rows=encoded.samples, tokens=encoded.tokens, written_at=now,
    )  # fmt: skip
    ledger.remove_payloads(encoded.ordinal)  # durable samples of the unfinished group
    _store(ledger, encoded.rows)
    for column in encoded.columns:
        _produce(ledger, column)
    ledger.db.executemany("INSERT INTO missing VALUES (?, ?)", [(name, encoded.ordinal) for name in encoded.missing])
    return True


def mark_produced(ledger: Ledger, columns: list[EncodedColumn]) -> dict[int, str]:
    return {column.ordinal: _mark(ledger, column) for column in columns}


def _mark(ledger: Ledger, column: EncodedColumn) -> str:
    ordinal, name = column.ordinal, column.name
    row = ledger.one("SELECT state FROM ordinals WHERE ordinal = ?", ordinal)
    if row is None or row["state"] in ("pending", "running"):
        return "unknown"
    if row["state"] == "dropped":
        return "late"
    if ledger.one("SELECT 1 FROM fields WHERE ordinal = ? AND name = ?", ordinal, name) is not None:
        return "repeated"
    if row["state"] not in ("written", "ready"):
        return "late"
    _produce(ledger, column)
    ledger.db.execute("DELETE FROM missing WHERE ordinal = ? AND name = ?", (ordinal, name))
    if row["state"] == "written" and ledger.one("SELECT 1 FROM missing WHERE ordinal = ?", ordinal) is None:
        ledger.move(ordinal, "written", "ready")
    return "produced"


def store_sample(ledger: Ledger, attempt: Attempt, payload: Payload) -> None:
    row = ledger.ordinal(attempt.ordinal)
    if not _current(ledger, row, attempt):
        raise LateCommit(f"attempt {attempt.number} of ordinal {attempt.ordinal} is over: its sample is not kept")
    _store(ledger, payload)


def backlog(db: sqlite3.Connection, settings: BufferSettings, field_name: str, limit: int) -> list[BacklogItem]:
    step = selection.next_step(db)
    rows = db.execute(
        "SELECT ordinal, step, dataset, teacher, rows, tokens, written_at, step < ? AS awaited, weight_version < ? AS stale"
        " FROM missing JOIN ordinals USING (ordinal) WHERE name = ? ORDER BY step, written_at, ordinal LIMIT ?",
        (step, selection.oldest_version(settings, step), field_name, limit),
    )
    return [BacklogItem(**{**row, "awaited": bool(row["awaited"]), "stale": bool(row["stale"])}) for row in map(dict, rows)]


def _current(ledger: Ledger, row: sqlite3.Row, attempt: Attempt) -> bool:
    return row["state"] == "running" and row["attempt"] == attempt.number and attempt.epoch == ledger.run_epoch


def _late(ledger: Ledger, row: sqlite3.Row, attempt: Attempt) -> Refusal:
    first = ledger.db.execute(
        "UPDATE attempts SET late = 1 WHERE ordinal = ? AND number = ? AND late = 0", (attempt.ordinal, attempt.number)
    )
    if first.rowcount:
        ledger.db.execute("UPDATE ordinals SET late = late + 1 WHERE ordinal = ?", (attempt.ordinal,))
    return Refusal(
        LateCommit(
            f"attempt {attempt.number} of ordinal {attempt.ordinal} (run epoch {attempt.epoch}) is over: the ordinal is"
            f" {row['state']}, its newest attempt {row['attempt']}, the run epoch {ledger.run_epoch}"
        )
    )


def _produce(ledger: Ledger, column: EncodedColumn) -> None:
    _store(ledger, column.payload)
    ledger.db.execute(
        "INSERT INTO fields VALUES (?, ?, ?, ?, ?)",
        (column.ordinal, column.name, column.producer, column.digest, ledger.clock()),
    )


def _store(ledger: Ledger, payload: Payload) -> None:
    inline = payload.data.tobytes() if payload.segment is None else None
    ledger.db.execute(
        "INSERT OR REPLACE INTO payloads (ordinal, name, sha256, length, segment, offset, data) VALUES (?, ?, ?, ?, ?, ?, ?)",
        (payload.ordinal, payload.name, payload.sha256, len(payload.data), payload.segment, payload.offset, inline),
    )


def _payload(ordinal: int, name: str, data: bytes) -> Payload:
    return Payload(ordinal, name, np.frombuffer(data, np.uint8), codec.digest(data))


def _check_columns(group: Group) -> None:
    """Columns that a group brings along must be its own."""
    for name, column in group.columns.items():
        if (name, group.ordinal) != (column.name, column.ordinal):
            raise DataError(f"group {group.ordinal} holds column {column.name!r} of ordinal {column.ordinal} under {name!r}")
