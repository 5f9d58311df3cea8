"""The `rollout` command, and others beside it, as a user starts them, and every process that belongs to them.

Invariant: what a `Program` started carries a mark in its environment, so that it is found whoever its parent is by now, and
`end` leaves nothing of it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil

from pipeline.buffer.reader import read_selections, read_status
from pipeline.errors import RolloutError
from pipeline.paths import RunPaths

T = TypeVar("T")
MARK = "ROLLOUT_TEST_MARK"
COMMANDS = Path(sys.executable).parent
POLL_S = 0.05
STAGES = ("fetcher", "batcher", "evaluator_pool", "teacher_scorer", "replay_buffer", "trainer")


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    err: str


class Command:
    """One command that runs. Its output goes to files, so that it never waits for a reader."""

    def __init__(self, arguments: list[str], cwd: Path, environment: dict[str, str], output: Path) -> None:
        self._out, self._err = output.with_suffix(".out"), output.with_suffix(".err")
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                arguments, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )

    def done(self, timeout_s: float) -> Done:
        """Its end. Raises TimeoutError with what it said so far."""
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"{self.process.args} runs for more than {timeout_s:g} s\n{self.said()}") from None
        return self.said()

    def said(self) -> Done:
        code = self.process.poll()
        return Done(-1 if code is None else code, self._out.read_text(), self._err.read_text())

    def running(self) -> bool:
        return self.process.poll() is None

    def send(self, sign: signal.Signals) -> None:
        self.process.send_signal(sign)

    def send_all(self, sign: signal.Signals) -> None:
        """To its whole process group, as a terminal does."""
        os.killpg(self.process.pid, sign)


class Program:
    """folder: outputs lie here, and `runs` under it. Every command gets this folder's runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs = folder, folder / "runs"
        self._mark = uuid.uuid4().hex
        self._number = 0

    def start(self, *arguments: object, command: str = "rollout", cwd: Path | None = None) -> Command:
        self._number += 1
        path = os.pathsep.join([str(COMMANDS), os.environ["PATH"]])
        environment = os.environ | {MARK: self._mark, "ROLLOUT_RUNS": str(self.runs), "PATH": path}
        self.folder.mkdir(parents=True, exist_ok=True)
        words = [str(shutil.which(command, path=path)), *map(str, arguments)]
        return Command(words, cwd or self.folder, environment, self.folder / f"command_{self._number:04d}")

    def call(self, *arguments: object, command: str = "rollout", timeout_s: float = 60.0, cwd: Path | None = None) -> Done:
        return self.start(*arguments, command=command, cwd=cwd).done(timeout_s)

    def run(self, name: str) -> RunPaths:
        return RunPaths(self.runs / name)

    def processes(self) -> list[psutil.Process]:
        """Everything alive that was started by this program's commands, and by what they started."""
        return [process for process in psutil.process_iter() if self._is_mine(process)]

    def _is_mine(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE
        except (psutil.Error, OSError):
            return False

    def find(self, title: str) -> list[psutil.Process]:
        """Those whose command line begins with `title` (Ray names its workers after their class), or whose name is it."""
        return [process for process in self.processes() if title_of(process).startswith(title) or _name(process) == title]

    def kill(self, processes: list[psutil.Process]) -> None:
        for process in processes:
            with suppress(psutil.NoSuchProcess):
                os.kill(process.pid, signal.SIGKILL)

    def kill_all(self) -> None:
        """SIGKILL, again and again until nothing is left: what dies may have started something a moment before."""
        wait_for(self._killed, 20.0, "the end of all processes")

    def _killed(self) -> bool:
        left = self.processes()
        self.kill(left)
        return not left


@contextmanager
def program(folder: Path) -> Iterator[Program]:
    """A program of which nothing is left afterwards."""
    made = Program(folder)
    try:
        yield made
    finally:
        made.kill_all()


def wait_for(condition: Callable[[], T], timeout_s: float, what: str, command: Command | None = None) -> T:
    """The first true value of `condition`. Raises when it does not come in time, or the command ends before."""
    deadline = time.monotonic() + timeout_s
    while True:
        ended = command is not None and not command.running()
        if value := condition():
            return value
        if ended:
            raise AssertionError(f"the command ended before {what}: {command.said()}")
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s\n{command.said() if command else ''}")
        time.sleep(POLL_S)


def status(paths: RunPaths) -> dict[str, Any] | None:
    """None: there is no readable ledger yet."""
    try:
        return read_status(paths)
    except RolloutError:
        return None


def step(paths: RunPaths) -> int:
    found = status(paths)
    return found["step"] if found else 0


def nodes(paths: RunPaths) -> list[dict[str, Any]]:
    """Starts and ends of workflow nodes, in the order in which they were noted."""
    return [json.loads(line) for line in paths.nodes.read_text().splitlines()] if paths.nodes.exists() else []


def adds_up(found: dict[str, Any]) -> bool:
    counts = found["ordinals"]
    return counts["fetched"] == sum(counts[state] for state in counts if state != "fetched")


def trained_as_planned(paths: RunPaths, steps: int, tasks: int) -> bool:
    """Every step was trained on its own ordinals, in their order, as in a run that nobody disturbed."""
    planned = {step: list(range(tasks * (step - 1), tasks * step)) for step in range(1, steps + 1)}
    return read_selections(paths) == planned


def title_of(process: psutil.Process) -> str:
    """`ray::TrainerActor.node` of a Ray worker, the command line of anything else; empty when it is gone."""
    try:
        return " ".join(process.cmdline()).strip()
    except psutil.Error:
        return ""


def _name(process: psutil.Process) -> str:
    try:
        return process.name()
    except psutil.Error:
        return ""
