"""Sandboxes on this machine, by bubblewrap: one call of it for each command, over a folder that lasts.

Invariant: a command sees its own folder, a read-only system and nothing else: no network, no other process, no file of the host,
no variable of its environment, no key of its keyrings. Each has a process namespace of its own, which goes with all that is in it.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import math
import os
import resource
import shutil
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.errors import SandboxError
from pipeline.sandboxes import cgroups, processes, syscalls
from pipeline.sandboxes.base import Contents, Limits, Ran
from pipeline.sandboxes.inside import KILLED
from pipeline.sandboxes.leases import Lease, new_lease, remove
from pipeline.sandboxes.owning import OwnedSandboxes, fill, no_command, to_its_end
from pipeline.sandboxes.room import Room

log = logging.getLogger("sandboxes")

MISSING = "local sandboxes need bubblewrap, and there is no bwrap on the PATH: apt-get install bubblewrap"
WORK, PRIVATE = "/work", "/private"
FULL = "[... stopped: the folder has grown beyond its bound ...]\n"
_READ_ONLY = ("--remount-ro", "/dev", "--remount-ro", "/proc", "--remount-ro", "/")
"""/proc, too: root outside would still own /proc/sys inside, without any capability."""
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/lib32")


class LocalSandboxes(OwnedSandboxes["LocalSandbox"]):
    """Implements `Sandboxes`."""

    def __init__(self, starts: int = 8, root: Path | None = None) -> None:
        super().__init__(starts, root, place="")
        self._hierarchies = cgroups.find()
        self._said = False

    def _new(self, name: str, limits: Limits) -> LocalSandbox:
        return LocalSandbox(new_lease(self._root, name, time.time(), self._hierarchies), limits, self._forget)

    async def _begin(self, sandbox: LocalSandbox, contents: Contents) -> None:
        await to_its_end(asyncio.to_thread(self._prepare, sandbox, contents))
        if not self._said:
            self._said = True
            log.info("sandboxes are limited by: %s", sandbox.limited_by)

    def _prepare(self, sandbox: LocalSandbox, contents: Contents) -> None:
        self._own_root()
        for lost in self._lost(sandbox.lease.name):
            remove(lost)
        sandbox.make(self._hierarchies, contents)


class LocalSandbox:
    """Implements `Sandbox`."""

    def __init__(self, lease: Lease, limits: Limits, forget: Callable[[LocalSandbox], None]) -> None:
        self.lease = lease
        self._limits = limits
        self._forget = forget
        self._group = cgroups.Group((), {})
        self._room: Room | None = None
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
        self._room = Room.beside(folder / "work", self._limits)

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
        if (refused := no_command(command)) is not None:
            return refused
        assert self._room is not None
        (self.lease.folder / "work").chmod(0o755)  # a command before may have closed it
        refusing = syscalls.open_filter()
        running = processes.run(
            self._arguments(command, private, refusing),
            timeout_s=timeout_s,
            keep_bytes=output_bytes,
            stdin=stdin,
            limits=self._process_limits(timeout_s),
            admit=self._group.add,
            end=self._end_group,
            files=(refusing,),
        )
        try:
            command_task = asyncio.create_task(running, name=f"command in {self.lease.name}")
            ended = await self._room.until_full(command_task, self._members)
        finally:
            os.close(refusing)
        if ended is None:
            return Ran(KILLED, FULL, False, 0, time.monotonic() - started)
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
        for pid in self._members():
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue

    def _members(self) -> set[int]:
        return {pid for folder in self._group.folders for pid in cgroups.members(folder)}

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

    def _arguments(self, command: str, private: bool, refusing: int) -> list[str]:
        """refusing: a descriptor of the system calls' filter."""
        size = str(self._limits.file_mb * 2**20)
        extra = ["--bind", str(self.lease.folder / "private"), PRIVATE, "--setenv", "PRIVATE", PRIVATE] if private else []
        return [
            *_bubblewrap(),
            *("--dev", "/dev", "--size", size, "--tmpfs", "/dev/shm", "--size", size, "--tmpfs", "/tmp"),
            *("--bind", str(self.lease.folder / "work"), WORK, *extra, *_READ_ONLY),
            *("--seccomp", str(refusing), "--chdir", WORK, "--", *processes.INIT, command),
        ]


async def try_sandbox() -> dict[str, str]:
    """Open one, and say what limits each resource. Raises SandboxError."""
    sandboxes = LocalSandboxes()
    sandbox = await sandboxes.open(f"trial-{os.getpid()}", {}, Limits())
    try:
        return sandbox.limited_by
    finally:
        await sandbox.close()


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
    for names in filter(Path.exists, map(Path, ("/proc/keys", "/proc/key-users"))):  # no namespace holds back whose keys there are
        system += ["--ro-bind", os.devnull, str(names)]
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
