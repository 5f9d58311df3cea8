"""The trainer: each training step happens exactly once, whatever dies in between.

Order of a step, and why a crash after each part is harmless:
1. select: recorded for ever before anything is computed; asking again gives the same groups.
2. update, in memory. An exception after the first parameter write ends the process, since parameters may be half-written; the
   next process replays from the newest checkpoint.
3. record_step: from here on the step counts; a new process replays it from the stored rows before it does anything else.
4. checkpoint when due, and only when it is complete mark_trained: a lost mark is repeated at start.
5. publish: last, so that a version that engines can see is always one that the ledger knows.
Parts 3 to 5 can be repeated; when one fails, the next call of `train` begins with them again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.buffer.api import NO_RESULTS, BufferClient, Selection, StageReport
from pipeline.config.schema import RunConfig
from pipeline.engines.weights import WeightStore
from pipeline.errors import BreakerTripped, FencedOut, StageFailed
from pipeline.paths import RunPaths, evaluation_id
from pipeline.records import Group
from pipeline.trainer import checkpoints
from pipeline.trainer.checkpoints import Checkpoint
from pipeline.trainer.learner import Learner, groups_of
from pipeline.trainer.worker import Worker

MAX_SKIPPED = 3
"""Skipped steps in a row that fail the run."""
CALL_S = 60.0
"""Deadline of one call of the buffer."""
WAIT_S = 1.0
"""One wait for the groups of a step, which `stop` sits out. The stall watchdog, and not this stage, says when it waits too long."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Updated:
    """A step whose update is in memory and whose parts 3 to 5 are not all done."""

    step: int
    result: dict[str, Any]


def end_process() -> None:
    os._exit(70)


