"""Training runs over HTTP: read from their folders, started and stopped as processes of their own.

Invariant: the run folder is the truth, and a run needs nothing of the service: it outlives it, and `rollout status` says the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field

from pipeline.buffer.lock import RunLock, is_held, signal_owner
from pipeline.buffer.offline import record_state
from pipeline.buffer.reader import read_live_status
from pipeline.buffer.schema import create_run
from pipeline.buffer.settings import BufferSettings
from pipeline.cli.checks import check_names
from pipeline.cli.runs import RUN_ID, create_run_folder, list_runs
from pipeline.config.base import Many, Request
from pipeline.config.loading import Loaded, read_config
from pipeline.errors import ConfigError, RequestRefused, RolloutError, UserError
from pipeline.evaluator.admission import prove
from pipeline.evaluator.machine import this_machine
from pipeline.observe.evaluations import Evaluation, conversations, student_evaluations, teacher_evaluations
from pipeline.observe.jsonlines import read_jsonlines
from pipeline.observe.timeline import in_flow_order, picture, read_timeline, timeline_path
from pipeline.paths import RunPaths, SharedPaths, below

ENDED = ("finished", "failed", "cancelled", "stopped")
INTERRUPTED = ("failed", "stopped")
"""What a service that is told to go on takes up: not what was cancelled."""
STARTING_S = 30.0
"""For a new process to take the run's lock."""
STOP_S = 60.0
MOST_ALIVE = 2
RETRY_AFTER_S = 30.0
POLL_S = 0.25
LAUNCHED = "launched"


class RunRequest(Request):
    """Body of `POST /v1/runs`."""

    config: str | dict[str, Any]
    """The configuration itself, or the name of a file beside the service's own configuration."""
    overrides: Many[str] = ()
    """`key.path=value`"""
    run_id: str | None = Field(None, pattern=f"^{RUN_ID.pattern}$")
    """None: generated."""


