"""The Serve application of the service: models, evaluations, and the HTTP routes in front of them.

Invariant: one service works in a folder of runs at a time; its Ray is private, on loopback, and goes with it.
"""

from __future__ import annotations

import logging
import os
import socket
import time
import warnings
from pathlib import Path
from typing import Any

from pipeline.buffer.lock import RunLock
from pipeline.cli.entry import uninterrupted
from pipeline.errors import Locked, UserError
from pipeline.service.arguments import Settings, parse_arguments, settle
from pipeline.service.runs import Runs

GRACE_S = 5.0
POLL_S = 0.1
KEEP_ALIVE_S = 75
"""Longer than clients keep an idle connection, so that none is closed under a request."""


def build(given: dict[str, Any]) -> Any:
    """`given`: as `ServeArguments`. Starts Ray and Serve's HTTP proxy unless this process has a Ray already; then it returns in a
    process of its own, over which this one watches.

    Raises UserError, or Locked when another service works in the same folder of runs.
    """
    settings = settle(parse_arguments(given), beside=Path(__file__).resolve().parent.parent)
    with uninterrupted():
        import ray
        from ray import serve

        from deployments.detached import start_detached
        from deployments.evaluations import Evaluations
        from deployments.models import ModelsReplica
        from deployments.service import service_deployment
        from deployments.supervisor import Supervisor, leave_signals

    first = True
    if not ray.is_initialized():
        first = Supervisor(settings, claim(settings)).serve()
        start_ray(settings)
        leave_signals()  # Ray had its own
    if settings.resume and first:
        Runs(settings.runs, settings.configs, start_detached).go_on(settings.run.run_id if settings.run is not None else None)
    logging.getLogger("ray.serve").addFilter(_not_about_options)
    address = {"host": settings.host, "port": settings.port}
    serve.start(http_options=address | {"location": "EveryNode", "keep_alive_timeout_s": KEEP_ALIVE_S})
    models = ModelsReplica.options(num_replicas=settings.config.engine.replicas).bind(settings)
    return service_deployment(settings).bind(models, Evaluations.bind(settings))


def _not_about_options(record: logging.LogRecord) -> bool:
    """`serve run` starts Serve again, with options of its own, and Serve warns that they are ignored. They should be."""
    return "client HTTP config differs" not in record.msg


def claim(settings: Settings) -> RunLock:
    """The folder of runs, for one service. What a killed one left behind is ended first, by pid. Raises UserError or Locked."""
    from deployments import cluster

    paths = settings.runs.service
    paths.root.mkdir(parents=True, exist_ok=True)
    if settings.config.run.ray.address is not None:
        raise UserError(f"run.ray.address {settings.config.run.ray.address!r}: the service starts a Ray of its own; leave it out")
    lock = RunLock(paths)
    try:
        lock.acquire()
    except Locked as error:
        raise Locked(f"another service works in {settings.runs.runs}: {error}") from None
    leftovers = lock.leftovers()
    left = cluster.end(leftovers, GRACE_S)
    if left:
        raise Locked(f"processes of the last service do not end: {[process.pid for process in left]}; end them by hand")
    _check_port(settings, GRACE_S if leftovers else 0.0)
    settings.runs.ending.unlink(missing_ok=True)
    return lock


def start_ray(settings: Settings) -> None:
    """A private one, whose processes find the proxy's part of this package and the configuration's own modules."""
    from deployments import cluster

    warnings.filterwarnings("ignore", module="ray")
    root = str(Path(__file__).resolve().parent.parent)
    inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([*settings.code, root, *inherited])
    os.environ["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] = "deployments.proxy:middlewares"
    cluster.start(settings.runs.service, settings.config.run.ray, None)


def _check_port(settings: Settings, patience_s: float) -> None:
    """patience_s: for the proxy of a service that was just ended, which goes a moment after its Ray."""
    deadline = time.monotonic() + patience_s
    while (fault := _port_fault(settings)) is not None:
        if time.monotonic() >= deadline:
            raise UserError(f"{settings.host} port {settings.port}: {fault}; choose another port=")
        time.sleep(POLL_S)


def _port_fault(settings: Settings) -> str | None:
    with socket.socket(socket.AF_INET6 if ":" in settings.host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return error.strerror
    return None
