"""Sandboxes that swe-rex deploys: a container of Docker each, or folders on a server that is there.

Invariant: every command has a keeper on the other side (`inside`), so a deadline, the whole tree's end and the bound on output hold
also when nobody here waits any more. What isolates is the container, or what the server runs in: two sandboxes of one server are
apart in their folders alone.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import logging
import math
import secrets
import socket
import tarfile
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, TypeVar

from swerex.deployment.abstract import AbstractDeployment
from swerex.deployment.docker import DockerDeployment
from swerex.deployment.remote import RemoteDeployment
from swerex.runtime.abstract import AbstractRuntime, Command, UploadRequest, WriteFileRequest

from pipeline.errors import SandboxError, root_cause
from pipeline.sandboxes import inside
from pipeline.sandboxes.base import Contents, ImageFolder, Limits, Ran
from pipeline.sandboxes.leases import DOCKER, LABEL, MAX_AGE_S, Lease, new_lease, orphans, remove
from pipeline.sandboxes.owning import OwnedSandboxes, fill, no_command, to_its_end

T = TypeVar("T")
log = logging.getLogger("sandboxes")
REX_LOG = logging.getLogger("sandboxes.rex")
"""For swe-rex, whose own loggers write to standard output."""

PROGRAM = Path(inside.__file__).read_text(encoding="utf-8")
THERE = "/tmp/rollout-inside"
"""Folder of the sandboxes, on the other side."""
DEPLOY_S = 300.0
"""For a container to answer; its image may have to be pulled."""
CALL_S = 30.0
"""For one answer of a server."""
END_S = 20.0
"""For the result of a command, after its deadline."""
SERVER_MB, SERVER_PROCESSES = 256, 64
"""Of a container, beside those of the commands."""
POLL_S, LONGEST_POLL_S = 0.01, 0.5


class RexSandbox:
    """Implements `Sandbox`."""

    def __init__(self, lease: Lease, limits: Limits, forget: Callable[[RexSandbox], None]) -> None:
        self.lease = lease
        self.limits = limits
        self._forget = forget
        self._folder = f"{THERE}/{lease.folder.name}"
        self._work = f"{self._folder}/work"
        self._deployment: AbstractDeployment | None = None
        self._numbers = itertools.count()
        self._closing: asyncio.Task[None] | None = None

    async def begin(self, deployment: AbstractDeployment, contents: Contents) -> None:
        """Lease, deployment, folder, contents, in this order. Raises OSError or SandboxError."""
        await asyncio.to_thread(self._prepare)
        await self.connect(deployment)
        await self._inside("make", self._folder, str(MAX_AGE_S))
        if isinstance(contents, ImageFolder) and self._contained:
            self._work = contents.folder
        else:
            await self._upload(contents)

    async def connect(self, deployment: AbstractDeployment) -> None:
        self._deployment = deployment
        try:  # swe-rex waits for Docker's own commands: not in this loop
            await to_its_end(asyncio.to_thread(lambda: asyncio.run(deployment.start())))
        except Exception as error:
            raise SandboxError(f"sandbox {self.lease.name}: swe-rex cannot start it: {root_cause(error)}") from error
        deployment.runtime.logger = REX_LOG

    def _prepare(self) -> None:
        self.lease.write()
        self.lease.folder.mkdir()

    async def _upload(self, contents: Contents) -> None:
        archive = f"{self._folder}/contents.tar"
        with tempfile.TemporaryDirectory() as aside:
            packed = Path(aside) / "contents.tar"
            await to_its_end(asyncio.to_thread(_pack, contents, packed))
            await self._ask(lambda runtime: runtime.upload(UploadRequest(source_path=str(packed), target_path=archive)))
        await self._inside("unpack", self._folder, archive)

    async def run(
        self, command: str, timeout_s: float, *, stdin: bytes = b"", output_bytes: int = 16_384, private: bool = False
    ) -> Ran:
        """private: the second folder is there all the time; other commands are not told where."""
        self._check_open()
        if (refused := no_command(command)) is not None:
            return refused
        call, nonce = str(next(self._numbers)), secrets.token_hex(16)
        request = {
            "command": command,
            "timeout_s": timeout_s,
            "stdin": base64.b64encode(stdin).decode(),
            "output_bytes": output_bytes,
            "work": self._work,
            "private": f"{self._folder}/private" if private else None,
            "container": self._contained,
            "limits": self._process_limits(timeout_s),
            "nonce": nonce,
        }
        path = f"{self._folder}/calls/{call}"
        await self._ask(lambda runtime: runtime.write_file(WriteFileRequest(path=f"{path}.json", content=json.dumps(request))))
        await self._inside("begin", self._folder, call)
        result = await self._result(f"{path}.result", timeout_s + END_S)
        if result.pop("nonce", None) != nonce:
            raise SandboxError(f"sandbox {self.lease.name}: what came of a command was written by another than its keeper")
        if "fault" in result:
            raise SandboxError(f"sandbox {self.lease.name}: {result['fault']}")
        return Ran(**result)

    async def close(self) -> None:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(), name=f"close {self.lease.name}")
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        try:
            if self._contained:
                await self._stop()
            elif self._deployment is not None:
                await self._inside("remove", self._folder)
            await asyncio.to_thread(remove, self.lease)
        except OSError as error:
            raise SandboxError(f"sandbox {self.lease.name} cannot be removed: {error}") from error
        finally:
            self._forget(self)

    async def _stop(self) -> None:
        """Politely; the container is removed afterwards, whatever comes of this."""
        deployment = self._deployment
        if deployment is None:
            return
        try:
            await to_its_end(asyncio.to_thread(lambda: asyncio.run(asyncio.wait_for(deployment.stop(), END_S))))
        except Exception as error:
            log.info("swe-rex did not stop %s: %s", self.lease.name, root_cause(error))

    @property
    def _contained(self) -> bool:
        return self.lease.place == DOCKER

    @property
    def _runtime(self) -> AbstractRuntime:
        """Raises what swe-rex raises once the deployment is stopped."""
        assert self._deployment is not None
        return self._deployment.runtime

    def _process_limits(self, timeout_s: float) -> dict[str, int]:
        """Of each process; memory and processes of a container are its own."""
        limits = {"CPU": math.ceil(timeout_s) + 1, "FSIZE": self.limits.file_mb * 2**20, "CORE": 0}
        return limits if self._contained else limits | {"AS": self.limits.memory_mb * 2**20}

    async def _result(self, path: str, bound_s: float) -> dict[str, Any]:
        clock = asyncio.get_running_loop().time
        deadline, pause = clock() + bound_s, POLL_S
        while clock() < deadline:
            found = await self._ask(lambda runtime: runtime.execute(Command(command=["cat", path], timeout=CALL_S)))
            if found.exit_code == 0:
                return json.loads(found.stdout)
            self._check_open()
            await asyncio.sleep(pause)
            pause = min(1.5 * pause, LONGEST_POLL_S)
        raise SandboxError(f"sandbox {self.lease.name}: the keeper of a command says nothing {END_S:g} s after its deadline")

    def _check_open(self) -> None:
        if self._closing is not None:
            raise SandboxError(f"sandbox {self.lease.name} is closed")

    async def _inside(self, *arguments: str) -> None:
        done = await self._ask(
            lambda runtime: runtime.execute(Command(command=["python3", "-c", PROGRAM, *arguments], timeout=CALL_S))
        )
        if done.exit_code != 0:
            lines = done.stderr.strip().splitlines()
            raise SandboxError(f"sandbox {self.lease.name}: {arguments[0]}: {lines[-1] if lines else f'exit {done.exit_code}'}")

    async def _ask(self, call: Callable[[AbstractRuntime], Awaitable[T]]) -> T:
        try:
            async with asyncio.timeout(CALL_S):
                return await call(self._runtime)
        except Exception as error:
            raise SandboxError(f"sandbox {self.lease.name}: its server fails: {root_cause(error)}") from error


class DockerSandboxes(OwnedSandboxes[RexSandbox]):
    """Implements `Sandboxes`: containers of one image, or of the one that a task names. They have the network that Docker gives."""

    def __init__(self, image: str, starts: int = 8, root: Path | None = None) -> None:
        super().__init__(starts, root, place=DOCKER)
        self._image = image

    def _new(self, name: str, limits: Limits) -> RexSandbox:
        return RexSandbox(new_lease(self._root, name, time.time(), place=DOCKER), limits, self._forget)

    async def _begin(self, sandbox: RexSandbox, contents: Contents) -> None:
        await asyncio.to_thread(self._clear, sandbox.lease.name)
        image = contents.image if isinstance(contents, ImageFolder) else self._image
        arguments = docker_arguments(sandbox.lease, sandbox.limits)
        deployment = DockerDeployment(
            logger=REX_LOG, image=image, port=free_port(), startup_timeout=DEPLOY_S, docker_args=arguments
        )
        await sandbox.begin(deployment, contents)

    def _clear(self, name: str) -> None:
        self._own_root()
        for lost in self._lost(name):
            remove(lost)


def docker_arguments(lease: Lease, limits: Limits) -> list[str]:
    """How a container is known, and what its processes may use together. The file for its id names the lease's folder, so that the
    reaper ends a `docker run` that still has to make its container."""
    memory = f"{limits.memory_mb + SERVER_MB}m"
    return [
        *("--label", f"{LABEL}={lease.folder.name}", "--cidfile", str(lease.folder / "cid"), "--init", "--attach", "stderr"),
        *("--cpus", f"{limits.cpu:g}", "--memory", memory, "--memory-swap", memory),
        *("--pids-limit", str(limits.processes + SERVER_PROCESSES), "--security-opt", "no-new-privileges"),
    ]


def free_port() -> int:
    """Of this machine, now: a container that finds it taken does not start, and is another try's."""
    with socket.create_server(("", 0)) as listener:
        return listener.getsockname()[1]


