"""A server in an environment of its own, started, restarted and ended by whoever uses it.

Invariant: the server lives no longer than this process, however it ends, and one that does not get ready again and again is given
up with the end of its log.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx

from pipeline.config.models import Launch
from pipeline.errors import EngineError

SERVERS = Path(__file__).parent / "servers"
FIRST_STARTS = 2
"""In vain, of a server that was never ready: what is wrong with it will not pass."""
RESTARTS = 4
"""In vain, of a server that was ready before."""
POLL_S = 0.1
LOG_LINES = 5
PROBE_S = 5.0


class Launcher:
    """command: the arguments of the server's program, asked anew at every start, because the newest weights may be others by then.

    log: file that takes the server's output. environment: of the server's process.
    """

    def __init__(
        self, name: str, launch: Launch, command: Callable[[], list[str]], environment: dict[str, str], log: Path | None
    ) -> None:
        self.name = name
        self._launch, self._command, self._environment = launch, command, environment
        self._folder = tempfile.TemporaryDirectory(prefix="rollout-engine-")
        self._log = log or Path(self._folder.name) / "server.log"
        self._address: str | None = None
        self._failure: str | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        self.starts = 0
        self._thread = threading.Thread(target=self._keep_running, name=f"launcher-{name}", daemon=True)
        self._thread.start()

    def address(self) -> str | None:
        """None while the server is not ready. Raises EngineError once it was given up."""
        if self._failure is not None:
            raise EngineError(self._failure)
        return self._address

    def pid(self) -> int | None:
        """Of the guard: the server is its child."""
        return None if self._process is None else self._process.pid

    def wait_ready(self) -> None:
        """Blocks. Raises EngineError when the server does not get ready."""
        while self.address() is None:
            time.sleep(POLL_S)

    def close(self) -> None:
        self._ended.set()
        process = self._process
        if process is not None and process.stdin is not None:
            process.stdin.close()
        self._thread.join(self._launch.start_timeout_s)
        self._folder.cleanup()

    def _keep_running(self) -> None:
        unready, bound = 0, FIRST_STARTS
        while not self._ended.is_set():
            if self._run_once():
                unready, bound = 0, RESTARTS
            else:
                unready += 1
            if unready >= bound and not self._ended.is_set():
                self._failure = f"server {self.name} did not get ready in {unready} starts: {self._end_of_log()}"
                return

    def _run_once(self) -> bool:
        """One life of the server; True when it was ready at some time in it."""
        file = Path(self._folder.name) / f"address-{self.starts}"
        self.starts += 1
        guarded = [sys.executable, str(SERVERS / "guard.py"), *self._command(), "--address-file", str(file)]
        with self._log.open("ab") as log:
            self._process = process = subprocess.Popen(
                guarded, stdin=subprocess.PIPE, stdout=log, stderr=log, env=self._environment, start_new_session=True
            )
        deadline = time.monotonic() + self._launch.start_timeout_s
        try:
            while process.poll() is None and not self._ended.is_set():
                if self._address is None and file.exists() and _answers(file.read_text()):
                    self._address = file.read_text()
                if self._address is None and time.monotonic() > deadline:
                    break
                self._ended.wait(POLL_S)
            return self._address is not None
        finally:
            self._address = None
            process.stdin.close()
            process.wait()

    def _end_of_log(self) -> str:
        try:
            lines = self._log.read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return "no output"
        return f"{self._log}: " + " | ".join(line.strip() for line in lines[-LOG_LINES:])


def _answers(address: str) -> bool:
    try:
        return httpx.get(f"{address}/info", timeout=PROBE_S, trust_env=False).status_code == httpx.codes.OK
    except httpx.TransportError:
        return False
