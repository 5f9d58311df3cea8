"""Published weight versions as a folder protocol: one publisher, any number of readers that pull.

Invariant: the pointer file LATEST names a folder that was complete before the pointer was replaced, and never changes after.
Nothing is fsynced: the folder is a cache that a resume rebuilds from the checkpoints.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

KEEP = 3
"""Newest publications whose folders stay, so that a reader that has just looked can finish reading."""
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Published:
    version: int
    path: Path


class WeightStore:
    """Readers call `latest` before every call; the publisher calls `wait_unheld`, then `publish`.

    clock: seconds since the epoch, shared by all processes that hold or wait; it dates the leases.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder = folder
        self._clock = clock
        self._pointer = folder / "LATEST"
        self._holds = folder / "holds"
        self._seen: tuple[tuple[int, int], Published] | None = None

    def publish(self, version: int, save: Callable[[Path], None]) -> Published:
        """Make `version` the newest. `save` fills an empty folder (Hugging Face format) before anyone can see it.

        A version that was published before (a replay after a crash) gets a folder of its own, so that readers of the old
        one are not disturbed. If `save` raises, nothing has changed.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        aside = self.folder / f".new-{uuid.uuid4().hex}"
        aside.mkdir()
        save(aside)
        path = self._free_name(version)
        aside.rename(path)
        kept = [path.name, *self._kept()][:KEEP]
        _replace(self._pointer, {"version": version, "kept": kept})
        self._remove_debris(kept)
        return Published(version, path)

    def latest(self) -> Published | None:
        """The newest publication, or None before the first. A stat, and a small read when it has changed."""
        try:
            stat = self._pointer.stat()
            mark = (stat.st_ino, stat.st_mtime_ns)
            if self._seen is None or self._seen[0] != mark:
                record = json.loads(self._pointer.read_text())
                self._seen = (mark, Published(record["version"], self.folder / record["kept"][0]))
        except FileNotFoundError:
            return None
        return self._seen[1]

    def hold(self, version: int, seconds: float, now: float | None = None, hold_id: str | None = None) -> str:
        """Ask that `version` stays the newest for `seconds` at most, while an evaluation of it runs. Returns the lease's id.

        hold_id: given when the one who releases is another than the one who holds; None: a new one.
        """
        self._holds.mkdir(parents=True, exist_ok=True)
        hold_id = hold_id or uuid.uuid4().hex
        start = self._clock() if now is None else now
        _replace(self._holds / hold_id, {"version": version, "until": start + seconds})
        return hold_id

    def release(self, hold_id: str) -> None:
        """End a lease; ending it twice, or after it ran out, does nothing."""
        (self._holds / hold_id).unlink(missing_ok=True)

    async def wait_unheld(self, timeout_s: float) -> bool:
        """Wait until no lease holds the newest version. False: some lease still does after `timeout_s`."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._held():
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(POLL_S)
        return True

    def _held(self) -> bool:
        """A lease on another version than the newest holds nothing: its evaluation has lost already, or has not begun."""
        newest = self.latest()
        if newest is None or not self._holds.is_dir():
            return False
        held = False
        for file in self._holds.iterdir():
            try:
                lease = json.loads(file.read_text())
            except (FileNotFoundError, json.JSONDecodeError):  # released just now, or left half-written by a crash
                continue
            if lease["until"] <= self._clock():
                file.unlink(missing_ok=True)
            elif lease["version"] == newest.version:
                held = True
        return held

    def _kept(self) -> list[str]:
        try:
            return json.loads(self._pointer.read_text())["kept"]
        except FileNotFoundError:
            return []

    def _free_name(self, version: int) -> Path:
        name = f"v{version:06d}"
        path, again = self.folder / name, 0
        while path.exists():
            again += 1
            path = self.folder / f"{name}-{again}"
        return path

    def _remove_debris(self, kept: list[str]) -> None:
        for path in self.folder.iterdir():
            if path.is_dir() and path != self._holds and path.name not in kept:
                shutil.rmtree(path, ignore_errors=True)


def _replace(path: Path, record: dict) -> None:
    aside = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    aside.write_text(json.dumps(record))
    os.replace(aside, path)
