"""Monitors of progress: a stage that holds work and does not move is named, whatever the other stages do.

Invariant: progress is a counter that moved (`finished`, or `detail["heartbeat"]` within one long call); taking more work in
is not progress, and neither are the commits of another stage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from pipeline.buffer.api import StageReport
from pipeline.engines.base import Engine
from pipeline.errors import StageFailed, Stalled, root_cause


@dataclass(slots=True)
class _Watched:
    report: StageReport
    counters: tuple[Any, ...]
    moved_at: float
    """When the counters moved last."""
    busy_since: float
    """When the counters moved last, or when work of its own was first seen in the stage after it had none."""


class StallWatchdog:
    """A MONITOR. `run` never returns; it raises Stalled.

    A stage is stuck when it has had work (`backlog` > 0) for `stall_s` seconds while its counters stood still. A stage that
    says what it waits for in `detail["waiting_for"]` (capacity, another stage) is not accused itself, and one whose work ends by
    deadlines of its own says in `detail["bound_s"]` after how many seconds its counters move at the latest: before that it is not
    stuck. Beside that, no counter of any stage moving for `stall_s` seconds, or for as long as a stage that works may take, is a
    stall of the whole pipeline: a lost wake-up leaves no backlog behind.
    A report may name its oldest item in `detail["oldest"]` and who holds its resources in `detail["holder"]`. A stage of several
    independent parts lists them in `detail["parts"]`: name -> {finished, backlog, oldest_s, and what `detail` may hold}; each is
    watched by itself, so that one part's progress does not hide another's stall.

    probe: the newest report of every stage. It must answer within `stall_s`.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        probe: Callable[[], Awaitable[Sequence[StageReport]]],
        stall_s: float,
        clock: Callable[[], float],
        *,
        poll_s: float = 1.0,
    ) -> None:
        self._probe, self._stall_s, self._clock, self._poll_s = probe, stall_s, clock, poll_s
        self._stages: dict[str, _Watched] = {}

    async def run(self) -> NoReturn:
        started = self._clock()
        while True:
            try:
                async with asyncio.timeout(self._stall_s):
                    reports = await self._probe()
            except TimeoutError as error:
                raise Stalled("watchdog", f"the stages' reports did not arrive within {self._stall_s:g} s") from error
            now = self._clock()
            for report in reports:
                self._observe(report.stage, report, now)
                for name, part in report.detail.get("parts", {}).items():
                    self._observe(f"{report.stage}/{name}", _part(report, part), now)
            self._accuse(started, now)
            await asyncio.sleep(self._poll_s)

    def _observe(self, name: str, report: StageReport, now: float) -> None:
        counters = (report.finished, report.detail.get("heartbeat"))
        known = self._stages.get(name)
        if known is None or known.counters != counters:
            self._stages[name] = _Watched(report, counters, now, now)
            return
        if not (_has_work(known.report) and _has_work(report)):
            known.busy_since = now
        known.report = report

    def _patience_s(self, report: StageReport) -> float:
        return max(self._stall_s, report.detail.get("bound_s", 0.0))

    def _accuse(self, started: float, now: float) -> None:
        stages = sorted(self._stages.values(), key=lambda stage: stage.busy_since)
        stuck = [stage for stage in stages if now - stage.busy_since >= self._patience_s(stage.report)]
        if stuck:
            also = "".join(f"; also {other.report.stage}: {_describe(other.report)}" for other in stuck[1:])
            first = stuck[0]
            still = f"no progress for {now - first.busy_since:.0f} s (observe.stall_s {self._stall_s:g}); "
            raise Stalled(first.report.stage, still + _describe(first.report) + also)
        last_move = max((stage.moved_at for stage in stages), default=started)
        if now - last_move >= max((self._patience_s(stage.report) for stage in stages), default=self._stall_s):
            holders = sorted((stage.report for stage in stages if stage.report.backlog > 0), key=lambda report: -report.oldest_s)
            held = "; ".join(f"{report.stage}: {_describe(report)}" for report in holders) or "no stage holds any work"
            name = holders[0].stage if holders else "pipeline"
            quiet = f"nothing moved in any stage for {now - last_move:.0f} s (observe.stall_s {self._stall_s:g})"
            raise Stalled(name, f"{quiet}; {held}")


def _part(report: StageReport, part: dict[str, Any]) -> StageReport:
    return replace(report, finished=part["finished"], backlog=part["backlog"], oldest_s=part["oldest_s"], detail=part)


def _has_work(report: StageReport) -> bool:
    return report.backlog > 0 and not report.detail.get("waiting_for")


def _describe(report: StageReport) -> str:
    text = f"holds {report.backlog}, the oldest {report.detail.get('oldest', 'item')} for {report.oldest_s:.0f} s"
    if holder := report.detail.get("holder"):
        text += f", held by {holder}"
    if waiting := report.detail.get("waiting_for"):
        text += f", waiting for {waiting}"
    return f"{text} ({report.actor}, pid {report.pid} on {report.node or 'this node'})"


class EngineProbe:
    """A MONITOR: an engine that nobody brings back is a failure of its own stage name.

    gone_s: without an answer to `info`; as long as a replica may take to start. clock: monotonic seconds.
    """

    def __init__(
        self, name: str, engine: Engine, gone_s: float, clock: Callable[[], float], *, every_s: float = 5.0, timeout_s: float = 20.0
    ) -> None:
        self._name, self._engine, self._gone_s, self._clock = name, engine, gone_s, clock
        self._every_s, self._timeout_s = every_s, timeout_s

    async def run(self) -> NoReturn:
        answered = self._clock()
        while True:
            try:
                async with asyncio.timeout(self._timeout_s):
                    await self._engine.info()
                answered = self._clock()
            except Exception as error:
                silent = self._clock() - answered
                if silent >= self._gone_s:
                    bound = f"run.start_timeout_s {self._gone_s:g}"
                    raise StageFailed(self._name, f"no answer for {silent:.0f} s ({bound}): {root_cause(error)}") from error
            await asyncio.sleep(self._every_s)
