"""The process over the service, with a stand-in that serves: drains, signals to one and to all, and what follows a death."""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.program import Command, Program, program, wait_for

SERVE = """
import asyncio, os, sys
from pathlib import Path
import uvicorn, yaml
from deployments import cluster
from deployments.gate import Gate, GateRules
from deployments.supervisor import Supervisor
from pipeline.buffer.lock import RunLock
from pipeline.service.arguments import parse_arguments, settle

looked = asyncio.Event()

async def answer(scope, receive, send):
    if scope["path"] == "/healthz":
        looked.set()
    if scope["path"] == "/pid":
        await looked.wait()  # the supervisor knows that it serves
    if scope["path"] == "/slow":
        await asyncio.sleep(1.0)
    if scope["path"] == "/die":
        os._exit(3)
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": str(os.getpid()).encode()})

settings = settle(parse_arguments({"config": sys.argv[1], "runs_dir": sys.argv[2], "port": sys.argv[3]}))
settings.runs.service.root.mkdir(parents=True)
cluster.temporary_folder(settings.runs.service).mkdir()
lock = RunLock(settings.runs.service)
lock.acquire()
first = Supervisor(settings, lock).serve()
print("first" if first else "again", flush=True)
gate = Gate(answer, GateRules(True, None, 1000, settings.runs.ending), lambda *_: None)
server = uvicorn.Server(uvicorn.Config(gate, port=settings.port, log_level="error", lifespan="off"))
server.install_signal_handlers = lambda: None
server.capture_signals = __import__("contextlib").nullcontext
server.run()
"""
CONFIG = (
    "student: {architecture: {hidden: 16}}\ndatasets: {words: {generator: spell_backward, size: 50}}\nalgorithm: {name: grpo}\n"
)
READY_S, ENDED_S = 60.0, 30.0


class Served:
    def __init__(self, folder: Path, here: Program) -> None:
        self.program = here
        (folder / "c.yaml").write_text(CONFIG)
        (folder / "serve.py").write_text(SERVE)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10)
        arguments = [folder / "serve.py", folder / "c.yaml", folder / "runs", port]
        self.command: Command = here.start(*arguments, command="python")
        wait_for(lambda: self.pid(), READY_S, "the service", self.command)

    def pid(self) -> int | None:
        """Of the process that serves."""
        try:
            return int(self.client.get("/pid").text)
        except (httpx.TransportError, ValueError):
            return None

    def ended(self) -> tuple[int, str, str]:
        done = self.command.done(ENDED_S)
        assert not self.program.processes(), "nothing outlives it"
        return done.code, done.out, done.err


@pytest.fixture
def served(tmp_path) -> Iterator[Served]:
    with program(tmp_path / "program") as here:
        yield Served(tmp_path, here)


def test_what_has_begun_is_answered_and_what_comes_is_told_to_come_back(served):
    answers: list[httpx.Response] = []
    slow = threading.Thread(target=lambda: answers.append(served.client.get("/slow")))
    slow.start()
    wait_for(lambda: served.client.get("/healthz").headers["x-in-flight"] == "1", 5.0, "the request")
    served.command.send(signal.SIGTERM)
    refused = wait_for(lambda: (got := served.client.get("/pid")).status_code == 503 and got, 5.0, "the end's beginning")
    assert refused.json()["error"]["code"] == "service_ending" and refused.headers["retry-after"] == "10"
    slow.join()
    assert answers[0].status_code == 200
    assert served.ended() == (0, "first\n", "")


@pytest.mark.parametrize("signs", [[signal.SIGTERM], [signal.SIGINT] * 3], ids=["one", "three"])
def test_signals_to_the_whole_group_end_it_with_0(served, signs):
    for sign in signs:
        served.command.send_all(sign)
    assert served.ended() == (0, "first\n", "")


def test_what_has_died_is_begun_again_a_few_times(served):
    before = served.pid()
    for death in range(1, 5):
        with pytest.raises(httpx.TransportError):
            served.client.get("/die")
        if death < 4:
            assert wait_for(lambda: served.pid(), READY_S, "the next one", served.command) != before
    code, out, err = served.ended()
    assert (code, out) == (1, "first\nagain\nagain\nagain\n")
    assert err.count("is started again") == 3 and "died 4 times in a row; `serve run` with the same arguments goes on" in err
