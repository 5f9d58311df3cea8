"""The private Ray of a run: on loopback, without a dashboard, gone with the run.

Invariant: nothing that this module starts outlives `stop`, and every process of it can be found by pid and start time.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import psutil
import ray

from pipeline.config.training import Ray
from pipeline.errors import ConfigError
from pipeline.paths import RunPaths

SYSTEM = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"}
"""Nothing is reported home, and every port is on loopback."""


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    started: float
    """Start time in seconds since the epoch: a pid alone may have been given to somebody else."""


def start(paths: RunPaths, settings: Ray, storage: str, import_paths: list[Path]) -> None:
    """Start (or join) Ray. Workers inherit the environment, so that a user's own modules can be imported there."""
    os.environ.update(SYSTEM)
    extra = [str(path) for path in import_paths]
    os.environ["PYTHONPATH"] = os.pathsep.join([*extra, *filter(None, [os.environ.get("PYTHONPATH", "")])])
    common = {"storage": storage, "namespace": "rollout", "log_to_driver": False, "logging_level": logging.WARNING}
    if settings.address is not None:
        raise ConfigError(f"run.ray.address {settings.address!r}: joining an existing cluster is not supported yet; leave it out")
    folder = temporary_folder(paths)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    ray.init(
        address="local",
        _node_ip_address="127.0.0.1",
        include_dashboard=False,
        num_cpus=settings.num_cpus,
        object_store_memory=settings.object_store_mb * 2**20,
        _temp_dir=str(folder),
        **common,
    )


def temporary_folder(paths: RunPaths) -> Path:
    """Ray's session folder. Short, because socket paths end at 107 characters; one a run, because two Rays must not share it."""
    digest = hashlib.sha256(str(paths.root.resolve()).encode()).hexdigest()[:10]
    return Path(tempfile.gettempdir()) / f"rollout-{digest}"


def processes() -> list[Process]:
    """Everything that descends from this process: Ray's services, workers, actors and replicas."""
    found = []
    for child in psutil.Process().children(recursive=True):
        try:
            found.append(Process(child.pid, child.create_time()))
        except psutil.NoSuchProcess:
            continue
    return found


def stop(paths: RunPaths) -> None:
    """Shut Ray down and end what is left of it, by pid."""
    mine = processes()
    ray.shutdown()
    end(mine, grace_s=5.0)
    shutil.rmtree(temporary_folder(paths), ignore_errors=True)


def end(victims: list[Process], grace_s: float) -> list[Process]:
    """SIGTERM, then SIGKILL after `grace_s` seconds. Returns those that are still there."""
    alive = [process for victim in victims if (process := _same(victim)) is not None]
    for process in alive:
        _signal(process, "terminate")
    _, stubborn = psutil.wait_procs(alive, timeout=grace_s)
    for process in stubborn:
        _signal(process, "kill")
    _, left = psutil.wait_procs(stubborn, timeout=grace_s)
    return [Process(process.pid, process.create_time()) for process in left if process.is_running()]


def _same(victim: Process) -> psutil.Process | None:
    try:
        process = psutil.Process(victim.pid)
        return process if abs(process.create_time() - victim.started) < 1.0 else None
    except psutil.NoSuchProcess:
        return None


def _signal(process: psutil.Process, how: str) -> None:
    try:
        getattr(process, how)()
    except psutil.NoSuchProcess:
        return


def import_paths(config_folder: Path) -> list[Path]:
    """Folders from which `module:attribute` names are imported in every process: where the user stands, and the configuration's."""
    here = Path.cwd()
    found = [here, config_folder.resolve()]
    return [path for path in dict.fromkeys(found) if str(path) not in sys.path or path == here]
