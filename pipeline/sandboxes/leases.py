"""Who owns which sandbox, on disk, so that whoever comes after a crash can remove what is left.

Invariant: a lease is there before the first thing that it names, and goes after the last: what has no lease has nothing to remove.
Two sandboxes never share a folder, so that removing one never harms another of the same name.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from pipeline.buffer.lock import ProcessId
from pipeline.sandboxes import cgroups

log = logging.getLogger("sandboxes")

SUFFIX = ".lease.json"
UNFINISHED = ".new"
UNFINISHED_S = 60.0
"""After which a lease that is still being written never will be."""
MAX_AGE_S = 6 * 3600.0
"""A sandbox that is older was forgotten by its owner, alive or not."""
DOCKER = "docker"
DOCKER_S = 60.0
"""For one command of the program."""
REMOVAL_S, REMOVAL_POLL_S = 20.0, 0.1
"""For a container that Docker is removing already to be gone."""
REMOVE_S = 120.0
"""For a folder to go."""
LONGEST_FAULT = 500
LABEL = "rollout.sandbox"
"""Of a container: the name of its lease's folder."""
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Lease:
    name: str
    folder: Path
    owner: ProcessId
    created: float
    """Seconds since the epoch."""
    cgroups: tuple[Path, ...] = ()
    place: str = ""
    """Where it is: here, in a container of DOCKER, or, with its address, on a server, which only who has its token can clear."""

    @property
    def file(self) -> Path:
        return self.folder.with_name(self.folder.name + SUFFIX)

    def write(self) -> None:
        """Whole or not at all."""
        values = asdict(self) | {"folder": str(self.folder), "cgroups": [str(path) for path in self.cgroups]}
        aside = self.file.with_suffix(UNFINISHED)
        aside.write_text(json.dumps(values))
        aside.replace(self.file)


def default_root() -> Path:
    """One for all runs of this user on this machine, so that each clears away what any other left."""
    return Path(tempfile.gettempdir()) / f"rollout-sandboxes-{os.getuid()}"


def sandbox_name(run: str, phase: str, step: int, ordinal: int, index: int, attempt: int) -> str:
    """Of one try of one sample: the same try has the same name, wherever and however often it is made."""
    return f"{re.sub('[^A-Za-z0-9_.-]', '_', run) or 'run'}-{phase}{step}-{ordinal}.{index}-{attempt}"


def new_lease(root: Path, name: str, now: float, hierarchies: dict[Any, cgroups.Hierarchy] | None = None, place: str = "") -> Lease:
    owner = ProcessId.of(os.getpid())
    if owner is None:
        raise RuntimeError("this process is not in the process table")
    unique = f"{name}~{owner.pid}.{next(_numbers)}"
    return Lease(name, root / unique, owner, now, cgroups.group_folders(hierarchies or {}, unique), place)


def read_leases(root: Path, name: str | None = None) -> Iterator[Lease]:
    """Of all sandboxes, or of those of one name."""
    for file in sorted(root.glob(f"*{SUFFIX}")) if root.is_dir() else ():
        if name is not None and not file.name.startswith(f"{name}~"):
            continue
        try:
            yield _lease(file, json.loads(file.read_text()))
        except FileNotFoundError:
            continue  # another reaper was faster
        except (ValueError, KeyError, TypeError):  # torn when the machine stopped: nobody that it named is alive
            unique = file.name.removesuffix(SUFFIX)
            yield Lease(unique.rpartition("~")[0], root / unique, ProcessId(0, 0.0), 0.0)


def _lease(file: Path, values: dict[str, Any]) -> Lease:
    return Lease(
        values["name"],
        file.with_name(file.name.removesuffix(SUFFIX)),
        ProcessId(**values["owner"]),
        values["created"],
        tuple(Path(path) for path in values["cgroups"]),
        values.get("place", ""),
    )


