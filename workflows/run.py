"""The driver of a run: owns the lock, the cluster and the supervision, from the first process to the last line.

Invariant: whatever happens, the run folder says how the run ended, and no process of it is left.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NoReturn

import ray

from deployments import cluster
from deployments.calls import CALL_S, RemoteEngine, RemoteStage
from deployments.cluster import PrivateCluster
from deployments.joined import JoinedCluster
from deployments.launch import Launch
from deployments.names import ENGINE_DEPLOYMENT, student_app
from pipeline.buffer.api import StageReport
from pipeline.buffer.lock import RunLock
from pipeline.buffer.offline import record_state
from pipeline.buffer.reader import read_facts
from pipeline.buffer.settings import BufferSettings
from pipeline.config.schema import RunConfig
from pipeline.errors import Locked, StageFailed
from pipeline.evaluator.admission import prove
from pipeline.observe.observer import Observer
from pipeline.paths import RunPaths
from pipeline.pumps import Pump, PumpKind, supervise
from pipeline.sandboxes.leases import default_root, reap
from pipeline.watchdog import EngineProbe, StallWatchdog
from workflows.monitors import ClusterWatch, NodeCounter, RestartWatch
from workflows.screen import own_lines_only
from workflows.storage import storage_uri
from workflows.windows import cancel_windows, end_of_data, newest_window, run_windows

log = logging.getLogger(__name__)

FINISHED, STOPPED = 0, 3
"""Exit codes; a failure is an exception."""
LEFTOVER_S = 10.0
POLL_S = 1.0
SAVE_S = 60.0
INTERRUPTED = "interrupted; `rollout resume` goes on"


class Interrupted(StageFailed):
    """SIGINT or SIGTERM: not a failure, and the run can be resumed."""


@dataclass(slots=True)
class Outcome:
    exit_code: int
    summary: dict[str, Any]
    reason: str | None = None
    """Why it ended before its last step."""


@dataclass(slots=True)
class Driver:
    paths: RunPaths
    config: RunConfig
    lock: RunLock
    """Held by the caller."""
    started_at: float
    """Seconds since the epoch, when the command was given."""
    _signals: int = field(default=0, init=False)
    _cluster: Any = field(default=None, init=False)
    _interrupted: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    def run(self) -> Outcome:
        """Run what is left of a run whose ledger exists. Raises the failing stage's own error; the run folder has it too."""
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # until `_pipeline` takes the signals over
        with own_lines_only(self.paths):
            return self._run()

    def _run(self) -> Outcome:
        end_leftovers(self.lock)
        facts = read_facts(self.paths)
        self._record("starting", take_over=True, steps=self.config.trainer.steps)
        try:
            outcome = self._with_cluster(facts)
        except Interrupted as stop:
            return self._stopped(str(stop))
        except (KeyboardInterrupt, SystemExit):  # a signal while Ray starts or ends; its own handler of SIGTERM raises SystemExit
            return self._stopped(INTERRUPTED)
        except BaseException as error:
            self._record("failed", f"{type(error).__name__}: {error}")
            raise
        self._record("finished", outcome.reason)
        return outcome

    def _stopped(self, reason: str) -> Outcome:
        self._record("stopped", reason)
        return Outcome(STOPPED, {}, reason)

    def _with_cluster(self, facts: dict[str, Any]) -> Outcome:
        self._cluster = self._choose_cluster()
        try:
            log.info("starting Ray, the stages and the engines")
            self._cluster.start()
            self._note_processes()
            proof = prove(self.config, self._cluster.machine())
            return asyncio.run(self._pipeline(proof.pool, self._cluster.storage(), facts))
        finally:
            if self.config.run.ray.address is not None and ray.is_initialized():
                cancel_windows(self.paths.run_id)
            self._cluster.stop()
            reap(default_root())

    def _choose_cluster(self) -> PrivateCluster | JoinedCluster:
        settings = self.config.run.ray
        if settings.address is None:
            return PrivateCluster(self.paths, settings, storage_uri(self.paths.workflow))
        return JoinedCluster(self.paths, settings)

    async def _pipeline(self, nodes: tuple, storage: Path, facts: dict[str, Any]) -> Outcome:
        loop = asyncio.get_running_loop()
        for sign in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(sign, self._on_signal, sign)
        buffer = RemoteStage(self.paths.run_id, "replay_buffer")
        observer = Observer(self.paths, buffer, self.config, started_at=self.started_at)
        launch = Launch(self.paths, self.config, nodes)
        ray_alive = ClusterWatch(self._cluster.services()).run
        try:
            await supervise(
                [
                    Pump("start", PumpKind.TERMINAL, launch.start),
                    Pump("signals", PumpKind.MONITOR, self._watch_signals),
                    Pump("cluster", PumpKind.MONITOR, ray_alive),
                ]
            )
            await buffer.set_run("running")
            watch = Pump("cluster", PumpKind.MONITOR, ray_alive)
            await supervise([watch, *self._pumps(buffer, observer, launch, facts, storage)])
            return await self._finished(buffer, observer)
        except Interrupted as stop:
            await self._stop_gracefully()
            await self._last_look(observer, "stopped", stop)
            raise
        except Exception as error:
            await self._last_look(observer, "failed", error)
            raise

    async def _last_look(self, observer: Observer, state: str, error: Exception) -> None:
        """Summary and report of a run that did not finish; a fault here must not hide why it did not."""
        try:
            await observer.final(state, str(error))
        except Exception:
            log.exception("the summary of the %s run could not be written", state)

    def _pumps(self, buffer: RemoteStage, observer: Observer, launch: Launch, facts: dict[str, Any], storage: Path) -> list[Pump]:
        async def reports() -> list[StageReport]:
            return stage_reports(await buffer.status())

        watchdog = StallWatchdog(reports, self.config.observe.stall_s, time.monotonic)
        restarts = RestartWatch(buffer.status, self.config.run.max_actor_restarts)
        nodes = NodeCounter(self.paths.nodes)
        return [
            Pump("signals", PumpKind.MONITOR, self._watch_signals),
            Pump("restarts", PumpKind.MONITOR, restarts.run),
            Pump("watchdog", PumpKind.MONITOR, watchdog.run),
            Pump("engine", PumpKind.MONITOR, self._student_probe().run),
            Pump("observer", PumpKind.MONITOR, observer.run),
            Pump("bookkeeping", PumpKind.MONITOR, lambda: self._keep_books(buffer, nodes)),
            Pump("teachers", PumpKind.PRODUCER, lambda: self._evaluate_teachers(launch)),
            Pump("workflow", PumpKind.TERMINAL, lambda: run_windows(self.config, self.paths, buffer, facts, storage)),
        ]

    def _student_probe(self) -> EngineProbe:
        """Serve replaces a dead replica; one that never comes up again would only be seen as rollouts that fail."""
        engine = RemoteEngine(student_app(self.paths.run_id), ENGINE_DEPLOYMENT, CALL_S)
        return EngineProbe("student", engine, self.config.run.start_timeout_s, time.monotonic)

    async def _evaluate_teachers(self, launch: Launch) -> None:
        """Once the teachers are there: what they can do on the held-out tasks, for the summary."""
        await launch.teachers_ready()
        if self.config.eval.teacher:
            pool = RemoteStage(self.paths.run_id, "evaluator_pool", deadline_s=self.config.run.start_timeout_s)
            for alias in self.config.teachers:
                await pool.evaluate_teacher(alias)

    async def _keep_books(self, buffer: RemoteStage, nodes: NodeCounter) -> NoReturn:
        while True:
            self._note_processes()
            await buffer.set_run("running", **nodes.counts())
            await asyncio.sleep(POLL_S)

    def _note_processes(self) -> None:
        """So that a resume can end what a crash leaves behind."""
        self.lock.record([process.pid for process in self._cluster.processes()])

    async def _finished(self, buffer: RemoteStage, observer: Observer) -> Outcome:
        ended = end_of_data((await newest_window(self.config, buffer))["results"])
        reason = None if ended is None else f"the data ended before step {ended} of {self.config.trainer.steps}"
        await buffer.set_run("finished", reason, **NodeCounter(self.paths.nodes).counts())
        return Outcome(FINISHED, await observer.final(), reason)

    def _on_signal(self, sign: signal.Signals) -> None:
        self._signals += 1
        self._interrupted.set()
        log.warning("%s: %s", sign.name, "stopping" if self._signals == 1 else "stopping now")

    async def _watch_signals(self) -> NoReturn:
        await self._interrupted.wait()
        raise Interrupted("driver", INTERRUPTED)

    async def _stop_gracefully(self) -> None:
        """Start nothing new, let what runs end within the grace, save. A second signal cuts it short."""
        try:
            second = asyncio.ensure_future(self._second_signal())
            saving = asyncio.ensure_future(self._wind_down())
            await asyncio.wait({second, saving}, return_when=asyncio.FIRST_COMPLETED)
            for task in (second, saving):
                task.cancel()
            await asyncio.gather(second, saving, return_exceptions=True)
        except Exception as error:
            log.warning("stopped without a checkpoint: %s", error)

    async def _wind_down(self) -> None:
        grace_s = self.config.run.stop_grace_s
        await RemoteStage(self.paths.run_id, "evaluator_pool", grace_s + POLL_S * 10).stop(grace_s)
        await RemoteStage(self.paths.run_id, "trainer", SAVE_S).stop()

    async def _second_signal(self) -> None:
        while self._signals < 2:
            await asyncio.sleep(POLL_S / 10)

    def _record(self, state: str, error: str | None = None, *, take_over: bool = False, **facts: Any) -> None:
        """Write the run's state while no buffer actor lives. take_over: a new run epoch, so that older writers are refused."""
        settings = BufferSettings.from_config(self.config)
        asyncio.run(record_state(self.paths, settings, state, error, new_run_epoch=take_over, **facts))


def end_leftovers(lock: RunLock) -> None:
    """End what a crash left of the run's old cluster. Raises Locked, by pid, when something will not go."""
    left = cluster.end(lock.leftovers(), LEFTOVER_S / 2)
    if left:
        pids = ", ".join(str(process.pid) for process in left)
        raise Locked(f"processes of the run's last cluster do not end: {pids}; end them by hand")


def stage_reports(status: dict[str, Any]) -> list[StageReport]:
    """The stages of `status()` as reports again."""
    known = {field.name for field in fields(StageReport)} - {"stage", "started", "finished"}
    reports = []
    for name, stage in status["stages"].items():
        facts = {key: value for key, value in stage.items() if key in known}
        reports.append(StageReport(stage=name, started=stage["in"], finished=stage["out"], **facts))
    return reports
