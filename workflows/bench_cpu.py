"""CPU time that a run's processes spend while a node is under way: with so many cores no order of the work makes it shorter."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from types import TracebackType

import psutil

POLL_S = 0.005
PARTS = {"ServeReplica": "engine", "EvaluatorWorker": "worker", "EvaluatorPool": "pool", "ReplayBuffer": "buffer"}
REST = "rest"
"""Ray's own processes, the other stages and the driver."""


class NodeCpu:
    """While it is open, it follows log/nodes.jsonl: from `started` to `done` of each node `<stage>[k]`, the CPU of all processes
    below this one, by part. The clock of processes ticks every 10 ms: take sums over many nodes."""

    def __init__(self, nodes: Path, stage: str) -> None:
        self._nodes, self._stage = nodes, stage
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
        seen = 0
        while not self._closing.wait(POLL_S):
            lines = self._nodes.read_text().splitlines() if self._nodes.exists() else []
            for event in map(json.loads, lines[seen:]):
                if not event["node"].startswith(f"{self._stage}["):
                    continue
                if event["event"] == "started":
                    before = self._read()
                else:
                    self.spent.append(self._read() - before)
                    self._known = [(each, _part(each)) for each in _processes()]
            seen = len(lines)

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
