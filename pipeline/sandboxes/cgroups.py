"""Limits that hold for all processes of a sandbox together: control groups of version 1 or 2, wherever they can be written.

Invariant: `limit` says which resources it limits; for the others the caller has process limits.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pipeline.sandboxes.base import Limits

Controller = Literal["memory", "cpu", "pids"]
CONTROLLERS: tuple[Controller, ...] = ("memory", "cpu", "pids")
PREFIX = "rollout-"
OWN_PROCESSES = 4
"""The sandbox's own, beside those of the command."""
PERIOD_US = 100_000
POLL_S = 0.01


@dataclass(frozen=True, slots=True)
class Hierarchy:
    version: Literal[1, 2]
    folder: Path
    """The group that this process is in: new groups are made below it."""


def find(mountinfo: Path = Path("/proc/self/mountinfo"), own: Path = Path("/proc/self/cgroup")) -> dict[Controller, Hierarchy]:
    """Where each controller can be asked for, as far as the system says. Reads nothing but the two files."""
    try:
        mounts, groups = mountinfo.read_text().splitlines(), own.read_text().splitlines()
    except OSError:
        return {}
    places = _own_groups(groups)
    found: dict[Controller, Hierarchy] = {}
    for line in mounts:
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        root, point = before.split(" ")[3:5]
        if kind == "cgroup":
            for controller in CONTROLLERS:
                if controller in options.split(","):
                    found[controller] = Hierarchy(1, _below(point, root, places.get(controller, "/")))
        elif kind == "cgroup2":
            folder = _below(point, root, places.get("", "/"))
            with contextlib.suppress(OSError):
                offered = (folder / "cgroup.controllers").read_text().split()
                for controller in CONTROLLERS:
                    if controller in offered:
                        found.setdefault(controller, Hierarchy(2, folder))
    return found


@dataclass(frozen=True, slots=True)
class Group:
    """The control groups of one sandbox, one in each hierarchy."""

    folders: tuple[Path, ...]
    limits: Mapping[Controller, str]
    """What is limited here -> `cgroup v1` or `cgroup v2`."""

    def add(self, pid: int) -> None:
        for folder in self.folders:
            (folder / "cgroup.procs").write_text(str(pid))


def group_folders(hierarchies: Mapping[Controller, Hierarchy], name: str) -> tuple[Path, ...]:
    return tuple(sorted({hierarchy.folder / f"{PREFIX}{name}" for hierarchy in hierarchies.values()}))


def limit(hierarchies: Mapping[Controller, Hierarchy], name: str, limits: Limits) -> Group:
    """Make the groups of a sandbox; a controller that cannot be written is left out."""
    done: dict[Controller, str] = {}
    folders: set[Path] = set()
    for controller, hierarchy in hierarchies.items():
        folder = hierarchy.folder / f"{PREFIX}{name}"
        with contextlib.suppress(OSError):
            folder.mkdir(exist_ok=True)
            folders.add(folder)
            if hierarchy.version == 2 and not (folder / _settings(controller, limits, 2)[0][0]).exists():
                (hierarchy.folder / "cgroup.subtree_control").write_text(f"+{controller}")
            for file, value in _settings(controller, limits, hierarchy.version):
                (folder / file).write_text(value)
            done[controller] = f"cgroup v{hierarchy.version}"
            if controller == "memory":
                _close_swap(folder, limits, hierarchy.version)
    return Group(tuple(sorted(folders)), done)


def _close_swap(folder: Path, limits: Limits, version: int) -> None:
    """Memory is not to be had on the host's disk instead; not every kernel counts what is there."""
    file, value = ("memory.swap.max", "0") if version == 2 else ("memory.memsw.limit_in_bytes", str(limits.memory_mb * 2**20))
    if (folder / file).exists():
        (folder / file).write_text(value)


def end(folders: Iterable[Path], patience_s: float = 5.0) -> list[Path]:
    """Kill whatever is in the groups and remove them. Returns those that are still there after `patience_s` seconds."""
    left = [folder for folder in folders if folder.is_dir()]
    deadline = time.monotonic() + patience_s
    while left:
        for folder in left:
            for pid in members(folder):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(OSError):  # busy until the last process is gone
                folder.rmdir()
        left = [folder for folder in left if folder.is_dir()]
        if time.monotonic() >= deadline:
            break
        if left:
            time.sleep(POLL_S)
    return left


def members(folder: Path) -> list[int]:
    try:
        return [int(pid) for pid in (folder / "cgroup.procs").read_text().split()]
    except OSError:
        return []


def _settings(controller: Controller, limits: Limits, version: int) -> list[tuple[str, str]]:
    memory, processes = str(limits.memory_mb * 2**20), str(limits.processes + OWN_PROCESSES)
    quota = str(max(1000, int(limits.cpu * PERIOD_US)))
    if version == 2:
        return {
            "memory": [("memory.max", memory)],
            "cpu": [("cpu.max", f"{quota} {PERIOD_US}")],
            "pids": [("pids.max", processes)],
        }[controller]
    return {
        "memory": [("memory.limit_in_bytes", memory)],
        "cpu": [("cpu.cfs_period_us", str(PERIOD_US)), ("cpu.cfs_quota_us", quota)],
        "pids": [("pids.max", processes)],
    }[controller]


def _own_groups(lines: list[str]) -> dict[str, str]:
    """Controller -> path of the own group; "" for version 2."""
    places: dict[str, str] = {}
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            places[controller] = path
    return places


def _below(point: str, root: str, own: str) -> Path:
    """A container may see only a part of the hierarchy, mounted from `root`."""
    inner = own.removeprefix(root) if root != "/" and own.startswith(root) else own
    folder = Path(point) / inner.lstrip("/")
    return folder if folder.is_dir() else Path(point)
