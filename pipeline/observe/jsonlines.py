"""Files of one JSON object a line, appended to while a run goes on.

Invariant: after `JsonLines(path)` the file ends with a whole record; a line torn by a crash is cut off, and what cannot be
said in JSON (NaN, infinity) is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_CHUNK = 1 << 16


class JsonLines:
    """Appends records; `last` is the newest whole record, or None."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.last = _repair(path) if path.exists() else None

    def append(self, records: Iterable[dict[str, Any]]) -> None:
        """Write all records or none: what a failed write (a full disk) left behind is cut off again."""
        records = [jsonable(record) for record in records]
        if not records:
            return
        data = "".join(json.dumps(record, separators=(",", ":")) + "\n" for record in records).encode()
        with open(self._path, "ab", buffering=0) as file:
            start = file.tell()
            try:
                if file.write(data) != len(data):
                    raise OSError(f"short write to {self._path}: is the disk full?")
            except OSError:
                file.truncate(start)
                raise
        self.last = records[-1]


def read_jsonlines(path: Path) -> list[dict[str, Any]]:
    """Whole records in order; a file that is missing is empty, a line that is being written is left out."""
    if not path.exists():
        return []
    with open(path, "rb") as file:
        records = [_parse(line) for line in file]
    return [record for record in records if record is not None]


def jsonable(value: Any) -> Any:
    """The value in JSON's own types: numpy scalars become numbers, NaN and infinity become None, keys become strings."""
    if isinstance(value, dict):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return jsonable(value.tolist())
    return str(value)


def _repair(path: Path) -> dict[str, Any] | None:
    """Cut the file behind its last whole record and return that record."""
    with open(path, "r+b") as file:
        end = file.seek(0, 2)
        while end > 0:
            start = _line_start(file, end)
            file.seek(start)
            line = file.read(end - start)
            record = _parse(line) if line.endswith(b"\n") else None
            if record is not None:
                file.truncate(end)
                return record
            end = start
        file.truncate(0)
    return None


def _line_start(file: Any, end: int) -> int:
    """Offset of the line whose last byte is at end - 1."""
    position = end - 1
    while position > 0:
        start = max(0, position - _CHUNK)
        file.seek(start)
        newline = file.read(position - start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        position = start
    return 0


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None
