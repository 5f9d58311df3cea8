"""Reading rows back.

Invariant: what is returned is what was written (checksums are verified), and a group is left out only when the ledger says that
its rows are gone.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

from pipeline.buffer import codec
from pipeline.buffer.contents import ROWS
from pipeline.buffer.segments import read_record
from pipeline.errors import StoreCorrupt
from pipeline.records import Group, Sample


def groups(db: sqlite3.Connection, folder: Path, ordinals: list[int], columns: bool) -> list[Group]:
    found = (_group(db, folder, ordinal, columns) for ordinal in ordinals)
    return [group for group in found if group is not None]


def samples(db: sqlite3.Connection, folder: Path, ordinal: int) -> list[Sample]:
    rows = db.execute("SELECT * FROM payloads WHERE ordinal = ? AND name LIKE 'sample:%'", (ordinal,)).fetchall()
    kept = [codec.decode_sample(_load(row, folder)) for row in rows]
    return sorted(kept, key=lambda sample: sample.index)


def _group(db: sqlite3.Connection, folder: Path, ordinal: int, columns: bool) -> Group | None:
    """None also when retention has deleted the segment since this read transaction began."""
    wanted = "(name = 'rows' OR name LIKE 'field:%')" if columns else "name = 'rows'"
    rows = db.execute(f"SELECT * FROM payloads WHERE ordinal = ? AND {wanted} ORDER BY name", (ordinal,)).fetchall()
    try:
        stored = {row["name"]: _load(row, folder) for row in rows}
    except FileNotFoundError as error:
        if _is_current(db, ordinal):
            raise StoreCorrupt(f"rows of ordinal {ordinal} are lost: {error}") from error
        return None
    if ROWS not in stored:
        return None
    group = codec.decode_group(stored.pop(ROWS))
    decoded = [codec.decode_column(data) for data in stored.values()]
    group.columns = {column.name: column for column in decoded}
    return group


def _is_current(db: sqlite3.Connection, ordinal: int) -> bool:
    """Looks outside the caller's snapshot: it begins a new one."""
    db.execute("COMMIT")
    db.execute("BEGIN")
    return db.execute("SELECT 1 FROM payloads WHERE ordinal = ?", (ordinal,)).fetchone() is not None


def _load(row: sqlite3.Row, folder: Path) -> bytes | bytearray:
    if row["segment"] is not None:
        return read_record(folder, row["segment"], row["offset"], row["length"], row["sha256"])
    if codec.digest(row["data"]) != row["sha256"]:
        raise StoreCorrupt(f"run.db: {row['name']} of ordinal {row['ordinal']} has another checksum than was written")
    return row["data"]
