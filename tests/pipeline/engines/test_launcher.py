from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from pipeline.config.models import Launch
from pipeline.engines.launcher import FIRST_STARTS, Launcher
from pipeline.errors import EngineError

SERVER = """
import http.server, json, os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps([os.getpid(), child.pid]).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
file = sys.argv[sys.argv.index("--address-file") + 1]
open(file + ".new", "w").write(f"http://127.0.0.1:{server.server_port}")
os.replace(file + ".new", file)
server.serve_forever()
"""
OWNER = """
import sys, time
from pathlib import Path
from pipeline.config.models import Launch
from pipeline.engines.launcher import Launcher
launcher = Launcher("stub", Launch(python=sys.executable), lambda: [sys.executable, sys.argv[1]], {}, None)
launcher.wait_ready()
print(launcher.address(), launcher.pid(), flush=True)
time.sleep(600)
"""

Start = Callable[..., Launcher]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Launcher] = []

    def make(program: str, timeout_s: float = 30.0) -> Launcher:
        file = tmp_path / "server.py"
        file.write_text(program)
        launch = Launch(python=Path(sys.executable), start_timeout_s=timeout_s)
        log = tmp_path / "server.log"
        started.append(Launcher("stub", launch, lambda: [sys.executable, str(file)], dict(os.environ), log))
        return started[-1]

    yield make
    for launcher in started:
        launcher.close()


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE for pid in pids)


def processes(address: str) -> list[int]:
    return httpx.get(f"{address}/info", trust_env=False).json()


def test_closing_ends_the_server_and_its_children(start: Start) -> None:
    launcher = start(SERVER)
    launcher.wait_ready()
    pids = processes(launcher.address())
    launcher.close()
    assert gone(pids)


def test_a_server_that_dies_is_started_again(start: Start) -> None:
    launcher = start(SERVER)
    launcher.wait_ready()
    first = processes(launcher.address())
    os.kill(first[0], signal.SIGKILL)
    wait_for(lambda: launcher.address() is None or launcher.starts == 2)
    launcher.wait_ready()
    assert processes(launcher.address())[0] != first[0]
    assert gone(first)


@pytest.mark.parametrize("victim", ["owner", "guard"])
def test_a_server_outlives_neither_its_owner_nor_its_guard(tmp_path: Path, victim: str) -> None:
    file = tmp_path / "server.py"
    file.write_text(SERVER)
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(file)], stdout=subprocess.PIPE, text=True, env=dict(os.environ))
    try:
        address, guard = owner.stdout.readline().split()
        server, child = processes(address)
        os.kill(owner.pid if victim == "owner" else int(guard), signal.SIGKILL)
        wait_for(lambda: gone([server]))
        if victim == "owner":
            wait_for(lambda: gone([int(guard), child]))
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        if not gone([child]):
            os.kill(child, signal.SIGKILL)


def test_a_server_that_never_starts_is_given_up_with_the_end_of_its_log(start: Start) -> None:
    launcher = start("raise SystemExit('no such model')")
    with pytest.raises(EngineError, match=f"{FIRST_STARTS} starts.*no such model"):
        launcher.wait_ready()


def test_a_server_that_is_mute_is_ended_at_its_time_out(start: Start) -> None:
    launcher = start("import time; print('loading', flush=True); time.sleep(600)", 0.3)
    with pytest.raises(EngineError, match="loading"):
        launcher.wait_ready()
