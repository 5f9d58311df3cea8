"""The database of a run: its tables, its stable view, and how it is opened.

Invariant: `ledger` keeps its columns for ever; everything else may change with SCHEMA_VERSION, and a database of another
version is refused by name.
"""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

from pipeline.errors import StoreError, UserError
from pipeline.paths import RunPaths

SCHEMA_VERSION = 2
APPLICATION_ID = 0x524F4C4C
BUSY_S = 10.0

LIVE = ("pending", "running", "written", "ready")
"""States that take up capacity."""

_TABLES = (
    """CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID""",
    """CREATE TABLE steps (step INTEGER PRIMARY KEY, slots INTEGER NOT NULL, closed INTEGER NOT NULL)""",
    """CREATE INDEX steps_open ON steps (step) WHERE closed = 0""",
    """CREATE TABLE ordinals (
        ordinal INTEGER PRIMARY KEY, step INTEGER NOT NULL, slot INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('pending', 'running', 'written', 'ready', 'consumed', 'trained', 'dropped')),
        reason TEXT, attempt INTEGER NOT NULL DEFAULT 0, committed INTEGER,
        lost INTEGER NOT NULL DEFAULT 0, infra INTEGER NOT NULL DEFAULT 0, data INTEGER NOT NULL DEFAULT 0,
        late INTEGER NOT NULL DEFAULT 0, weight_version INTEGER, dataset TEXT, teacher TEXT, rows INTEGER, tokens INTEGER,
        rows_sha256 TEXT, written_at REAL, consumed_step INTEGER, replaced_by INTEGER)""",
    """CREATE INDEX ordinals_by_step ON ordinals (step, slot)""",
    """CREATE INDEX ordinals_by_state ON ordinals (state, step, slot)""",
    """CREATE TABLE attempts (
        ordinal INTEGER NOT NULL, number INTEGER NOT NULL, run_epoch INTEGER NOT NULL, writer_epoch INTEGER NOT NULL,
        worker TEXT NOT NULL, weight_version INTEGER NOT NULL, failures INTEGER NOT NULL,
        state TEXT NOT NULL CHECK (state IN ('running', 'committed', 'lost', 'infra', 'data', 'discarded')),
        reason TEXT, late INTEGER NOT NULL DEFAULT 0, started_at REAL NOT NULL, ended_at REAL,
        PRIMARY KEY (ordinal, number)) WITHOUT ROWID""",
    """CREATE TABLE payloads (
        id INTEGER PRIMARY KEY, ordinal INTEGER NOT NULL, name TEXT NOT NULL, sha256 TEXT NOT NULL, length INTEGER NOT NULL,
        segment INTEGER, offset INTEGER, data BLOB, UNIQUE (ordinal, name))""",
    """CREATE INDEX payloads_by_segment ON payloads (segment) WHERE segment IS NOT NULL""",
    """CREATE TABLE fields (
        ordinal INTEGER NOT NULL, name TEXT NOT NULL, producer TEXT NOT NULL, digest TEXT NOT NULL, produced_at REAL NOT NULL,
        PRIMARY KEY (ordinal, name)) WITHOUT ROWID""",
    """CREATE TABLE missing (name TEXT NOT NULL, ordinal INTEGER NOT NULL, PRIMARY KEY (name, ordinal)) WITHOUT ROWID""",
    """CREATE INDEX missing_by_ordinal ON missing (ordinal)""",
    """CREATE TABLE selections (
        step INTEGER PRIMARY KEY, ordinals TEXT NOT NULL, dropped TEXT NOT NULL, writer_epoch INTEGER NOT NULL,
        at REAL NOT NULL)""",
    """CREATE TABLE results (step INTEGER PRIMARY KEY, metrics TEXT NOT NULL, at REAL NOT NULL)""",
    """CREATE TABLE checkpoints (step INTEGER PRIMARY KEY, path TEXT NOT NULL, writer_epoch INTEGER NOT NULL, at REAL NOT NULL)""",
    """CREATE TABLE stages (stage TEXT PRIMARY KEY, report TEXT NOT NULL, at REAL NOT NULL) WITHOUT ROWID""",
    """CREATE VIEW ledger AS SELECT ordinal, step, slot, state, attempt, reason, weight_version,
        (SELECT coalesce(group_concat(name, ','), '') FROM fields WHERE fields.ordinal = ordinals.ordinal) AS fields,
        rows_sha256 FROM ordinals""",
)


