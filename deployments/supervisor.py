"""The process that `serve run` began: it begins the one that serves, ends it when told to, and begins it again when it has died.

Invariant: nothing of the service outlives this process, and an end that was asked for has exit code 0. The first signal lets what
is being answered end, the second does not, and those behind it change nothing.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import sys
import threading
import time
from contextlib import suppress

import httpx

from deployments import cluster
from deployments.gate import HEALTH, IN_FLIGHT
from pipeline.buffer.lock import ProcessId, RunLock
from pipeline.service.arguments import Settings

LOOK_S = 1.0
"""Between two looks at the processes: how soon it is noticed that Ray has lost a service."""
DRAIN_POLL_S = 0.1
ANSWER_S = 1.0
GRACE_S = 5.0
PR_SET_PDEATHSIG = 1
STEADY_S = 300.0
MOST_DEATHS = 4
"""In a row, each within STEADY_S of its start."""


class Supervisor:
    """lock: of the service, held. A signal may reach this process alone, the one that serves too, or all of Ray; what it means is
    decided here."""

    def __init__(self, settings: Settings, lock: RunLock) -> None:
        self._settings, self._lock = settings, lock
        self._signals = 0
        self._woken = threading.Event()
        self._seen: set[ProcessId] = set()

    def serve(self) -> bool:
        """Returns in the process that serves: whether it is the first one. Elsewhere it never does: it exits."""
        for sign in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD):
            signal.signal(sign, self._signalled)
        deaths = 0
        while True:
            began = time.monotonic()
            child = self._begin()
            if child == 0:
                return deaths == 0
            try:
                code, was_ready = self._watch(child)
            finally:
                self._clear(child)
            if self._signals:
                raise SystemExit(0)
            if not was_ready:
                raise SystemExit(max(1, code))
            deaths = deaths + 1 if time.monotonic() - began < STEADY_S else 1
            if deaths == MOST_DEATHS:
                sys.stderr.write(f"error: the service died {deaths} times in a row; `serve run` with the same arguments goes on\n")
                raise SystemExit(1)
            sys.stderr.write("the service has died and is started again; its evaluations go on\n")

    def _begin(self) -> int:
        """As os.fork, of a process that ends with this one."""
        sys.stdout.flush()
        sys.stderr.flush()
        me = os.getpid()
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != me:
                os._exit(1)
            leave_signals()
        return child

    def _watch(self, child: int) -> tuple[int, bool]:
        """Returns when it has ended, or is to be ended: its exit code, and whether it ever served."""
        whole = ready = False
        while True:
            self._woken.wait(LOOK_S)
            self._woken.clear()
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                return os.waitstatus_to_exitcode(status), ready
            if self._signals:
                self._drain()
                return 0, ready
            self._look(child)
            ready = ready or self._in_flight() is not None
            complete = cluster.complete(child)
            if whole and not complete:
                return 1, ready
            whole = complete

    def _look(self, child: int) -> None:
        """Whoever comes after a SIGKILL of all of it finds in the lock what may be left."""
        fresh = {process for process in (ProcessId.of(child), *cluster.processes(child)) if process is not None} - self._seen
        if fresh:
            self._seen |= fresh
            self._lock.record(process.pid for process in self._seen)

    def _drain(self) -> None:
        """Until nothing is being answered; what comes meanwhile is told to come back."""
        self._settings.runs.ending.touch()
        deadline = time.monotonic() + self._settings.config.run.stop_grace_s
        while self._signals < 2 and time.monotonic() < deadline and self._in_flight(slow=1):
            time.sleep(DRAIN_POLL_S)

    def _in_flight(self, slow: int | None = None) -> int | None:
        """Requests that are being answered; None: nobody answers. slow: what a service counts as that does not say in time."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self._settings.host, self._settings.host)
        address = f"http://[{host}]" if ":" in host else f"http://{host}"
        try:
            reply = httpx.get(f"{address}:{self._settings.port}{HEALTH}", timeout=ANSWER_S, trust_env=False, verify=False)
        except httpx.TimeoutException:
            return slow
        except httpx.TransportError:
            return None
        return int(reply.headers[IN_FLIGHT]) if IN_FLIGHT in reply.headers else None

    def _clear(self, child: int) -> None:
        """End all of it, by pid. What Ray has started goes with the process that serves, and the rest is asked first."""
        self._look(child)
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)
        cluster.end(self._seen, GRACE_S)
        with suppress(ChildProcessError):  # it is reaped already
            os.waitpid(child, os.WNOHANG)
        self._seen.clear()
        self._settings.runs.ending.unlink(missing_ok=True)
        shutil.rmtree(cluster.temporary_folder(self._settings.runs.service), ignore_errors=True)

    def _signalled(self, sign: int, _: object) -> None:
        self._signals += sign != signal.SIGCHLD
        self._woken.set()


def leave_signals() -> None:
    """To the supervisor: Ctrl-C comes to every process of a terminal, SIGTERM only as an end that is not to be spoken of."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, lambda *_: None)  # a handler, and not SIG_IGN, which other programs would inherit
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
