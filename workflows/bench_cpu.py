"""CPU time that a run's processes spend while a node is under way: with so many cores no order of the work makes it shorter."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

import psutil

POLL_S = 0.005
PARTS = {"ServeReplica": "engine", "EvaluatorWorker": "worker", "EvaluatorPool": "pool", "ReplayBuffer": "buffer"}
REST = "rest"
"""Ray's own processes, the other stages and the driver."""


class NodeCpu:
    """While it is open, it follows log/nodes.jsonl: from `started` to `done` of each `<stage>[step]`, the CPU of all processes
    below this one, by part.

    Reading takes milliseconds itself, so steps that are read are not to be timed; the clock of processes ticks every 10 ms, so
    take sums over several.
    """

    def __init__(self, nodes: Path, stage: str, steps: Collection[int]) -> None:
        self._nodes, self._stage = nodes, f"{stage}["
        self._read_for = {f"{stage}[{step}]" for step in steps}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="cpu of nodes")
        self._known: list[tuple[psutil.Process, str]] = []
        self.spent: list[Counter[str]] = []
        """CPU seconds by part, a node each, in the order of their ends."""

    def __enter__(self) -> NodeCpu:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._closing.set()
        self._thread.join()

    def _follow(self) -> None:
        before: Counter[str] = Counter()
        read = 0
        while not self._closing.wait(POLL_S):
            if not self._nodes.exists() or self._nodes.stat().st_size == read:
                continue
            with open(self._nodes, "rb") as file:
                file.seek(read)
                lines = file.read()
            read += len(lines)
            for event in map(json.loads, lines.splitlines()):
                wanted = event["node"] in self._read_for
                if wanted and event["event"] == "started":
                    before = self._read()
                elif wanted:
                    self.spent.append(self._read() - before)
                if event["event"] == "done" and event["node"].startswith(self._stage):  # nothing is timed or read before the next
                    self._known = [(each, _part(each)) for each in _processes()]

    def _read(self) -> Counter[str]:
        found: Counter[str] = Counter()
        for process, part in self._known:
            try:
                times = process.cpu_times()
            except psutil.NoSuchProcess:
                continue
            found[part] += times.user + times.system
        return found


def _processes() -> list[psutil.Process]:
    here = psutil.Process()
    return [here, *here.children(recursive=True)]


def _part(process: psutil.Process) -> str:
    try:
        title = " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return REST
    return next((part for name, part in PARTS.items() if title.startswith(f"ray::{name}")), REST)
