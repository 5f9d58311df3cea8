"""Training results, checkpoints, retention, and what the run says of itself.

Invariant: rows stay until the last but one complete checkpoint covers them (a torn newest one falls back to it), and then for
`keep_groups` more groups.
"""

from __future__ import annotations

import dataclasses
import json
import sqlite3
from typing import Any

import numpy as np

from pipeline.buffer.api import StageReport
from pipeline.buffer.ledger import Ledger
from pipeline.buffer.schema import get_meta, set_meta


def record_step(ledger: Ledger, step: int, metrics: dict[str, Any]) -> None:
    """Repeating it changes nothing: a replay reports the result that was recorded first."""
    ledger.db.execute("INSERT OR IGNORE INTO results VALUES (?, ?, ?)", (step, json.dumps(metrics, default=_plain), ledger.clock()))


def mark_trained(ledger: Ledger, checkpoint_step: int, path: str) -> None:
    """The checkpoint is complete on disk before this is called; retention follows in the same transaction."""
    ledger.db.execute(
        "INSERT OR REPLACE INTO checkpoints VALUES (?, ?, ?, ?)", (checkpoint_step, path, ledger.writer_epoch, ledger.clock())
    )
    ledger.db.execute("UPDATE ordinals SET state = 'trained' WHERE state = 'consumed' AND consumed_step <= ?", (checkpoint_step,))
    evict(ledger)


def forget_checkpoint(ledger: Ledger, checkpoint_step: int) -> None:
    """A checkpoint was found torn: it no longer counts for retention. What was trained stays trained."""
    ledger.db.execute("DELETE FROM checkpoints WHERE step = ?", (checkpoint_step,))


def evict(ledger: Ledger) -> int:
    """Remove rows that neither resume nor `keep_groups` wants; returns the groups whose rows went."""
    ordinals = evictable(ledger.db, ledger.settings.keep_groups)
    for ordinal in ordinals:
        ledger.remove_payloads(ordinal)
    return len(ordinals)


def evictable(db: sqlite3.Connection, keep_groups: int | None) -> list[int]:
    """Trained groups whose rows are stored and wanted by nobody. CROSS: begins with what is stored, of which there is little, and
    not with all that was ever trained."""
    if keep_groups is None:
        return []
    rows = db.execute(
        "SELECT ordinal FROM payloads CROSS JOIN ordinals USING (ordinal)"
        " WHERE name = 'rows' AND state = 'trained' AND consumed_step <= ?"
        " ORDER BY consumed_step DESC, ordinal DESC LIMIT -1 OFFSET ?",
        (safe_step(db), keep_groups),
    )
    return [row["ordinal"] for row in rows]


def collect(ledger: Ledger) -> int:
    """`evict`, and another look for free segments, whatever is found."""
    ledger.sweep = True
    return evict(ledger)


def safe_step(db: sqlite3.Connection) -> int:
    """Step of the last but one complete checkpoint; 0 (nothing is safe) before there are two."""
    rows = db.execute("SELECT step FROM checkpoints ORDER BY step DESC LIMIT 2").fetchall()
    return rows[1]["step"] if len(rows) == 2 else 0


def steps(db: sqlite3.Connection, after: int) -> dict[str, Any]:
    """See BufferClient.steps."""
    newest = db.execute("SELECT step, path FROM checkpoints ORDER BY step DESC LIMIT 1").fetchone()
    selections = db.execute("SELECT step, ordinals FROM selections WHERE step > ? ORDER BY step", (safe_step(db),))
    return {
        "trained_step": trained_step(db),
        "first_open": _first_open(db),
        "checkpoint_step": newest["step"] if newest else 0,
        "checkpoint_path": newest["path"] if newest else None,
        "results": results(db, after),
        "selections": {row["step"]: json.loads(row["ordinals"]) for row in selections},
    }


def _first_open(db: sqlite3.Connection) -> int:
    """Samplers that take groups of any step may train a step while the rollout of an earlier one still goes on."""
    unclosed = db.execute("SELECT min(step) FROM steps WHERE closed = 0").fetchone()[0]
    following = trained_step(db) + 1
    return following if unclosed is None else min(unclosed, following)


def trained_step(db: sqlite3.Connection) -> int:
    return db.execute("SELECT coalesce(max(step), 0) FROM results").fetchone()[0]


def results(db: sqlite3.Connection, after: int) -> dict[int, dict[str, Any]]:
    rows = db.execute("SELECT step, metrics FROM results WHERE step > ? ORDER BY step", (after,))
    return {row["step"]: json.loads(row["metrics"]) for row in rows}


def report_stage(ledger: Ledger, report: StageReport) -> None:
    ledger.db.execute(
        "INSERT OR REPLACE INTO stages VALUES (?, ?, ?)",
        (report.stage, json.dumps(dataclasses.asdict(report), default=_plain), ledger.clock()),
    )


def claim(ledger: Ledger, role: str) -> int:
    number = get_meta(ledger.db, claim_key(role), 0) + 1
    set_meta(ledger.db, claim_key(role), number)
    return number


def claim_key(role: str) -> str:
    return f"claim:{role}"


def set_run(ledger: Ledger, state: str, error: str | None, facts: dict[str, Any]) -> None:
    set_meta(ledger.db, "state", state)
    set_meta(ledger.db, "error", error)
    for key, value in facts.items():
        set_meta(ledger.db, f"fact:{key}", value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        return value.tolist()
    raise TypeError(f"cannot record a {type(value).__name__}: {value!r:.80}")