class RemoteSandboxes(OwnedSandboxes[RexSandbox]):
    """Implements `Sandboxes` on a `swerex-remote` that runs at an address: a folder of its own for each."""

    def __init__(self, url: str, token: str, starts: int = 8, root: Path | None = None) -> None:
        super().__init__(starts, root, place=url)
        self._token = token

    def _new(self, name: str, limits: Limits) -> RexSandbox:
        return RexSandbox(new_lease(self._root, name, time.time(), place=self._place), limits, self._forget)

    async def _begin(self, sandbox: RexSandbox, contents: Contents) -> None:
        await asyncio.to_thread(self._own_root)
        for lost in self._lost(sandbox.lease.name):
            await self._remove(lost)
        await sandbox.begin(self._deployment(), contents)

    async def _reap(self) -> None:
        await super()._reap()
        for lease in list(orphans(self._root, MAX_AGE_S, time.time())):
            if lease.place == self._place:
                try:
                    await self._remove(lease)
                except SandboxError as error:
                    log.warning("sandbox %s cannot be removed", lease.name, exc_info=error)

    async def _remove(self, lease: Lease) -> None:
        left = RexSandbox(lease, Limits(), self._forget)
        await left.connect(self._deployment())
        await left.close()

    def _deployment(self) -> RemoteDeployment:
        return RemoteDeployment(logger=REX_LOG, host=self._place, auth_token=self._token)


def _pack(contents: Contents, archive: Path) -> None:
    folder = archive.with_name("work")
    folder.mkdir()
    fill(folder, contents)
    with tarfile.open(archive, "w") as packed:
        packed.add(folder, arcname=".")
