"""Drives the DAG window by window. The ledger is the truth; a workflow only drives it.

Invariant: a window that the workflow storage still holds whole is resumed under its id, so completed nodes do not run again;
otherwise a new workflow id starts from the first step that the ledger has not closed.
"""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import ray
from ray import workflow
from ray.workflow.exceptions import WorkflowError

from deployments.threads import in_thread
from pipeline.buffer.api import NO_RESULTS
from pipeline.config.schema import RunConfig
from pipeline.errors import RolloutError, StageFailed, cause_chain, root_cause
from pipeline.paths import RunPaths
from workflows import dag

log = logging.getLogger(__name__)

POLL_S = 1.0
MANAGER_GONE = (ray.exceptions.RayError, ValueError)
"""A call of Ray Workflow whose manager dies: ValueError when it is gone as the call looks for it, else an error of Ray."""


class Ledger(Protocol):
    """What a window asks of the replay buffer."""

    async def steps(self, after: int = 0) -> dict[str, Any]: ...
    async def set_run(self, state: str, error: str | None = None, **facts: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Window:
    number: int
    """1, 2, ...: counts workflow ids of the run."""
    first: int
    last: int

    def workflow_id(self, run_id: str) -> str:
        return f"{run_id}.r{self.number}"


async def run_windows(config: RunConfig, paths: RunPaths, buffer: Ledger, facts: dict[str, Any], storage: Path) -> None:
    """Run every step that is left. Raises StageFailed with the failing stage's own traceback. storage: of Ray Workflow."""
    number = int(facts.get("workflow_number", 0))
    interrupted, lost_at = _interrupted(facts), None
    recorded, ended = await newest_window(config, buffer), None
    while True:
        done, ended = recorded["trained_step"], end_of_data(recorded["results"]) if ended is None else ended
        last_needed = config.trainer.steps if ended is None else min(ended, config.trainer.steps)
        if done >= last_needed and not _evaluation_missing(config, paths, done):
            return
        if interrupted is not None and interrupted.last >= done and await _resumed(interrupted, paths.run_id, storage):
            window = interrupted
        else:
            number += 1
            window = Window(number, recorded["first_open"], max(done, min(done + config.run.window_steps, config.trainer.steps)))
            await buffer.set_run(
                "running",
                workflow_id=window.workflow_id(paths.run_id),
                workflow_number=number,
                window=[window.number, window.first, window.last],
            )
            try:
                await _run(window, config, paths.run_id, storage, _evaluation_missing(config, paths, window.first - 1))
            except _NoStageFailed as error:
                if lost_at == done:
                    raise
                log.warning("%s; it is resumed", error)  # as a rule its manager was killed, and Ray makes another
                lost_at, interrupted = done, window
                recorded = await buffer.steps(done)
                continue
        interrupted = None
        await _forget(window.workflow_id(paths.run_id))
        recorded = await buffer.steps(done)


async def newest_window(config: RunConfig, buffer: Ledger) -> dict[str, Any]:
    """Where the run stands, with the results of the steps that may have found the end of the data: none comes a window after it."""
    trained = (await buffer.steps(NO_RESULTS))["trained_step"]
    return await buffer.steps(max(0, trained - config.run.window_steps))


def end_of_data(results: dict[int, dict[str, Any]]) -> int | None:
    """The first step that found no data any more."""
    ended = [int(step) for step, metrics in results.items() if metrics.get("end_of_data")]
    return min(ended, default=None)


def _evaluation_missing(config: RunConfig, paths: RunPaths, step: int) -> bool:
    return config.evaluation_due(step) and not paths.evaluation(step).exists()


def _interrupted(facts: dict[str, Any]) -> Window | None:
    window = facts.get("window")
    return Window(*window) if window else None


def cancel_windows(run_id: str) -> None:
    """On a cluster that outlives the run: no node of it is started any more. Without their manager none is."""
    try:
        for identity, _ in workflow.list_all(workflow.RUNNING):
            if identity.startswith(f"{run_id}.r"):
                workflow.cancel(identity)
    except MANAGER_GONE as error:
        log.warning("the workflows of %s cannot be cancelled", run_id, exc_info=error)


async def _run(window: Window, config: RunConfig, run_id: str, storage: Path, evaluate_before: bool) -> None:
    graph = dag.window(config, run_id, window.first, window.last, evaluate_before)
    identity = window.workflow_id(run_id)
    started = time.time()
    try:
        reference = await in_thread(workflow.run_async, graph, workflow_id=identity)
    except MANAGER_GONE as error:
        raise _NoStageFailed(f"workflow {identity} was not begun: {_last_line(error)}") from error
    await _ended(reference, storage, identity, started)


async def _forget(identity: str) -> None:
    """Of an ended window nothing is needed; what cannot be removed now is no reason to stop."""
    try:
        await in_thread(workflow.delete, identity)
    except MANAGER_GONE as error:
        log.warning("workflow %s is left in its storage", identity, exc_info=error)


async def _resumed(window: Window, run_id: str, storage: Path) -> bool:
    """True when the window was resumed and ended. False: its storage is missing, torn or disagrees; the ledger leads."""
    identity = window.workflow_id(run_id)
    started = time.time()
    try:
        reference = await in_thread(workflow.resume_async, identity)
        await _ended(reference, storage, identity, started)
    except (_NoStageFailed, *MANAGER_GONE, WorkflowError, OSError) as error:
        log.warning("workflow %s cannot be resumed; a new one starts from the ledger", identity, exc_info=error)
        return False
    return True


class _NoStageFailed(RolloutError):
    """The workflow ended badly and no stage says why: its storage is to blame."""


async def _ended(reference: ray.ObjectRef, storage: Path, identity: str, started: float) -> None:
    """Waits in other threads: the output of a workflow that had ended before refers to more, and Ray, which fetches that while it
    reads the output, would wait for ever in the thread that completes futures."""
    try:
        while not (await in_thread(ray.wait, [reference], timeout=POLL_S))[0]:
            pass
        await in_thread(ray.get, reference)
    except ray.exceptions.RayError as error:
        failure = await in_thread(_node_failure, storage, identity, started)
        if failure is None:
            raise _NoStageFailed(f"workflow {identity}: {_last_line(error)}") from error
        raise failure from failure.__cause__


def _last_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[-1]


def _node_failure(storage: Path, identity: str, started: float) -> RolloutError | None:
    """The first node's own exception. Ray Workflow keeps it beside the node's result and raises an error without a cause."""
    files = (storage / "workflows" / identity / "tasks").glob("*/exception.pkl")
    fresh = sorted((file for file in files if file.stat().st_mtime >= started), key=lambda file: file.stat().st_mtime)
    for file in fresh:
        error = ray.cloudpickle.loads(file.read_bytes())
        found = [link for link in cause_chain(error) if isinstance(link, RolloutError)]
        if found:
            return found[0]
        return StageFailed(file.parent.name, root_cause(error))
    return None
