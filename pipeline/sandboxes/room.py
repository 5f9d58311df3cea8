"""How much a command may add to its folder: a bound on one file, which the system keeps, does not bound many of them.

Invariant: looking takes a small share of the time, and never longer than it takes to see that the bound is passed. What is deleted
and still open is not seen.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TypeVar

from pipeline.sandboxes.base import Limits

T = TypeVar("T")
FILES_OF_FULL_SIZE = 16
MORE_FILES = 50_000
LOOK_S = 0.5
SHARE = 0.05
"""Of the time, for looking."""
BLOCK = 512
"""Unit of st_blocks."""


@dataclass(frozen=True, slots=True)
class Room:
    folder: Path
    bytes: int
    files: int

    @classmethod
    def beside(cls, folder: Path, limits: Limits) -> Room:
        """What is there now, and what may be added."""
        held, files = _held(folder)
        return cls(folder, held + limits.file_mb * FILES_OF_FULL_SIZE * 2**20, files + MORE_FILES)

    def is_full(self) -> bool:
        """Also when it is too deep to be looked into."""
        try:
            held, files = _held(self.folder, self.bytes, self.files)
        except OSError:
            return True
        return held > self.bytes or files > self.files

    async def until_full(self, running: asyncio.Task[T]) -> T | None:
        """What it returns; None when it was cancelled, and has ended, because the folder is full."""
        pause_s = LOOK_S
        try:
            while not (await asyncio.wait({running}, timeout=pause_s))[0]:
                began = time.monotonic()
                if await asyncio.to_thread(self.is_full):
                    return None
                pause_s = max(LOOK_S, (time.monotonic() - began) / SHARE)
            return running.result()
        finally:
            running.cancel()
            await asyncio.wait({running})


def _held(folder: Path, most_bytes: float = inf, most_files: float = inf) -> tuple[int, int]:
    """Bytes on disk, and files of every kind; as far as the bounds."""
    held = files = 0
    waiting = [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    found = entry.stat(follow_symlinks=False)
                    held += found.st_blocks * BLOCK // found.st_nlink
                    files += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
        except (FileNotFoundError, PermissionError):  # it is being worked in
            continue
        if held > most_bytes or files > most_files:
            break
    return held, files
