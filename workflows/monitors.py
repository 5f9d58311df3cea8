"""Monitors that only a real cluster needs: actors that restart without getting on, and the processes that a crash would leave."""

from __future__ import annotations

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from pipeline.buffer.lock import ProcessId
from pipeline.errors import StageFailed

POLL_S = 1.0


class RestartWatch:
    """Fails the run when one stage came back under a new pid more than `most` times while the run made no progress.

    Progress is the count of groups that were written, scored or trained.
    """

    def __init__(self, status: Callable[[], Awaitable[dict[str, Any]]], most: int) -> None:
        self._status = status
        self._most = most
        self._pids: dict[str, int] = {}
        self._restarts: Counter[str] = Counter()
        self._progress = -1

    async def run(self) -> NoReturn:
        while True:
            self.observe(await self._status())
            await asyncio.sleep(POLL_S)

    def observe(self, status: dict[str, Any]) -> None:
        ordinals = status["ordinals"]
        progress = ordinals["fetched"] - ordinals["pending"] - ordinals["running"] + ordinals["trained"] + status["step"]
        if progress != self._progress:
            self._progress = progress
            self._restarts.clear()
        for stage, facts in status["stages"].items():
            before = self._pids.get(stage)
            self._pids[stage] = facts["pid"]
            if before is None or before == facts["pid"]:
                continue
            self._restarts[stage] += 1
            if self._restarts[stage] > self._most:
                raise StageFailed(
                    stage,
                    f"restarted {self._restarts[stage]} times without progress (run.max_actor_restarts {self._most}); "
                    f"its log is log/{stage}.log",
                )


class ClusterWatch:
    """Fails the run as soon as a process has ended without which Ray is lost: calls would wait for their deadlines instead."""

    def __init__(self, services: Mapping[str, ProcessId]) -> None:
        self._services = services

    async def run(self) -> NoReturn:
        while True:
            for name, process in self._services.items():
                if not process.alive():
                    raise StageFailed("ray", f"its {name} (pid {process.pid}) has ended; `rollout resume` goes on")
            await asyncio.sleep(POLL_S)


class NodeCounter:
    """Counts the workflow's nodes from log/nodes.jsonl, for `rollout status`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._offset = 0
        self._ended: defaultdict[str, int] = defaultdict(int)
        """Stage -> the steps whose node has ended, a bit each: a run of a million steps is remembered in less than a megabyte."""
        self.done = self.rerun = 0

    def counts(self) -> dict[str, int]:
        """nodes_done: different nodes that ended. nodes_rerun: starts of a node that had ended before."""
        for line in self._new_lines():
            event = json.loads(line)
            stage, _, step = event["node"].rstrip("]").partition("[")
            bit = 1 << int(step)
            again = bool(self._ended[stage] & bit)
            if event["event"] == "started":
                self.rerun += again
            elif event["event"] == "done":
                self.done += not again
                self._ended[stage] |= bit
        return {"nodes_done": self.done, "nodes_rerun": self.rerun}

    def _new_lines(self) -> Iterator[bytes]:
        if not self._log.exists():
            return
        with open(self._log, "rb") as file:
            file.seek(self._offset)
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    return
                self._offset += len(line)
                yield line