class TrainerService:
    """student: folder of weight version 0. clock: seconds, monotonic. fence: raises FencedOut when a newer run epoch has begun;
    then the process ends before anything of it is seen. epoch: the run epoch, which checkpoints carry. die: ends the process.
    learner: made from the newest complete checkpoint, or from None.
    complete: puts what is missing into the groups of a step once they are selected (`teacher_stage.mode: score_at_select`)."""

    def __init__(
        self,
        config: RunConfig,
        paths: RunPaths,
        student: Path,
        buffer: BufferClient,
        weights: WeightStore,
        *,
        clock: Callable[[], float] = time.monotonic,
        fence: Callable[[], None] = lambda: None,
        epoch: int = 0,
        die: Callable[[], None] = end_process,
        device: str = "cpu",
        complete: Callable[[list[Group]], Awaitable[None]] | None = None,
        learner: Callable[[Checkpoint | None], Learner] | None = None,
        worker: Worker | None = None,
    ) -> None:
        self._config, self._paths = config, paths
        self._buffer, self._weights = buffer, weights
        self._clock, self._fence, self._epoch, self._die = clock, fence, epoch, die
        self._complete = complete
        self._make_learner = learner or (lambda found: Learner(config, paths, student, found, device))
        self._worker = worker or Worker(clock)
        self._lock = asyncio.Lock()
        self._learner: Learner | None = None
        self._running: dict[int, asyncio.Task[dict[str, Any]]] = {}
        self._version = 0
        self._saved_step = 0
        self._covers: dict[int, list[int]] = {}
        self._updated: _Updated | None = None
        self._newest: dict[str, Any] | None = None
        self._skipped_in_row = 0
        self._failure: BaseException | None = None
        self._started = self._stopped = False
        self._waiting_for: str | None = None
        self._asked = 0
        self._finished = 0

    @property
    def version(self) -> int:
        """The weight version in memory."""
        return self._version

    async def start(self) -> None:
        """Load the newest complete checkpoint (or the student), replay what was recorded after it, publish. Repeatable."""
        async with self._lock:
            if self._started:
                return
            if self._learner is None:
                await self._restore()
            await self._publish_unless_there()
            self._started = True

    async def train(self, step: int) -> dict[str, Any]:
        """The result of training step `step` (1-based): recorded, or made now. Callers of the same step share one run of it;
        a caller that goes away does not stop it.

        After the end of the data `end_of_data` is true: the version is counted, its weights are those of the last.
        Waits for the step's groups as long as they take. Raises BreakerTripped after three skipped steps in a row.
        """
        task = self._running.get(step)
        if task is None:
            task = asyncio.create_task(self._train(step), name=f"train[{step}]")
            self._running[step] = task
            task.add_done_callback(lambda done: self._forget(step, done))
        return await asyncio.shield(task)

    async def stop(self) -> int:
        """Train nothing more, not even what waits for its groups, and save: a step after this checkpoint would not be in it."""
        self._stopped = True
        return await self.save()

    async def save(self) -> int:
        """Checkpoint what is in memory, for a graceful stop; waits for a running update. Returns the newest checkpoint's step."""
        await self.start()
        async with self._lock:
            self._refuse_when_failed()
            await self._settle()
            await self._checkpoint()
            return self._saved_step

    async def close(self) -> None:
        """End the running step at its next await, and the thread. Saves nothing, and nothing can be asked afterwards."""
        self._failure = self._failure or StageFailed("trainer", "was closed")
        tasks = list(self._running.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._worker.close()

    def report(self) -> StageReport:
        return StageReport(
            stage="trainer",
            actor="trainer",
            pid=os.getpid(),
            node=os.uname().nodename,
            started=self._asked,
            finished=self._finished,
            backlog=len(self._running),
            oldest_s=self._worker.running_s(),
            busy_s=self._worker.busy_s(),
            detail={
                "weight_version": self._version,
                "checkpoint_step": self._saved_step,
                "seconds": dict(self._worker.seconds),
                "waiting_for": self._waiting_for,
            },
        )

    # -- one step ---------------------------------------------------------------------------------------------------

    async def _train(self, step: int) -> dict[str, Any]:
        await self.start()
        async with self._lock:
            self._refuse_when_failed()
            await self._settle()
            result = None
            while self._version < step:
                result = await self._advance(self._version + 1)
            return result or await self._recorded(step)

    async def _advance(self, step: int) -> dict[str, Any]:
        """Make the next version."""
        selection = await self._wait_selection(step)
        self._refuse_when_stopped()
        self._asked += 1
        result = await self._update(step, selection)
        self._updated = _Updated(step, result)
        await self._settle()
        self._finished += 1
        self._count_skipped(result)
        return result

    async def _update(self, step: int, selection: Selection, lr: float | None = None) -> dict[str, Any]:
        """Parts 1 and 2, in memory; also how a recorded step is replayed, with the learning rate that it was recorded with."""
        read_at = self._clock()
        groups = groups_of(selection, await self._ask(self._buffer.read(list(selection.ordinals), True)))
        if self._complete is not None:
            await self._complete(groups)
        begun = self._clock()
        result = await self._worker.run("update", self._learn, step, selection, groups, lr)
        self._version = step
        self._covers[step] = list(selection.ordinals)
        return result | {"read_s": begun - read_at, "update_s": self._clock() - begun}

    def _learn(self, step: int, selection: Selection, groups: list, lr: float | None) -> dict[str, Any]:
        learner = self._learner
        assert learner is not None
        try:
            return learner.learn(step, selection, groups, lr)
        except BaseException as error:
            if learner.updater.writing:
                self._failure = error
                _log.critical("step %d failed after its first parameter write: the process ends", step, exc_info=error)
                self._die()
            raise

    async def _settle(self) -> None:
        """Parts 3 to 5 of the newest step, as far as they are not done."""
        if self._updated is None:
            return
        step, result = self._updated.step, self._updated.result
        await self._ask(self._buffer.record_step(step, result))
        self._newest = result
        if self._due(step, result):
            await self._checkpoint()
        await self._publish()
        self._updated = None

    def _due(self, step: int, result: dict[str, Any]) -> bool:
        if result["end_of_data"]:
            return any(self._covers.values())
        return step % self._config.trainer.save_every == 0 or step == self._config.trainer.steps

    async def _checkpoint(self) -> None:
        if self._saved_step < self._version:
            learner, version = self._learner, self._version
            assert learner is not None
            saved = await self._worker.run("checkpoint", learner.save, version, dict(self._covers), self._epoch, self._check_fence)
            await self._mark(saved)
            self._saved_step, self._covers = version, {}

    async def _mark(self, saved: Checkpoint) -> None:
        await self._ask(self._buffer.mark_trained(saved.step, str(saved.path.relative_to(self._paths.root))))

    async def _publish(self) -> None:
        hold_s = self._config.eval.hold_s
        if not await self._weights.wait_unheld(hold_s):
            _log.warning("an evaluation held version %d for more than eval.hold_s %s s", self._version - 1, hold_s)
        assert self._learner is not None
        if self._config.evaluation_due(self._version) and not self._paths.evaluation(self._version).exists():
            self._weights.hold(self._version, hold_s, hold_id=evaluation_id(self._version))
        await self._worker.run("publish", self._publish_now, self._version, self._learner)

    def _publish_now(self, version: int, learner: Learner) -> None:
        self._check_fence()
        self._weights.publish(version, learner.write_model)

    def _check_fence(self) -> None:
        try:
            self._fence()
        except FencedOut as error:
            self._failure = error
            _log.critical("a newer run epoch has begun: the process ends", exc_info=error)
            self._die()
            raise

    async def _publish_unless_there(self) -> None:
        """A restarted trainer finds its version published, as a rule; engines need not load it again."""
        newest = self._weights.latest()
        if newest is None or newest.version != self._version or not newest.path.is_dir():
            await self._publish()

    def _count_skipped(self, result: dict[str, Any]) -> None:
        """The result is recorded: the run fails, and what was consumed stays consumed."""
        if result["end_of_data"]:
            return
        self._skipped_in_row = self._skipped_in_row + 1 if result["skipped"] else 0
        if self._skipped_in_row >= MAX_SKIPPED:
            self._failure = BreakerTripped(
                "trainer",
                f"{MAX_SKIPPED} training steps in a row were skipped, the last is step {result['step']} ({result['skipped']};"
                f" rollout.min_step_fraction {self._config.rollout.min_step_fraction}); dropped groups"
                f" {result['dropped_groups']}, dropped samples {result['dropped_samples']}",
            )
            raise self._failure

    def _refuse_when_failed(self) -> None:
        if self._failure is not None:
            raise self._failure

    def _refuse_when_stopped(self) -> None:
        if self._stopped:
            raise StageFailed("trainer", "was stopped")

    async def _recorded(self, step: int) -> dict[str, Any]:
        if self._newest is not None and self._newest["step"] == step:
            return self._newest
        return _by_step((await self._ask(self._buffer.steps(step - 1)))["results"])[step]

    # -- start ------------------------------------------------------------------------------------------------------

    async def _restore(self) -> None:
        ledger = await self._ask(self._buffer.steps(NO_RESULTS))
        found = await self._worker.run("load", self._newest_complete, ledger["trained_step"])
        base = found.step if found else 0
        while ledger["checkpoint_step"] > base:
            await self._ask(self._buffer.forget_checkpoint(ledger["checkpoint_step"]))
            ledger = await self._ask(self._buffer.steps(NO_RESULTS))
        if found is not None and ledger["checkpoint_step"] < base:
            await self._mark(found)
        learner = await self._worker.run("load", self._make_learner, found)
        self._version = self._saved_step = base
        self._learner = learner
        trained = ledger["trained_step"]
        recorded = await self._ask(self._buffer.steps(max(0, min(base, trained - MAX_SKIPPED))))
        try:
            await self._replay(trained, _by_step(recorded["results"]))
        except BaseException:
            self._learner = None
            raise

    def _newest_complete(self, trained_step: int) -> Checkpoint | None:
        """A checkpoint ahead of the ledger is of another history (an older run.db was put back): it is not used."""
        for found in checkpoints.complete(self._paths):
            if found.step <= trained_step:
                return found
            _log.warning("checkpoint %s is ahead of the ledger (step %d) and is skipped", found.path.name, trained_step)
        return None

    async def _replay(self, trained_step: int, results: dict[int, dict[str, Any]]) -> None:
        """Repeat the recorded steps after the checkpoint from stored rows, in their recorded order."""
        for step in range(self._version + 1, trained_step + 1):
            recorded = results.get(step, {})
            replayed = await self._update(step, await self._ask(self._buffer.select(step)), recorded.get("lr"))
            if recorded.get("weights") not in (None, replayed["weights"]):
                _log.warning("replayed step %d gives weights %s, recorded are %s", step, replayed["weights"], recorded["weights"])
        self._newest = results.get(trained_step)
        skipped = 0
        for step in sorted(results, reverse=True):
            if not results[step]["skipped"]:
                break
            skipped += not results[step]["end_of_data"]
        self._skipped_in_row = min(skipped, MAX_SKIPPED - 1)
        if self._newest is not None and self._due(trained_step, self._newest):
            await self._checkpoint()  # the process before this one died between recording the step and saving it

    # -- waiting ----------------------------------------------------------------------------------------------------

    async def _wait_selection(self, step: int) -> Selection:
        self._waiting_for = f"the groups of step {step}"
        try:
            while (selection := await self._ask(self._buffer.wait_selection(step, WAIT_S))) is None:
                self._refuse_when_stopped()
            return selection
        finally:
            self._waiting_for = None

    async def _ask(self, call: Awaitable[T]) -> T:
        """One call of the buffer, bounded. Raises StageFailed of the buffer, whose silence is none of the trainer's."""
        try:
            async with asyncio.timeout(CALL_S):
                return await call
        except TimeoutError as error:
            raise StageFailed("replay_buffer", f"did not answer the trainer within {CALL_S:.0f} s") from error

    def _forget(self, step: int, task: asyncio.Task[dict[str, Any]]) -> None:
        self._running.pop(step, None)
        if not task.cancelled() and task.exception() is not None:
            _log.error("train[%d] failed", step, exc_info=task.exception())


def _by_step(values: dict[Any, T]) -> dict[int, T]:
    return {int(step): value for step, value in values.items()}
