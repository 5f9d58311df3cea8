"""What every kind of sandbox shares: start permits, one sandbox a name, and an end to what others have left.

Invariant: a sandbox that was opened is known here until it is closed, and one that could not be started leaves nothing.
"""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from pipeline.errors import SandboxError
from pipeline.sandboxes.base import Contents, ImageFolder, Limits, Ran, Sandbox
from pipeline.sandboxes.leases import Lease, default_root, read_leases, reap

log = logging.getLogger("sandboxes")

START_S = 20.0
"""For the first command of a sandbox to end."""
COPY_S = 120.0
LONGEST_COMMAND = 100_000
"""Bytes; the system takes 128 KiB."""
REAP_EVERY_S = 60.0


class Leased(Sandbox, Protocol):
    lease: Lease


S = TypeVar("S", bound=Leased)


class OwnedSandboxes(ABC, Generic[S]):
    """Nothing happens before `start` or the first `open`; both remove what others have left, now and then.

    starts: sandboxes that are being started at the same time. root: of the leases, one for all runs of the machine. place: of the
    leases that are ours.
    """

    def __init__(self, starts: int, root: Path | None, place: str) -> None:
        self._place = place
        self._starts = asyncio.Semaphore(starts)
        self._root = default_root() if root is None else root
        self._open: dict[str, S] = {}
        self._reaping: asyncio.Task[None] | None = None
        self._reaped_at = 0.0

    @abstractmethod
    def _new(self, name: str, limits: Limits) -> S:
        """One that has not begun. Nothing outside this process knows of it yet."""

    @abstractmethod
    async def _begin(self, sandbox: S, contents: Contents) -> None:
        """Remove what a lost try of the name has left, and make the sandbox ready to run commands."""

    async def open(self, name: str, contents: Contents, limits: Limits) -> S:
        """The permit is held until the sandbox has run its first command."""
        await self.start()
        async with self._starts:
            earlier = self._open.get(name)
            if earlier is not None:
                await earlier.close()
            sandbox = self._new(name, limits)
            self._open[name] = sandbox
            try:
                await self._begin(sandbox, contents)
                ran = await sandbox.run("true", START_S)
                if ran.exit_code != 0:
                    raise SandboxError(f"sandbox {name} does not start: exit code {ran.exit_code}: {ran.output.strip()}")
            except OSError as error:
                await sandbox.close()
                raise SandboxError(f"sandbox {name} cannot be made: {error}") from error
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    async def start(self) -> None:
        """Remove what others have left, when that was not done in the last REAP_EVERY_S seconds."""
        now = time.monotonic()
        if self._reaping is None or (self._reaping.done() and now - self._reaped_at >= REAP_EVERY_S):
            self._reaped_at = now
            self._reaping = asyncio.create_task(self._reap(), name="reap sandboxes")
        await asyncio.shield(self._reaping)

    async def close(self) -> None:
        for sandbox in list(self._open.values()):
            await sandbox.close()
        await self._reap()

    async def _reap(self) -> None:
        removed = await asyncio.to_thread(reap, self._root)
        if removed:
            log.warning("removed %d sandboxes that were left behind: %s", len(removed), removed[:5])

    def _own_root(self) -> None:
        """Nobody else may reach into it: what a command leaves there may run as this user. Raises SandboxError, or OSError."""
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = self._root.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise SandboxError(f"{self._root} is a link, or another user's, who could reach into sandboxes there: remove it")
        self._root.chmod(0o700)

    def _lost(self, name: str) -> list[Lease]:
        """Of earlier tries of this name."""
        return [lease for lease in read_leases(self._root, name) if lease.place == self._place]

    def _forget(self, sandbox: S) -> None:
        if self._open.get(sandbox.lease.name) is sandbox:
            del self._open[sandbox.lease.name]


def no_command(command: str) -> Ran | None:
    """What becomes of a text that no shell can be given."""
    if "\0" in command or len(command.encode()) > LONGEST_COMMAND:
        return Ran(126, f"not a command: it holds a zero byte, or more than {LONGEST_COMMAND} bytes\n", False, 0, 0.0)
    return None


async def to_its_end(work: Awaitable[None]) -> None:
    """A thread cannot be cancelled: what it makes can be removed only when it has ended."""
    task = asyncio.ensure_future(work)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        raise asyncio.CancelledError
    task.result()


def fill(folder: Path, contents: Contents) -> None:
    """Copies a folder as it is (sharing blocks where the file system can), or writes files. Raises SandboxError or OSError."""
    if isinstance(contents, ImageFolder):
        raise SandboxError(f"the task begins in the image {contents.image}, and its spec has no sandbox.kind docker")
    if isinstance(contents, Path):
        if not contents.is_dir():
            raise SandboxError(f"the task's folder {contents} is not there")
        copying = ["cp", "-a", "--reflink=auto", "--", f"{contents}/.", str(folder)]
        try:
            subprocess.run(copying, check=True, capture_output=True, timeout=COPY_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise SandboxError(f"{contents} cannot be copied: {error}") from error
        return
    for name, text in contents.items():
        target = folder / name
        if os.path.isabs(name) or ".." in Path(name).parts:
            raise SandboxError(f"file {name!r} lies outside the task's folder")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
