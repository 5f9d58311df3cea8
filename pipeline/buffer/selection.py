"""What a training step takes: the samplers.

Invariant: what was selected for a step is recorded for ever and is never selected again. A step can be selected when its groups
are there, or when no group that it waits for can come any more, so that no run waits for ever (see `selectable`).
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter

from pipeline.buffer.api import Selection
from pipeline.buffer.ledger import Ledger
from pipeline.buffer.settings import BufferSettings
from pipeline.errors import NotSelectable, RolloutError

_UNREADY = "('pending', 'running', 'written')"


def scored(db: sqlite3.Connection, step: int) -> bool:
    """No group of the step is pending, running or written; a step that was not assigned is not scored."""
    assigned = db.execute("SELECT 1 FROM steps WHERE step = ?", (step,)).fetchone()
    return assigned is not None and not _unready_of(db, step)


def selectable(db: sqlite3.Connection, settings: BufferSettings, step: int) -> bool:
    """Whether `select(step)` can return at once.

    in_order: the step's rollout is closed, and each of its groups is ready or dropped.

    ready_first, windowed: `tasks_per_step` groups of any steps are ready (and fresh enough). Or fewer are, and the rollouts up
    to this step are closed with nothing of them pending, running or written: rollouts of later steps may wait for this very
    training step, so it must not wait for them. After each selection at most `tasks_per_step` groups for each step that was
    assigned beyond it are left, so neither capacity nor the last step can be stuck.

    Once true it stays true, unless a ready group is discarded before it is selected: then wait again.
    """
    if db.execute("SELECT 1 FROM selections WHERE step = ?", (step,)).fetchone() is not None:
        return True
    if settings.sampler == "in_order":
        return _closed(db, step) and not _unready_of(db, step)
    if len(_fresh_ready(db, settings, step)) >= settings.tasks_per_step:
        return True
    return _closed(db, step) and not _still_coming(db, settings, step)


def select(ledger: Ledger, step: int) -> Selection:
    recorded = ledger.one("SELECT * FROM selections WHERE step = ?", step)
    if recorded is not None:
        taken = json.loads(recorded["ordinals"])
        return Selection(step, tuple(taken), json.loads(recorded["dropped"]), not taken and _empty(ledger.db, step))
    last = ledger.one("SELECT max(step) AS step FROM selections")["step"]
    if last is not None and step != last + 1:
        raise RolloutError(f"training step {step} cannot be selected after step {last}: steps are selected one after the other")
    if not selectable(ledger.db, ledger.settings, step):
        raise NotSelectable(f"training step {step} still waits for groups (buffer.sampler {ledger.settings.sampler})")
    dropped = Counter(
        {row["reason"]: row["groups"] for row in ledger.all(
            "SELECT reason, count(*) AS groups FROM ordinals WHERE step = ? AND state = 'dropped' GROUP BY reason", step
        )}
    )  # fmt: skip
    dropped += Counter(stale=_drop_stale(ledger, step))
    ordinals = _candidates(ledger.db, ledger.settings, step)
    for ordinal in ordinals:
        ledger.move(ordinal, "ready", "consumed", consumed_step=step)
    ledger.db.execute(
        "INSERT INTO selections VALUES (?, ?, ?, ?, ?)",
        (step, json.dumps(ordinals), json.dumps(dropped), ledger.writer_epoch, ledger.clock()),
    )
    return Selection(step, tuple(ordinals), dict(dropped), not ordinals and _empty(ledger.db, step))


def next_step(db: sqlite3.Connection) -> int:
    """The step that is selected next."""
    return db.execute("SELECT coalesce(max(step), 0) + 1 FROM selections").fetchone()[0]


def _empty(db: sqlite3.Connection, step: int) -> bool:
    """A step of an earlier one's groups, or whose own were all dropped, is no end of the data."""
    return db.execute("SELECT 1 FROM steps WHERE step = ? AND slots = 0", (step,)).fetchone() is not None


def _candidates(db: sqlite3.Connection, settings: BufferSettings, step: int) -> list[int]:
    if settings.sampler == "in_order":
        rows = db.execute("SELECT ordinal FROM ordinals WHERE step = ? AND state = 'ready' ORDER BY slot, ordinal", (step,))
        return [row["ordinal"] for row in rows]
    return _fresh_ready(db, settings, step)[: settings.tasks_per_step]


def _fresh_ready(db: sqlite3.Connection, settings: BufferSettings, step: int) -> list[int]:
    """Oldest step first, so that a straggler is trained on as soon as it is there."""
    rows = db.execute(
        "SELECT ordinal FROM ordinals WHERE state = 'ready' AND weight_version >= ? ORDER BY step, slot, ordinal",
        (oldest_version(settings, step),),
    )
    return [row["ordinal"] for row in rows]


def oldest_version(settings: BufferSettings, step: int) -> int:
    """Training step k trains version k - 1; a group's staleness is k - 1 - its version at dispatch."""
    return step - 1 - settings.max_staleness if settings.sampler == "windowed" else 0


def _drop_stale(ledger: Ledger, step: int) -> int:
    """`windowed`: groups that this step and all later ones find too old, ready or still to be scored."""
    rows = ledger.all(
        "SELECT * FROM ordinals WHERE state IN ('ready', 'written') AND weight_version < ?",
        oldest_version(ledger.settings, step),
    )
    for row in rows:
        ledger.drop(row, "stale")
    return len(rows)


def _closed(db: sqlite3.Connection, step: int) -> bool:
    """The step was assigned, and its rollout and all earlier ones have ended. Empty steps (end of the data) are closed."""
    if db.execute("SELECT 1 FROM steps WHERE step = ? AND closed = 1", (step,)).fetchone() is None:
        return False
    return db.execute("SELECT 1 FROM steps WHERE closed = 0 AND step <= ?", (step,)).fetchone() is None


def _unready_of(db: sqlite3.Connection, step: int) -> bool:
    sql = f"SELECT 1 FROM ordinals WHERE step = ? AND state IN {_UNREADY} LIMIT 1"
    return db.execute(sql, (step,)).fetchone() is not None


def _still_coming(db: sqlite3.Connection, settings: BufferSettings, step: int) -> bool:
    """Of this step and earlier ones. A written group that is too old is not waited for: the selection drops it."""
    sql = f"SELECT 1 FROM ordinals WHERE state IN {_UNREADY} AND step <= ? AND (state != 'written' OR weight_version >= ?) LIMIT 1"
    return db.execute(sql, (step, oldest_version(settings, step))).fetchone() is not None
