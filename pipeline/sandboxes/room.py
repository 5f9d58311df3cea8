"""How much a command may add to its folder: a bound on one file, which the system keeps, does not bound many of them.

Invariant: looking takes a small share of the time, and never longer than it takes to see that the bound is passed; no command ends
unseen. What is deleted counts as long as a process of the command has it open; one that only maps it is not seen.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterable
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

    def is_full(self, pids: Iterable[int]) -> bool:
        """pids: of what works in it. Also when it is too deep to be looked into."""
        try:
            held, files = _held(self.folder, self.bytes, self.files)
            held += _deleted(pids, self.folder.stat().st_dev)
        except OSError:
            return True
        return held > self.bytes or files > self.files

    async def until_full(self, running: asyncio.Task[T], pids: Callable[[], Iterable[int]]) -> T | None:
        """What it returns; None when the folder is full: then it was cancelled, or left it so, and has ended."""
        pause_s = LOOK_S
        try:
            while not (await asyncio.wait({running}, timeout=pause_s))[0]:
                began = time.monotonic()
                if await asyncio.to_thread(self.is_full, pids()):
                    return None
                pause_s = max(LOOK_S, (time.monotonic() - began) / SHARE)
            return None if await asyncio.to_thread(self.is_full, pids()) else running.result()
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


def _deleted(pids: Iterable[int], device: int) -> int:
    """Bytes on the device, of files without a name that the processes have open."""
    found: dict[int, int] = {}
    for pid in pids:
        with contextlib.suppress(OSError), os.scandir(f"/proc/{pid}/fd") as entries:  # it may have ended
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):
                    held = entry.stat()
                    if held.st_nlink == 0 and held.st_dev == device:
                        found[held.st_ino] = held.st_blocks * BLOCK
    return sum(found.values())
