"""Slots and attempts: which ordinal belongs to which step, and who may roll it out.

Invariant: an ordinal is in exactly one state, and changes it only by a guarded update inside one transaction of the current
writer. Functions here run inside such a transaction (`Ledger` is its view of the database) and never begin or end one.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.buffer.api import Assignment, Attempt, AttemptEnd, Outcome
from pipeline.buffer.schema import LIVE
from pipeline.buffer.settings import BufferSettings
from pipeline.errors import AttemptRefused, CapacityFull, RolloutError


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refusal that is itself recorded: the transaction is committed, then the error is raised to the caller."""

    error: RolloutError


@dataclass(slots=True)
class Ledger:
    db: sqlite3.Connection
    settings: BufferSettings
    clock: Callable[[], float]
    writer_epoch: int
    run_epoch: int
    sweep: bool = False
    """Payloads were removed: segments may have become free."""

    def one(self, sql: str, *values: Any) -> sqlite3.Row | None:
        return self.db.execute(sql, values).fetchone()

    def all(self, sql: str, *values: Any) -> list[sqlite3.Row]:
        return self.db.execute(sql, values).fetchall()

    def ordinal(self, ordinal: int) -> sqlite3.Row:
        row = self.one("SELECT * FROM ordinals WHERE ordinal = ?", ordinal)
        if row is None:
            raise RolloutError(f"ordinal {ordinal} was never assigned")
        return row

    def move(self, ordinal: int, source: str, target: str, **values: Any) -> None:
        """The one way a state changes: compare and set."""
        columns = "".join(f", {name} = ?" for name in values)
        done = self.db.execute(
            f"UPDATE ordinals SET state = ?{columns} WHERE ordinal = ? AND state = ?", (target, *values.values(), ordinal, source)
        )
        if done.rowcount != 1:
            raise RolloutError(f"ordinal {ordinal} is no longer {source}: it cannot become {target}")

    def drop(self, row: sqlite3.Row, reason: str) -> None:
        """From a live state to `dropped`: rows cleared, capacity returned."""
        self.move(row["ordinal"], row["state"], "dropped", reason=reason)
        if row["state"] == "running":
            self.end(row, row["attempt"], "discarded", reason)
        self.db.execute("DELETE FROM missing WHERE ordinal = ?", (row["ordinal"],))
        self.remove_payloads(row["ordinal"])

    def remove_payloads(self, ordinal: int) -> None:
        gone = self.db.execute("DELETE FROM payloads WHERE ordinal = ? RETURNING segment", (ordinal,)).fetchall()
        self.sweep |= any(row["segment"] is not None for row in gone)

    def end(self, row: sqlite3.Row, number: int, state: str, reason: str | None) -> None:
        self.db.execute(
            "UPDATE attempts SET state = ?, reason = ?, ended_at = ? WHERE ordinal = ? AND number = ? AND state = 'running'",
            (state, reason, self.clock(), row["ordinal"], number),
        )


def assign(ledger: Ledger, step: int, count: int, limit: int | None) -> list[Assignment]:
    """See BufferClient.assign. All or nothing, so that a step is never half assigned for lack of room."""
    if ledger.one("SELECT 1 FROM steps WHERE step = ?", step) is not None:
        return occupants(ledger, step)
    last = ledger.one("SELECT max(step) AS step FROM steps")["step"]
    if last is not None and step != last + 1:
        raise RolloutError(f"step {step} cannot be assigned after step {last}: steps are assigned one after the other")
    first = ledger.one("SELECT coalesce(max(ordinal) + 1, 0) AS ordinal FROM ordinals")["ordinal"]
    count = count if limit is None else max(0, min(count, limit - first))
    room = free_capacity(ledger.db, ledger.settings)
    if count > room:
        raise CapacityFull(
            f"step {step} asks for {count} groups, but only {room} of buffer.capacity {ledger.settings.capacity} are free;"
            " wait_capacity waits for a training step to take some"
        )
    ledger.db.execute("INSERT INTO steps VALUES (?, ?, ?)", (step, count, int(count == 0)))
    ledger.db.executemany(
        "INSERT INTO ordinals (ordinal, step, slot, state) VALUES (?, ?, ?, 'pending')",
        [(first + slot, step, slot) for slot in range(count)],
    )
    return occupants(ledger, step)


def occupants(ledger: Ledger, step: int) -> list[Assignment]:
    """The newest ordinal of each slot."""
    rows = ledger.all("SELECT slot, max(ordinal) AS ordinal, state FROM ordinals WHERE step = ? GROUP BY slot", step)
    return [Assignment(step, row["slot"], row["ordinal"], row["state"]) for row in rows]


def replace(ledger: Ledger, ordinal: int, limit: int | None) -> Assignment | None:
    """See BufferClient.replace. The room is the dropped one's own, which `assign` has left alone."""
    row = ledger.ordinal(ordinal)
    if row["state"] != "dropped":
        raise RolloutError(f"ordinal {ordinal} is {row['state']}: only a dropped one is replaced")
    if row["replaced_by"] is not None:
        new = ledger.ordinal(row["replaced_by"])
        return Assignment(new["step"], new["slot"], new["ordinal"], new["state"])
    closed = ledger.one("SELECT closed FROM steps WHERE step = ?", row["step"])["closed"]
    number = ledger.one("SELECT max(ordinal) + 1 AS ordinal FROM ordinals")["ordinal"]
    if closed or ledger.settings.on_dropped == "shrink" or (limit is not None and number >= limit):
        return None
    ledger.db.execute(
        "INSERT INTO ordinals (ordinal, step, slot, state) VALUES (?, ?, ?, 'pending')", (number, row["step"], row["slot"])
    )
    ledger.db.execute("UPDATE ordinals SET replaced_by = ? WHERE ordinal = ?", (number, ordinal))
    return Assignment(row["step"], row["slot"], number, "pending")


