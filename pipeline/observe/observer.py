"""Watches a run from the driver: reads the ledger about once a second, and writes and draws what a person wants to see.

Invariant: it only reads the run's state. Metrics that cannot be written, or a ledger that cannot be read for `observe.stall_s`
seconds, fail the run; anything else that fails here is counted and logged to log/observer.log, and the run goes on.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Protocol, TextIO

from pipeline.buffer.reader import read_status, read_steps
from pipeline.config.schema import RunConfig
from pipeline.errors import StageFailed, root_cause
from pipeline.observe.bars import display
from pipeline.observe.evaluations import Evaluation, student_evaluations
from pipeline.observe.metrics import MetricsWriter
from pipeline.observe.series import figure
from pipeline.observe.summary import build_summary, write_summary
from pipeline.observe.timeline import TimelineWriter, timeline_path
from pipeline.observe.trackers import Tracker, open_tracker
from pipeline.paths import RunPaths

INTERVAL_S = 1.0
CALL_S = 10.0
EVALUATIONS_EVERY_S = 5.0
REPORT_S = 120.0
LOGGED_ERRORS = 20
"""Errors of one part that are written to the log with their traceback; the others are only counted."""


class Readable(Protocol):
    """The two calls of buffer.api.BufferClient that the observer makes."""

    async def status(self) -> dict[str, Any]: ...
    async def steps(self, after: int = 0) -> dict[str, Any]: ...


class Observer:
    def __init__(
        self,
        paths: RunPaths,
        buffer: Readable,
        config: RunConfig,
        clock: Callable[[], float] = time.time,
        *,
        started_at: float | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """clock, started_at: seconds since the epoch; started_at: when the command was given (now). stream: for bars (stderr)."""
        self._paths = paths
        self._buffer = buffer
        self._stall_s = config.observe.stall_s
        self._clock = clock
        paths.log.mkdir(parents=True, exist_ok=True)
        self._log = logging.Logger("observer")
        self._log.addHandler(logging.FileHandler(paths.log / "observer.log", delay=True))
        self._metrics = MetricsWriter(paths.metrics)
        self._timeline = TimelineWriter(timeline_path(paths), clock() if started_at is None else started_at)
        self._display = display(stream or sys.stderr, config.rollout.tasks_per_step) if config.observe.bars else None
        self._status: dict[str, Any] = {}
        self._read_step = 0
        self._newest: dict[str, Any] = {}
        """The result of `_read_step`."""
        self._evaluations: list[Evaluation] = []
        self._evaluated_at = float("-inf")
        self._read_at = clock()
        self.errors: Counter[str] = Counter()
        """Errors that did not end the run, by what failed."""
        self._trackers: dict[str, Tracker] = {}
        """Those that could be opened."""
        for name in config.observe.trackers:
            self._guard(name, lambda name=name: self._trackers.update({name: open_tracker(name, paths, config)}))
        self._untold: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in self._trackers}
        """Results that a tracker has not been told."""
        if not self._trackers:  # they know themselves what they have; without any, what is in the file is not read again
            self._read_step = self._metrics.step

    async def run(self) -> None:
        """Never returns. Raises StageFailed; see the module's invariant."""
        while True:
            await self._observe()
            await asyncio.sleep(INTERVAL_S)

    async def final(self, state: str | None = None, error: str | None = None) -> dict[str, Any]:
        """Write everything one last time, summary.json and report.html too, from the files when the buffer is gone.

        state, error: how the run ended, where the ledger does not say it yet; the buffer is not asked then. Returns the summary.
        Raises StageFailed when metrics or summary cannot be written.
        """
        try:
            asks = state is None
            self._status = await self._last(self._buffer.status if asks else None, read_status, self._status)
            if state is not None:
                self._status = {**self._status, "state": state, "error": error}
            self._sync(await self._last(self._new_results if asks else None, self._read_new_results, {}))
            self._evaluated_at = float("-inf")
            self._draw(self._status, last=True)
            summary = {**build_summary(self._paths, self._status), "observer_errors": dict(self.errors)}
            self._must(lambda: write_summary(self._paths, summary), "summary.json")
            await self._write_report()
            return summary
        finally:
            self._close()

    async def _observe(self) -> None:
        try:
            self._status = await asyncio.wait_for(self._buffer.status(), CALL_S)
            trained = self._status.get("step") != self._read_step
            results = await asyncio.wait_for(self._new_results(), CALL_S) if trained else {}
        except Exception as error:
            self._unreadable(error)
            return
        self._read_at = self._clock()
        self._sync(results)
        self._draw(self._status)

    def _unreadable(self, error: Exception) -> None:
        self._count("ledger", error)
        silent = self._clock() - self._read_at
        if silent > self._stall_s:
            bound = f"observe.stall_s {self._stall_s:.0f}"
            raise StageFailed("observe", f"no status for {silent:.0f} s ({bound}): {root_cause(error)}") from error

    async def _last(
        self, ask: Callable[[], Any] | None, read: Callable[[RunPaths], dict[Any, Any]], known: dict[Any, Any]
    ) -> dict[Any, Any]:
        """From the buffer, else from the run folder, else what was seen last."""
        if ask is not None:
            try:
                return await asyncio.wait_for(ask(), CALL_S)
            except Exception as error:
                self._count("ledger", error)
        try:
            return read(self._paths)
        except Exception as error:
            self._count("ledger", error)
        return known

    async def _new_results(self) -> dict[int, dict[str, Any]]:
        return (await self._buffer.steps(self._read_step))["results"]

    def _read_new_results(self, paths: RunPaths) -> dict[int, dict[str, Any]]:
        return read_steps(paths, self._read_step)

    def _sync(self, results: dict[int, dict[str, Any]]) -> None:
        self._must(lambda: self._metrics.sync(results), "metrics.jsonl")
        if results:
            self._read_step = max(results)
            self._newest = results[self._read_step]
        for untold in self._untold.values():
            untold |= results

    def _draw(self, status: dict[str, Any], last: bool = False) -> None:
        now = self._clock()
        self._guard("timeline", lambda: self._timeline.append(status, now, force=last))
        if now - self._evaluated_at >= EVALUATIONS_EVERY_S:
            self._evaluated_at = now
            self._guard("evaluations", self._read_evaluations)
        for name, tracker in self._trackers.items():
            self._guard(name, lambda name=name, tracker=tracker: self._track(name, tracker, now))
        if self._display is not None:
            self._guard("bars", lambda: self._display.update(status, self._figures(), now))

    def _read_evaluations(self) -> None:
        self._evaluations = student_evaluations(self._paths.details)

    def _track(self, name: str, tracker: Tracker, now: float) -> None:
        written = [tracker.add("train", step, result, now) for step, result in sorted(self._untold[name].items())]
        for item in self._evaluations:
            accuracies = {f"{name}/accuracy": score.accuracy for name, score in item.datasets.items()}
            written.append(tracker.add("eval", item.step or 0, {"accuracy": item.overall.accuracy, **accuracies}, now))
        if any(written):
            tracker.flush()
        self._untold[name] = {}

    def _figures(self) -> dict[str, float | None]:
        """What stands beside the step bar."""
        accuracy = self._evaluations[-1].overall.accuracy if self._evaluations else None
        return {"accuracy": accuracy, "loss": figure(self._newest, "loss"), "reward": figure(self._newest, "reward_mean")}

    async def _write_report(self) -> None:
        from pipeline.observe.report import write_report  # matplotlib: only at the end

        try:
            await asyncio.wait_for(asyncio.to_thread(write_report, self._paths, self._status), REPORT_S)
        except Exception as error:
            self._count("report", error)

    def _guard(self, part: str, draw: Callable[[], Any]) -> None:
        try:
            draw()
        except Exception as error:
            self._count(part, error)

    def _must(self, write: Callable[[], Any], name: str) -> None:
        try:
            write()
        except OSError as error:
            raise StageFailed("observe", f"{name} cannot be written: {root_cause(error)}") from error

    def _count(self, part: str, error: Exception) -> None:
        self.errors[part] += 1
        if self.errors[part] <= LOGGED_ERRORS:
            self._log.error("%.1f %s failed (%d)", self._clock(), part, self.errors[part], exc_info=error)

    def _close(self) -> None:
        if self._display is not None:
            self._guard("bars", self._display.close)
        for name, tracker in self._trackers.items():
            self._guard(name, tracker.close)
        for handler in self._log.handlers:
            handler.close()