def remove(lease: Lease) -> None:
    """End its container or the processes of its groups, then remove the groups, the folder and, last, the lease. Raises OSError
    when something stays."""
    if lease.place == DOCKER:
        remove_containers(lease.folder.name)
    busy = cgroups.end(lease.cgroups)
    remove_folder(lease.folder)
    if busy:
        raise OSError(f"sandbox {lease.name}: processes stay in {busy[0]}")
    lease.file.unlink(missing_ok=True)


def reap(
    root: Path,
    *,
    max_age_s: float = MAX_AGE_S,
    now: Callable[[], float] = time.time,
    alive: Callable[[ProcessId], bool] = ProcessId.alive,
) -> list[str]:
    """Remove every sandbox whose owner is gone, and every one that is too old. Returns the names; what fails is logged."""
    _remove_unfinished(root, now())
    left = [lease for lease in orphans(root, max_age_s, now(), alive) if lease.place in ("", DOCKER)]
    if left:
        _end_processes([lease.folder for lease in left])
    removed = []
    for lease in left:
        try:
            remove(lease)
        except OSError as error:
            log.warning("sandbox %s cannot be removed", lease.name, exc_info=error)
        else:
            removed.append(lease.name)
    return removed


def orphans(root: Path, max_age_s: float, now: float, alive: Callable[[ProcessId], bool] = ProcessId.alive) -> Iterator[Lease]:
    """Leases whose owner is gone, and those that are too old."""
    return (lease for lease in read_leases(root) if not alive(lease.owner) or now - lease.created > max_age_s)


def remove_containers(unique: str) -> None:
    """Of the sandbox of this label, running or not. Raises OSError, also when Docker does not answer."""
    deadline = time.monotonic() + REMOVAL_S
    while found := _docker("ps", "--all", "--quiet", "--filter", f"label={LABEL}={unique}").split():
        try:
            _docker("rm", "--force", "--volumes", *found)
        except OSError:  # Docker removes one by itself when it has ended, and refuses to do it twice
            if time.monotonic() >= deadline:
                raise
            time.sleep(REMOVAL_POLL_S)


def _docker(*arguments: str) -> str:
    try:
        done = subprocess.run([DOCKER, *arguments], capture_output=True, text=True, timeout=DOCKER_S)
    except subprocess.TimeoutExpired as error:
        raise OSError(f"docker {arguments[0]} takes more than {DOCKER_S:g} s") from error
    if done.returncode != 0:
        raise OSError(f"docker {arguments[0]}: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return done.stdout


def _remove_unfinished(root: Path, now: float) -> None:
    """Leases whose writer was killed meanwhile: there is nothing yet that they name."""
    for aside in root.glob(f"*{UNFINISHED}") if root.is_dir() else ():
        writer = aside.name.rpartition("~")[2].partition(".")[0]
        with contextlib.suppress(FileNotFoundError):
            if not psutil.pid_exists(int(writer)) or now - aside.stat().st_mtime > UNFINISHED_S:
                aside.unlink()


def remove_folder(folder: Path) -> None:
    """Whatever was made in it, however deep. Never follows a link out of it; folders that their owner closed are opened first.
    Raises OSError."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists() and _said_when_failing("rm", "-rf", "--", str(folder)):
        _said_when_failing("chmod", "-R", "u+rwx", "--", str(folder))
        if said := _said_when_failing("rm", "-rf", "--", str(folder)):
            raise OSError(said)


def _said_when_failing(*arguments: str) -> str:
    try:
        done = subprocess.run(arguments, capture_output=True, text=True, errors="replace", timeout=REMOVE_S)
    except subprocess.TimeoutExpired:
        return f"{arguments[0]} takes more than {REMOVE_S:g} s"
    return "" if done.returncode == 0 else done.stderr[-LONGEST_FAULT:].strip() or f"{arguments[0]}: exit code {done.returncode}"


def _end_processes(folders: list[Path]) -> None:
    """Those that are in no group are known by their arguments, which name the folder."""
    known = tuple(str(folder) for folder in folders)
    for process in psutil.process_iter(["pid", "cmdline"]):
        if any(argument.startswith(known) for argument in process.info["cmdline"] or ()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.info["pid"], signal.SIGKILL)