def close_rollout(ledger: Ledger, step: int) -> None:
    done = ledger.db.execute("UPDATE steps SET closed = 1 WHERE step = ?", (step,))
    if done.rowcount != 1:
        raise RolloutError(f"step {step} cannot be closed: it was never assigned")


def discard(ledger: Ledger, ordinal: int, reason: str) -> bool:
    row = ledger.ordinal(ordinal)
    if row["state"] == "dropped":
        return False
    if row["state"] not in LIVE:
        raise RolloutError(f"ordinal {ordinal} is {row['state']}: it cannot be dropped ({reason}) any more")
    ledger.drop(row, reason)
    return True


def start_attempt(ledger: Ledger, ordinal: int, weight_version: int, worker: str) -> Attempt | Refusal:
    row = ledger.ordinal(ordinal)
    if row["state"] == "running":
        lose(ledger, row, "superseded")
        row = ledger.ordinal(ordinal)
    if row["state"] != "pending":
        why = f" ({row['reason']}, {row['lost']} attempts lost)" if row["reason"] else ""
        return Refusal(AttemptRefused(f"ordinal {ordinal} is {row['state']}{why}: it is not rolled out again"))
    number, failures = row["attempt"] + 1, row["infra"] + row["data"]
    ledger.move(ordinal, "pending", "running", attempt=number, weight_version=weight_version)
    ledger.db.execute(
        "INSERT INTO attempts (ordinal, number, run_epoch, writer_epoch, worker, weight_version, failures, state, started_at)"
        " VALUES (?, ?, ?, ?, ?, ?, ?, 'running', ?)",
        (ordinal, number, ledger.run_epoch, ledger.writer_epoch, worker, weight_version, failures, ledger.clock()),
    )
    return Attempt(ordinal, number, failures, ledger.run_epoch)


def end_attempt(ledger: Ledger, attempt: Attempt, outcome: Outcome, reason: str) -> AttemptEnd:
    """Ends the attempt if it runs; answers from what is recorded, so that repeating the call changes nothing."""
    row = ledger.ordinal(attempt.ordinal)
    if row["state"] == "running" and row["attempt"] == attempt.number and attempt.epoch == ledger.run_epoch:
        if outcome == "lost":
            lose(ledger, row, reason)
        else:
            _fail(ledger, row, outcome, reason)
        row = ledger.ordinal(attempt.ordinal)
    again = row["state"] == "pending" and row["attempt"] == attempt.number
    failures = row["infra"] + row["data"]
    failed = ledger.one("SELECT state FROM attempts WHERE ordinal = ? AND number = ?", attempt.ordinal, attempt.number)
    waits = again and failed is not None and failed["state"] in ("infra", "data")
    wait_s = ledger.settings.backoff_s * 2 ** (failures - 1) if waits else 0.0
    return AttemptEnd(again, wait_s, row["reason"] if row["state"] == "dropped" else None)


def _fail(ledger: Ledger, row: sqlite3.Row, outcome: str, reason: str) -> None:
    settings = ledger.settings
    budget = settings.infra_attempts if outcome == "infra" else settings.data_attempts
    count = row[outcome] + 1
    ledger.end(row, row["attempt"], outcome, reason)
    ledger.move(row["ordinal"], "running", "pending", **{outcome: count})
    if count >= budget:
        ledger.drop(ledger.ordinal(row["ordinal"]), reason)


def lose(ledger: Ledger, row: sqlite3.Row, reason: str) -> None:
    """A running attempt's worker, cluster or driver is gone: back to pending, or dropped after too many."""
    lost = row["lost"] + 1
    ledger.end(row, row["attempt"], "lost", reason)
    ledger.move(row["ordinal"], "running", "pending", lost=lost)
    if lost >= ledger.settings.poison_after:
        ledger.drop(ledger.ordinal(row["ordinal"]), "poison")


def lose_running(ledger: Ledger) -> None:
    """A new run epoch: nobody of the old one is left to commit."""
    for row in ledger.all("SELECT * FROM ordinals WHERE state = 'running'"):
        lose(ledger, row, "new run epoch")


def used_capacity(db: sqlite3.Connection) -> int:
    marks = ", ".join("?" * len(LIVE))
    return db.execute(f"SELECT count(*) FROM ordinals WHERE state IN ({marks})", LIVE).fetchone()[0]


def replaceable(db: sqlite3.Connection, settings: BufferSettings) -> int:
    """Dropped groups that may still be replaced: their room is kept, or a replacement could find none."""
    if settings.on_dropped != "replace":
        return 0
    return db.execute(
        "SELECT count(*) FROM steps JOIN ordinals USING (step) WHERE closed = 0 AND state = 'dropped' AND replaced_by IS NULL"
    ).fetchone()[0]


def free_capacity(db: sqlite3.Connection, settings: BufferSettings) -> int:
    return settings.capacity - used_capacity(db) - replaceable(db, settings)
