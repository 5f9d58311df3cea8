"""The private Ray of a run: on loopback, without a dashboard, gone with the run.

Invariant: nothing that this module starts outlives `stop`, and every process of it can be found by pid and start time.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import psutil
import ray
from ray.serve.context import _set_global_client

from deployments.names import NAMESPACE, temporary_folder
from deployments.threads import begun
from pipeline.buffer.lock import ProcessId
from pipeline.config.training import Ray
from pipeline.errors import ConfigError, StageFailed
from pipeline.evaluator.machine import Machine, count_gpus, this_machine
from pipeline.paths import RunPaths

SYSTEM = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_core_worker_rpc_server_reconnect_timeout_s": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
    "RAY_max_direct_call_object_size": str(2**20),
    "RAY_task_events_report_interval_ms": "0",
    "RAY_idle_worker_killing_time_threshold_ms": "30000",
}
"""Nothing is reported home, and every port is on loopback. A replica that answers a killed caller hangs no longer than the third
one says: its event loop waits for that caller to come back, and Ray's own 60 s would hold up everyone else that it serves. The
fourth is for a GCS that is killed while Ray starts, when nobody watches it yet. Arguments that are smaller than the fifth travel in
the call itself: a group of a few long samples would wait a millisecond for the object store, while two megabytes in a call take
longer than by way of it. Of finished tasks and calls nothing is kept: the GCS would remember the last 100,000, in some 0.1 MB a
step. A process that has run a workflow's node waits for the next one: Ray ends those that idle for a second, and each that comes
instead costs half a second and leaves a socket in the GCS."""
SOCKET = "/session_2000-01-01_00-00-00_000000_{pid}/sockets/plasma_store"
"""The longest path of Ray's in its folder."""
SOCKET_BYTES = 107
SERVICES = ("gcs_server", "raylet")
POLL_S = 0.05
SHUTDOWN_S = 15.0
LOST_SHUTDOWN_S = 1.0
"""For a Ray that has lost a service: it is tried, but as a rule it does not end."""
log = logging.getLogger(__name__)


def start(paths: RunPaths, settings: Ray, storage: str | None) -> None:
    """Start Ray. Its processes inherit the environment, so that the run's own modules can be imported there.

    storage: of workflows; None: there are none. Raises ConfigError when the machine's temporary folder is too deep for it.
    """
    folder = temporary_folder(paths)
    _check_sockets_fit(folder)
    os.environ.update(SYSTEM)
    inherited = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(paths.code), *([inherited] if inherited else [])])
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # Ray's own, that workflow storage will go
        ray.init(
            address="local",
            _node_ip_address="127.0.0.1",
            include_dashboard=False,
            num_cpus=settings.num_cpus,
            num_gpus=count_gpus() if settings.num_gpus is None else settings.num_gpus,
            object_store_memory=settings.object_store_mb * 2**20,
            _temp_dir=str(folder),
            storage=storage,
            namespace=NAMESPACE,
            log_to_driver=False,
            configure_logging=False,
        )


def _check_sockets_fit(folder: Path) -> None:
    too_many = len(os.fsencode(str(folder) + SOCKET.format(pid=os.getpid()))) - SOCKET_BYTES
    if too_many > 0:
        most = len(os.fsencode(folder.parent)) - too_many
        raise ConfigError(f"the temporary folder {folder.parent} is too long for Ray's sockets: {most} bytes at most, set TMPDIR")


class PrivateCluster:
    """The Ray of one run, as `workflows.run.Driver` uses it."""

    def __init__(self, paths: RunPaths, settings: Ray, storage: str) -> None:
        self._paths = paths
        self._settings = settings
        self._storage = storage
        self._stopped = threading.Event()

    def start(self) -> None:
        """Raises StageFailed as soon as a service of Ray has ended meanwhile, which Ray itself would wait for."""
        starting: Future[None] = Future()
        begun(self._start_and_stay, starting)
        seen: dict[str, ProcessId] = {}
        while True:
            try:
                return starting.result(POLL_S)
            except TimeoutError:
                seen |= self.services()
            lost = [f"{name} (pid {process.pid})" for name, process in seen.items() if not process.alive()]
            if lost and not starting.done():
                raise StageFailed("ray", f"its {', '.join(lost)} ended while it started; `rollout resume` goes on")

    def _start_and_stay(self, starting: Future[None]) -> None:
        """Ray has the kernel end its services when their parent ends, which to the kernel is the thread that started them."""
        try:
            start(self._paths, self._settings, self._storage)
        except BaseException as error:
            starting.set_exception(error)
        else:
            starting.set_result(None)
            self._stopped.wait()

    def machine(self) -> Machine:
        return this_machine(self._settings)

    def storage(self) -> Path:
        return self._paths.workflow

    def processes(self) -> list[ProcessId]:
        return processes()

    def services(self) -> dict[str, ProcessId]:
        """What Ray does not replace when it ends: name -> process."""
        found = {child.name(): ProcessId.of(child.pid) for child in psutil.Process().children()}
        return {name: process for name in SERVICES if (process := found.get(name)) is not None}

    def stop(self) -> None:
        stop(self._paths)
        self._stopped.set()


def processes(of: int | None = None) -> list[ProcessId]:
    """Everything that descends from a process (None: this one): Ray's services, workers, actors and replicas."""
    try:
        found = [ProcessId.of(child.pid) for child in psutil.Process(of).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
    return [process for process in found if process is not None]


def stop(paths: RunPaths) -> None:
    """Shut Ray down and end what is left of it, by pid."""
    mine = processes()
    _shutdown(SHUTDOWN_S if complete() else LOST_SHUTDOWN_S)
    _set_global_client(None)  # Serve keeps its controller's handle, and a later Ray of this process would be asked for that actor
    end(mine, grace_s=5.0)
    shutil.rmtree(temporary_folder(paths), ignore_errors=True)


def complete(of: int | None = None) -> bool:
    """Whether all services of Ray live that a process (None: this one) started."""
    try:
        living = {child.name() for child in psutil.Process(of).children() if child.status() != psutil.STATUS_ZOMBIE}
    except psutil.NoSuchProcess:  # it, or a child meanwhile
        return False
    return living.issuperset(SERVICES)


def _shutdown(seconds: float) -> None:
    """Ray's own end asks its services, and would wait for ever for one that was killed."""
    try:
        begun(ray.shutdown).result(seconds)
    except TimeoutError:
        log.warning("Ray did not shut down within %.0f s; its processes are ended by pid", seconds)
        atexit.unregister(ray.shutdown)


def end(victims: Iterable[ProcessId], grace_s: float) -> list[ProcessId]:
    """SIGTERM, then SIGKILL after `grace_s` seconds. Returns those that live on, another `grace_s` later."""
    left = [victim for victim in victims if victim.alive()]
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for victim in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(victim.pid, sign)
        deadline = time.monotonic() + grace_s
        while (left := [victim for victim in left if victim.alive()]) and time.monotonic() < deadline:
            time.sleep(POLL_S)
    return left
