"""One process owns a run: flock on `run.lock`, held for the run's life and freed by the kernel however it ends.

Invariant: the file also names the processes of the run's cluster until they are known to be gone, so that whoever takes the lock
after a crash can end what is left of it. A pid counts only together with its start time.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import psutil

from pipeline.errors import Locked
from pipeline.paths import RunPaths

LOOK_S = 0.25
_SAME_START_S = 1.0
"""Start times are derived from the boot time, which may be read a little differently after the clock was set."""


@dataclass(frozen=True, slots=True)
class ProcessId:
    pid: int
    start_time: float
    """Seconds since the epoch."""

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        try:
            return cls(pid, psutil.Process(pid).create_time())
        except psutil.NoSuchProcess:
            return None

    def alive(self) -> bool:
        """Zombies, which are only waiting to be reaped, count as gone."""
        now = ProcessId.of(self.pid)
        if now is None or abs(now.start_time - self.start_time) > _SAME_START_S:
            return False
        try:
            return psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


class RunLock:
    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._file: int | None = None
        self._cluster: tuple[ProcessId, ...] = ()

    def acquire(self) -> None:
        """Raises Locked, naming the run and the pid that holds it."""
        file = os.open(self._paths.lock, os.O_RDWR | os.O_CREAT, 0o644)
        if not self._taken(file):
            os.close(file)
            raise Locked(f"run {self._paths.run_id} is locked by {_name(read_lock(self._paths))}: {self._paths.lock}")
        self._file = file
        self._cluster = _cluster(read_lock(self._paths))
        self._write()

    def _taken(self, file: int) -> bool:
        """Tried for a moment: who only looks whether the run is held (`is_held`) has it for as long as that takes."""
        deadline = time.monotonic() + LOOK_S
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > deadline:
                    return False
                time.sleep(LOOK_S / 10)
            else:
                return True

    def record(self, pids: Iterable[int]) -> None:
        """The processes of this run's cluster, beside those of the old one that still live."""
        fresh = (ProcessId.of(pid) for pid in pids)
        self._cluster = tuple(dict.fromkeys([*self.leftovers(), *(process for process in fresh if process is not None)]))
        self._write()

    def leftovers(self) -> list[ProcessId]:
        """Recorded processes that live. Called after `acquire` and before `record`: those of the cluster before."""
        return [process for process in self._cluster if process.alive()]

    def release(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> RunLock:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _write(self) -> None:
        """In place, because the lock belongs to this inode."""
        assert self._file is not None, "record needs the lock"
        me = ProcessId.of(os.getpid())
        assert me is not None
        held = {**asdict(me), "host": socket.gethostname(), "cluster_pids": [asdict(process) for process in self._cluster]}
        text = json.dumps(held).encode()
        os.pwrite(self._file, text, 0)
        os.ftruncate(self._file, len(text))
        os.fsync(self._file)


def read_lock(paths: RunPaths) -> dict[str, Any]:
    """`{pid, start_time, host, cluster_pids}` of the last holder, or nothing when there was none or the file is torn."""
    try:
        held = json.loads(paths.lock.read_text() or "{}")
    except (FileNotFoundError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def is_held(paths: RunPaths) -> bool:
    """Whether a process owns the run now."""
    try:
        file = os.open(paths.lock, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    else:
        return False
    finally:
        os.close(file)


def signal_owner(paths: RunPaths, sign: signal.Signals = signal.SIGTERM) -> bool:
    """To the process that holds the run's lock, if it is the recorded one and of this machine."""
    held = read_lock(paths)
    if held.get("host") != socket.gethostname() or not is_held(paths):
        return False
    if not ProcessId(held["pid"], held["start_time"]).alive():
        return False
    try:
        os.kill(held["pid"], sign)
    except ProcessLookupError:
        return False
    return True


def _cluster(held: dict[str, Any]) -> tuple[ProcessId, ...]:
    if held.get("host") != socket.gethostname():
        return ()
    return tuple(ProcessId(**process) for process in held.get("cluster_pids", ()))


def _name(held: dict[str, Any]) -> str:
    return f"process {held['pid']} on {held.get('host')}" if "pid" in held else "another process"
