"""Sandboxes on this machine, by bubblewrap: one call of it for each command, over a folder that lasts.

Invariant: a command sees its own folder, a read-only system and nothing else: no network, no other process, no file of the host,
no variable of its environment. Each has a process namespace of its own, which goes with all that is in it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import SandboxError
from pipeline.sandboxes import cgroups, processes
from pipeline.sandboxes.base import Contents, Limits, Ran
from pipeline.sandboxes.leases import Lease, default_root, new_lease, read_leases, reap, remove

log = logging.getLogger("sandboxes")

MISSING = "local sandboxes need bubblewrap, and there is no bwrap on the PATH: apt-get install bubblewrap"
START_S = 20.0
"""For the first command of a sandbox to end."""
COPY_S = 120.0
LONGEST_COMMAND = 100_000
"""Bytes; the system takes 128 KiB."""
REAP_EVERY_S = 60.0
WORK, PRIVATE = "/work", "/private"
_READ_ONLY = ("--remount-ro", "/dev", "--remount-ro", "/proc", "--remount-ro", "/")
"""/proc, too: root outside would still own /proc/sys inside, without any capability."""
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/lib32")


class LocalSandboxes:
    """Implements `Sandboxes`. Nothing happens before `start` or the first `open`; both remove what others have left, now and then.

    starts: sandboxes that are being started at the same time. root: one for all runs of the machine.
    """

    def __init__(self, starts: int = 8, root: Path | None = None) -> None:
        self._starts = asyncio.Semaphore(starts)
        self._root = default_root() if root is None else root
        self._hierarchies = cgroups.find()
        self._open: dict[str, LocalSandbox] = {}
        self._reaping: asyncio.Task[None] | None = None
        self._reaped_at = 0.0
        self._said = False

    async def open(self, name: str, contents: Contents, limits: Limits) -> LocalSandbox:
        """The permit is held until the sandbox has run its first command."""
        await self.start()
        async with self._starts:
            earlier = self._open.get(name)
            if earlier is not None:
                await earlier.close()
            sandbox = LocalSandbox(new_lease(self._root, name, self._hierarchies, time.time()), limits, self._forget)
            self._open[name] = sandbox
            try:
                await _to_its_end(asyncio.to_thread(self._prepare, sandbox, contents))
                self._say(sandbox)
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
        """Ends every sandbox that is open, and removes what others have left."""
        for sandbox in list(self._open.values()):
            await sandbox.close()
        await asyncio.to_thread(reap, self._root)

    async def _reap(self) -> None:
        removed = await asyncio.to_thread(reap, self._root)
        if removed:
            log.warning("removed %d sandboxes that were left behind: %s", len(removed), removed[:5])

    def _prepare(self, sandbox: LocalSandbox, contents: Contents) -> None:
        self._root.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._root.stat().st_uid != os.getuid():
            raise SandboxError(f"{self._root} belongs to another user, who could reach into sandboxes there: remove it")
        for lost in read_leases(self._root, sandbox.lease.name):
            remove(lost)
        sandbox.make(self._hierarchies, contents)

    def _forget(self, sandbox: LocalSandbox) -> None:
        if self._open.get(sandbox.lease.name) is sandbox:
            del self._open[sandbox.lease.name]

    def _say(self, sandbox: LocalSandbox) -> None:
        if not self._said:
            self._said = True
            log.info("sandboxes are limited by: %s", sandbox.limited_by)


class LocalSandbox:
    """Implements `Sandbox`."""

    def __init__(self, lease: Lease, limits: Limits, forget: Callable[[LocalSandbox], None]) -> None:
        self.lease = lease
        self._limits = limits
        self._forget = forget
        self._group = cgroups.Group((), {})
        self._running: set[asyncio.Task[Any]] = set()
        self._closing: asyncio.Task[None] | None = None

    @property
    def limited_by(self) -> dict[str, str]:
        """Resource -> what limits it."""
        found = {name: self._group.limits.get(name, "rlimit, each process for itself") for name in ("memory", "cpu", "pids")}
        if "pids" not in self._group.limits and os.getuid() == 0:
            found["pids"] = "nothing: this user is root and no pids control group can be written"
        return found

    def make(self, hierarchies: Mapping[cgroups.Controller, cgroups.Hierarchy], contents: Contents) -> None:
        """Blocking: lease, groups, folders, contents, in this order. Raises OSError or SandboxError."""
        self.lease.write()
        folder = self.lease.folder
        for part in ("work", "private"):
            (folder / part).mkdir(parents=True)
        self._group = cgroups.limit(hierarchies, folder.name, self._limits)
        fill(folder / "work", contents)

    async def run(
        self, command: str, timeout_s: float, *, stdin: bytes = b"", output_bytes: int = 16_384, private: bool = False
    ) -> Ran:
        if self._closing is not None:
            raise SandboxError(f"sandbox {self.lease.name} is closed")
        task = asyncio.create_task(self._run(command, timeout_s, stdin, output_bytes, private), name=f"sandbox {self.lease.name}")
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})
            raise
        if task.cancelled():
            raise SandboxError(f"sandbox {self.lease.name} was closed while a command ran")
        return task.result()

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close {self.lease.name}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        try:
            await asyncio.to_thread(remove, self.lease)
        except OSError as error:
            raise SandboxError(f"sandbox {self.lease.name} cannot be removed: {error}") from error
        finally:
            self._forget(self)

    async def _run(self, command: str, timeout_s: float, stdin: bytes, output_bytes: int, private: bool) -> Ran:
        started = time.monotonic()
        if "\0" in command or len(command.encode()) > LONGEST_COMMAND:
            return Ran(126, f"not a command: it holds a zero byte, or more than {LONGEST_COMMAND} bytes\n", False, 0, 0.0)
        ended = await processes.run(
            self._arguments(command, private),
            timeout_s=timeout_s,
            keep_bytes=output_bytes,
            stdin=stdin,
            limits=self._process_limits(timeout_s),
            admit=self._group.add,
            end=self._end_group,
        )
        output = ended.kept.text()
        if not ended.began:
            reason = output.strip().splitlines()
            raise SandboxError(f"sandbox {self.lease.name}: {reason[-1] if reason else f'bwrap ended with {ended.returncode}'}")
        code = processes.exit_code(ended.returncode)
        return Ran(code, output, ended.timed_out, ended.kept.left_out, time.monotonic() - started)

    def _end_group(self) -> None:
        """What is still in the groups belongs to a command that has ended or passed its deadline."""
        if len(self._running) > 1:
            return  # another command of this sandbox runs; the process namespace ends this one's
        for folder in self._group.folders:
            for pid in cgroups.members(folder):
                try:
                    os.kill(pid, 9)
                except ProcessLookupError:
                    continue

    def _process_limits(self, timeout_s: float) -> dict[int, int]:
        """Of each process: what no control group limits, and a CPU time that outlasts the deadline only when nobody kills."""
        limits = {
            resource.RLIMIT_CPU: math.ceil(timeout_s) + 1,
            resource.RLIMIT_FSIZE: self._limits.file_mb * 2**20,
            resource.RLIMIT_CORE: 0,
        }
        if "memory" not in self._group.limits:
            limits[resource.RLIMIT_AS] = self._limits.memory_mb * 2**20
        if "pids" not in self._group.limits and os.getuid() != 0:
            limits[resource.RLIMIT_NPROC] = self._limits.processes + cgroups.OWN_PROCESSES
        return limits

    def _arguments(self, command: str, private: bool) -> list[str]:
        size = str(self._limits.file_mb * 2**20)
        extra = ["--bind", str(self.lease.folder / "private"), PRIVATE] if private else []
        return [
            *_bubblewrap(),
            *("--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--size", size, "--tmpfs", "/tmp"),
            *("--bind", str(self.lease.folder / "work"), WORK, *extra, *_READ_ONLY),
            *("--chdir", WORK, "--", *processes.INIT, command),
        ]


async def _to_its_end(work: Awaitable[None]) -> None:
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


async def try_sandbox() -> dict[str, str]:
    """Open one, and say what limits each resource. Raises SandboxError."""
    sandboxes = LocalSandboxes()
    sandbox = await sandboxes.open(f"trial-{os.getpid()}", {}, Limits())
    try:
        return sandbox.limited_by
    finally:
        await sandbox.close()


def fill(folder: Path, contents: Contents) -> None:
    """Copies a folder as it is (sharing blocks where the file system can), or writes files. Raises SandboxError or OSError."""
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


@functools.cache
def _bubblewrap() -> tuple[str, ...]:
    """bwrap and those arguments that are the same for all. Raises SandboxError when it is not installed."""
    program = shutil.which("bwrap")
    if program is None:
        raise SandboxError(MISSING)
    isolation = (
        "--unshare-all",
        "--unshare-user",
        "--disable-userns",
        "--as-pid-1",
        "--die-with-parent",
        "--new-session",
        "--cap-drop",
        "ALL",
    )
    system = ["--ro-bind", "/usr", "/usr", "--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    system += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives", "--proc", "/proc"]
    for folder in map(Path, _SYSTEM):
        if folder.is_symlink():
            system += ["--symlink", str(folder.readlink()), str(folder)]
        elif folder.is_dir():
            system += ["--ro-bind", str(folder), str(folder)]
    python = Path(sys.base_prefix).resolve()
    if not python.is_relative_to("/usr"):
        system += ["--ro-bind", str(python), str(python)]
    environment = {
        "PATH": f"{python}/bin:/usr/local/bin:/usr/bin:/bin",
        "HOME": "/tmp",
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
    }
    said = [part for name, value in environment.items() for part in ("--setenv", name, value)]
    identity = ("--uid", "1000", "--gid", "1000", "--hostname", "sandbox", "--clearenv")
    return (program, *isolation, *identity, *said, *system)