class Runs:
    """configs: the folder of named configurations. launch: starts `rollout ARGUMENTS` detached, its output into a file."""

    def __init__(
        self,
        runs: SharedPaths,
        configs: Path,
        launch: Callable[[list[str], Path], None],
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._runs, self._configs, self._launch, self._clock = runs, configs, launch, clock
        self._submitting = threading.Lock()

    def views(self) -> list[dict[str, Any]]:
        """The newest first."""
        return [self._view(paths) for paths in list_runs(self._runs.runs)]

    def view(self, run_id: str) -> dict[str, Any]:
        """Its status, its stages in the order of the flow, and what the evaluations of student and teachers found."""
        paths = self._find(run_id)
        view = self._view(paths)
        stages = view.get("stages") or {}
        return view | {
            "stages": {name: stages[name] for name in in_flow_order(stages)},
            "evaluations": [_found(item) for item in student_evaluations(paths.details)],
            "teachers": [_found(item) for item in teacher_evaluations(paths.details)],
        }

    def samples(self, run_id: str, evaluation: str) -> list[dict[str, Any]]:
        """The samples of one evaluation that the view lists, with their turns."""
        folder = self._find(run_id).details
        if evaluation not in {item.id for item in (*student_evaluations(folder), *teacher_evaluations(folder))}:
            raise RequestRefused(404, "not_found", f"run {run_id!r} has no evaluation {evaluation!r}")
        return conversations(folder, evaluation)

    def timeline(self, run_id: str) -> list[dict[str, Any]]:
        """What its groups and stages did over the seconds that it ran, a few hundred rows."""
        return picture(read_timeline(timeline_path(self._find(run_id))))

    def metrics(self, run_id: str) -> list[dict[str, Any]]:
        """A record a training step."""
        return read_jsonlines(self._find(run_id).metrics)

    async def events(self, run_id: str, after: int, wait_s: float) -> list[dict[str, Any]]:
        """`progress` of each training step (its id is the step), then `done`, or `error` of a run that failed or stopped."""
        paths = self._find(run_id)
        deadline = asyncio.get_running_loop().time() + wait_s
        while True:
            found = await asyncio.to_thread(self._events, paths, after)
            if found or asyncio.get_running_loop().time() >= deadline:
                return found
            await asyncio.sleep(POLL_S)

    def submit(self, request: RunRequest, key: str) -> dict[str, Any]:
        """Claim the run's folder, then start its process. The same key and body give the same run, also when they come at once."""
        with self._submitting:
            return self._submit(request, key)

    def _submit(self, request: RunRequest, key: str) -> dict[str, Any]:
        known = self._known(key, request)
        if known is not None:
            return self.view(known)
        alive = [view["id"] for view in self.views() if view["status"] in ("starting", "running")]
        if len(alive) >= MOST_ALIVE:
            raise RequestRefused(429, "too_many_runs", f"{alive} are running, the most at the same time", None, RETRY_AFTER_S)
        loaded = self._loaded(request)
        run_id = request.run_id or loaded.config.run.id
        if run_id is not None and (self._runs.runs / run_id).exists():
            message = f"run {run_id!r} exists already: choose another, or go on with it by POST /v1/runs/{run_id}/resume"
            raise RequestRefused(409, "run_exists", message, "run_id")
        paths = create_run_folder(self._runs.runs, loaded, request.run_id, datetime.fromtimestamp(self._clock()))
        create_run(paths, {"steps": loaded.config.trainer.steps, "started_at": self._clock()})
        self._remember(key, request, paths.run_id)
        self._start(paths)
        return self.view(paths.run_id)

    def resume(self, run_id: str) -> dict[str, Any]:
        paths = self._find(run_id)
        status = self._view(paths)["status"]
        if status not in ("stopped", "failed", "cancelled"):
            raise RequestRefused(409, "not_resumable", f"run {run_id} is {status}")
        self._start(paths)
        return self.view(run_id)

    def go_on(self, run_id: str | None) -> None:
        """Start that run again, or all runs one after the other. What still runs, or ended on purpose, is left alone."""
        if run_id is None:
            self._runs.service.root.mkdir(parents=True, exist_ok=True)
            self._launch(["resume", "--all", "--runs-dir", str(self._runs.runs)], self._runs.service.root / "resume.log")
            return
        paths = self._find(run_id)
        if self._view(paths)["status"] in INTERRUPTED:
            self._start(paths)

    async def cancel(self, run_id: str) -> dict[str, Any]:
        """End its process at once; a run that has ended by itself is only marked. Raises RequestRefused 409 on a finished one."""
        paths = self._find(run_id)
        status = (await asyncio.to_thread(self._view, paths))["status"]
        if status in ("finished", "cancelled"):
            raise RequestRefused(409, "already_finished", f"run {run_id} is {status} already")
        deadline = asyncio.get_running_loop().time() + STOP_S
        signals = 0
        while is_held(paths) or status == "starting":
            if asyncio.get_running_loop().time() >= deadline:
                raise RequestRefused(504, "deadline", f"run {run_id} did not end within {STOP_S:g} s")
            if signals < 2 and signal_owner(paths):  # the first asks for a checkpoint, the second ends it now
                signals += 1
            await asyncio.sleep(2 * POLL_S)
            status = (await asyncio.to_thread(self._view, paths))["status"]
        await self._mark_cancelled(paths)
        return await asyncio.to_thread(self.view, run_id)

    async def _mark_cancelled(self, paths: RunPaths) -> None:
        config = read_config(paths.config).config
        with RunLock(paths):
            await record_state(paths, BufferSettings.from_config(config), "cancelled", new_run_epoch=True)

    def _view(self, paths: RunPaths) -> dict[str, Any]:
        """`rollout status --json`, and `status`: the same, except that a process which was just started counts."""
        base = {"id": paths.run_id, "object": "run"}
        try:
            found = read_live_status(paths)
        except RolloutError as error:
            return base | {"status": "failed", "state": "unreadable", "error": str(error)}
        status = self._status(paths, found["state"])
        if status == "starting":
            found |= {"state": status, "error": None}  # what the ledger says is of the process before
        return base | {"status": status} | found

    def _status(self, paths: RunPaths, state: str) -> str:
        if state == "running" or not (is_held(paths) or self._just_launched(paths)):
            return state
        return "starting"

    def _just_launched(self, paths: RunPaths) -> bool:
        """Launched, and the lock was not taken since."""
        marker = paths.log / LAUNCHED
        if not marker.exists() or self._clock() - marker.stat().st_mtime > STARTING_S:
            return False
        return not paths.lock.exists() or paths.lock.stat().st_mtime < marker.stat().st_mtime

    def _events(self, paths: RunPaths, after: int) -> list[dict[str, Any]]:
        view = self._view(paths)  # before the steps: an ended run's steps are all there
        lines = [line for line in read_jsonlines(paths.metrics) if line["step"] > after]
        found = [{"id": line["step"], "event": "progress", "data": line} for line in lines]
        last = max((view.get("steps") or 0) + 1, (found[-1]["id"] if found else 0) + 1)
        if view["status"] in ENDED and after < last:
            event = "done" if view["status"] in ("finished", "cancelled") else "error"
            found.append({"id": last, "event": event, "data": view})
        return found

    def _find(self, run_id: str) -> RunPaths:
        paths = RunPaths(self._runs.runs / run_id)
        if not RUN_ID.fullmatch(run_id) or not paths.config.is_file():
            raise RequestRefused(404, "not_found", f"there is no run {run_id!r}")
        return paths

    def _loaded(self, request: RunRequest) -> Loaded:
        """One that can run. Raises RequestRefused with the key whose doing it is that it cannot."""
        try:
            loaded = self._load(request)
            prove(loaded.config, this_machine(loaded.config.run.ray))
            check_names(loaded.config)
        except RequestRefused:
            raise
        except UserError as error:
            raise RequestRefused(400, "invalid_config", str(error), self._at_fault(request)) from error
        return loaded

    def _at_fault(self, request: RunRequest) -> str:
        """`overrides`, when the configuration is good without them."""
        if request.overrides:
            with contextlib.suppress(UserError):
                self._loaded(request.model_copy(update={"overrides": ()}))
                return "overrides"
        return "config"

    def _load(self, request: RunRequest) -> Loaded:
        if isinstance(request.config, str):
            path = below(self._configs, request.config)
            if path is None or not path.is_file():
                known = sorted(file.name for file in self._configs.glob("*.yaml"))
                message = f"there is no configuration {request.config!r}; known are {known}"
                raise RequestRefused(404, "unknown_config", message, "config")
            return _read(path, request.overrides)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.yaml"
            path.write_text(yaml.safe_dump(request.config))
            return _read(path, request.overrides)

    def _start(self, paths: RunPaths) -> None:
        paths.log.mkdir(parents=True, exist_ok=True)
        (paths.log / LAUNCHED).touch()
        self._launch(["resume", paths.run_id, "--runs-dir", str(self._runs.runs)], paths.log / "driver.log")

    def _known(self, key: str, request: RunRequest) -> str | None:
        file = self._key_file(key)
        if not file.is_file():
            return None
        record = json.loads(file.read_text())
        if record["digest"] != request.digest():
            message = f"Idempotency-Key {key!r} was used for {record['run_id']} with another body"
            raise RequestRefused(409, "idempotency_key_reused", message, "Idempotency-Key")
        return record["run_id"]

    def _remember(self, key: str, request: RunRequest, run_id: str) -> None:
        file = self._key_file(key)
        file.parent.mkdir(parents=True, exist_ok=True)
        aside = file.with_suffix(".new")
        aside.write_text(json.dumps({"digest": request.digest(), "run_id": run_id}))
        aside.replace(file)

    def _key_file(self, key: str) -> Path:
        return self._runs.service.root / "keys" / f"{hashlib.sha256(key.encode()).hexdigest()}.json"


def _read(path: Path, overrides: Sequence[str]) -> Loaded:
    """Where the file is, is nothing to whoever sent it, or said its name."""
    try:
        return read_config(path, overrides)
    except UserError as error:
        raise ConfigError(str(error).replace(f"{path}: ", "")) from error


def _found(item: Evaluation) -> dict[str, Any]:
    return {
        "id": item.id,
        "step": item.step,
        "alias": item.alias,
        "accuracy": item.overall.accuracy,
        "by_dataset": {name: score.accuracy for name, score in item.datasets.items()},
        "scored": item.overall.scored,
        "total": item.overall.total,
        "valid": item.valid,
        "why_invalid": item.why_invalid,
        "failure_classes": item.failure_classes,
    }