def create_run(paths: RunPaths, facts: dict[str, Any], *, exist_ok: bool = False) -> None:
    """Make the run's database in state `starting`. Facts are JSON values that status and resume read (`steps`, ...).

    One transaction: whoever dies in it leaves a file without a run in it, and the next call begins anew. Raises UserError when
    there is a run already, or does nothing then (`exist_ok`).
    """
    if exist_ok and is_created(paths):
        return
    paths.root.mkdir(parents=True, exist_ok=True)
    paths.groups.mkdir(exist_ok=True)
    db = _connect(paths.database, "rwc")
    try:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = FULL")
        db.execute("BEGIN IMMEDIATE")
        if db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            if exist_ok:
                return
            raise UserError(f"run {paths.run_id} exists: {paths.database}; give another run.id, or resume it")
        for statement in _TABLES:
            db.execute(statement)
        meta = {"run_id": paths.run_id, "state": "starting", "error": None, "writer_epoch": 0, "run_epoch": 0}
        meta |= {f"fact:{key}": value for key, value in facts.items()}
        db.executemany("INSERT INTO meta VALUES (?, ?)", [(key, json.dumps(value)) for key, value in meta.items()])
        db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
        db.execute("COMMIT")
    except sqlite3.DatabaseError as error:
        raise StoreError(f"{paths.database} cannot be made: {error}") from error
    finally:
        db.close()


def is_created(paths: RunPaths) -> bool:
    """False for a run that was stopped while it was made: without a database, or with one that holds nothing yet."""
    if not paths.database.is_file():
        return False
    with closing(_connect(paths.database, "ro")) as db:
        try:
            return db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] > 0
        except sqlite3.DatabaseError:
            return True  # it holds something: opening it says what is wrong


def open_writer(path: Path) -> sqlite3.Connection:
    """Autocommit mode: transactions are begun by hand. The connection may be used by one thread at a time, whichever."""
    db = _open(path, "rw")
    db.execute("PRAGMA synchronous = FULL")
    return db


def open_reader(path: Path) -> sqlite3.Connection:
    """Read-only; sees what was committed, while a writer works or after it was killed."""
    return _open(path, "ro")


def get_meta(db: sqlite3.Connection, key: str, default: Any = None) -> Any:
    row = db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
    return default if row is None else json.loads(row[0])


def set_meta(db: sqlite3.Connection, key: str, value: Any) -> None:
    db.execute("INSERT OR REPLACE INTO meta VALUES (?, ?)", (key, json.dumps(value)))


def _open(path: Path, mode: str) -> sqlite3.Connection:
    if not path.is_file():
        raise UserError(f"no run in {path.parent}: {path.name} is missing")
    db = _connect(path, mode)
    try:
        _check(db, path)
    except BaseException:
        db.close()
        raise
    return db


def _connect(path: Path, mode: str) -> sqlite3.Connection:
    db = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode={mode}", uri=True, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    db.row_factory = sqlite3.Row
    return db


def _check(db: sqlite3.Connection, path: Path) -> None:
    try:
        application = db.execute("PRAGMA application_id").fetchone()[0]
        version = db.execute("PRAGMA user_version").fetchone()[0]
    except sqlite3.DatabaseError as error:
        raise UserError(f"{path} cannot be read as a run's database: {error}") from error
    if application != APPLICATION_ID:
        raise UserError(f"{path} is not a run's database (application id {application:#x}, wanted {APPLICATION_ID:#x})")
    if version != SCHEMA_VERSION:
        raise UserError(f"{path} has schema version {version}; this program reads version {SCHEMA_VERSION}")
