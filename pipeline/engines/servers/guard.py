"""Stands between whoever launches a server and the server: `python guard.py COMMAND...`.

Invariant: the server's whole process group is gone soon after the launcher is, however it went: standard input is a pipe that only
the launcher holds, and its end means that the launcher is no more. Should the guard itself be killed, the kernel ends the server.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time

GRACE_S = 2.0
POLL_S = 0.2
PR_SET_PDEATHSIG = 1


def die_with_guard() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def end_group(server: subprocess.Popen[bytes]) -> None:
    """SIGTERM to all of the group, then SIGKILL, which also takes what the server left behind."""
    for sign, wait_s in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, GRACE_S)):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(server.pid, sign)
        deadline = time.monotonic() + wait_s
        while server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)


def main() -> int:
    for sign in (signal.SIGTERM, signal.SIGINT):
        signal.signal(sign, lambda *_: sys.exit(1))
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_guard)
    try:
        while server.poll() is None:
            readable, _, _ = select.select([0], [], [], POLL_S)
            if readable and not os.read(0, 1):
                return 1
        return server.returncode
    finally:
        end_group(server)


if __name__ == "__main__":
    sys.exit(main())
