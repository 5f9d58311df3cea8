"""The small parts around the real core: tasks, workers, a teacher and a learner whose results depend on ids and tokens alone."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline.buffer.api import Attempt, Selection
from pipeline.engines.base import EngineInfo, ScoredRow, ScoreRow
from pipeline.engines.weights import Published
from pipeline.errors import EngineUnavailable
from pipeline.evaluator.spec import PlacementToken
from pipeline.paths import RunPaths
from pipeline.records import STUDENT, Group, Sample, Sampling, StepContext, Stopping, Task, aborted_sample, sample_seed
from pipeline.trainer import checkpoints
from pipeline.trainer.checkpoints import Checkpoint
from pipeline.trainer.worker import Worker
from tests.simulation.scenario import Scenario

VOCAB = 50
LARGE_TOKENS = 8000
MODEL = "model.json"


@dataclass(frozen=True, slots=True)
class Tasks:
    """In place of the catalog."""

    scenario: Scenario

    @property
    def limit(self) -> int | None:
        return self.scenario.limit

    def task(self, ordinal: int) -> Task:
        needs = ("teacher",) if self.scenario.teacher else ()
        return Task(
            ordinal, f"words/{ordinal}", "words", "single_turn", (("user", "hi"),), "ih", "exact", self.scenario.samples,
            Sampling(), Stopping(), 7, needs, "big" if needs else None,
        )  # fmt: skip


class Weights:
    """The folder of published weights, without files: like the folder it outlives every process. Nobody holds a version."""

    def __init__(self, published: Callable[[int], None]) -> None:
        self.newest: Published | None = None
        self._published = published

    def publish(self, version: int, save: Callable[[Path], None]) -> Published:
        self._published(version)
        self.newest = Published(version, Path())
        return self.newest

    def latest(self) -> Published | None:
        return self.newest

    def hold(self, version: int, seconds: float, now: float | None = None, hold_id: str | None = None) -> str:
        return hold_id or ""

    async def wait_unheld(self, timeout_s: float) -> bool:
        return True


class ToyWorker:
    """What evaluator.worker.WorkerClient asks for: takes its time, and makes up samples from their seeds and the weight version."""

    def __init__(self, scenario: Scenario, weights: Weights, seconds: Callable[[], float], played: Callable[..., Any]) -> None:
        self.scenario, self._weights, self._seconds, self._played = scenario, weights, seconds, played

    async def run_samples(
        self, task: Task, indices: Sequence[int], attempt: Attempt, context: StepContext, tokens: Sequence[PlacementToken]
    ) -> list[Sample]:
        with self._played(task, indices, attempt):
            while (newest := self._weights.latest()) is None or newest.version < context.min_version:
                await asyncio.sleep(0.5)
            await asyncio.sleep(self._seconds() * (10 if task.ordinal in self.scenario.slow else 1))
        return [make_sample(self.scenario, task, index, attempt.failures, context.min_version) for index in indices]


def make_sample(scenario: Scenario, task: Task, index: int, failures: int, version: int) -> Sample:
    ordinal = task.ordinal
    if ordinal in scenario.bad:
        return aborted_sample(ordinal, index, [1, 2], abort_reason="data", error="scripted", phase="run")
    if ordinal in scenario.fails and failures == 0:
        return aborted_sample(ordinal, index, [1, 2], abort_reason="infra_other", error="scripted", phase="run")
    seed = sample_seed(task, index, failures) ^ version
    length = LARGE_TOKENS if ordinal in scenario.large else 4 + seed % 3
    token_ids = ((np.arange(length, dtype=np.int64) * 31 + seed % 1009) % (VOCAB - 3) + 3).astype(np.int32)
    mask = np.ones(length, np.uint8)
    mask[:2] = 0
    sampled = mask > 0
    return Sample(
        sample_id=f"{ordinal}.{index}",
        index=index,
        status="ok",
        reward=1.0 if ordinal in scenario.filtered else float(index % 2),
        token_ids=token_ids,
        loss_mask=mask,
        logprobs=np.where(sampled, -0.5, np.nan).astype(np.float32),
        executor=np.where(sampled, STUDENT, 0).astype(np.uint8),
        versions=np.where(sampled, version, -1).astype(np.int32),
        finish_reason="finish",
    )


class Vocabulary:
    digest = ""
    vocab_size = VOCAB


class ToyTeacher:
    """A replica of the teacher: a logprob is a function of its token and the one before."""

    def __init__(self, seconds: Callable[[], float]) -> None:
        self._seconds = seconds

    async def info(self) -> EngineInfo:
        return EngineInfo("toy", "toy", "d", VOCAB, "", 0, 1 << 20, 1, 0, 0, 0, 0)

    async def score(self, rows: list[ScoreRow], signal: str, top_k: int) -> list[ScoredRow]:
        await asyncio.sleep(self._seconds())
        return [ScoredRow(row.row_id, _logprobs(row)) for row in rows]


def _logprobs(row: ScoreRow) -> np.ndarray:
    tokens = row.token_ids.astype(np.int64)
    return (-((tokens[row.start :] * 7 + tokens[row.start - 1 : -1] * 3) % 23) / 8.0).astype(np.float32)


class RemoteTeacher:
    """As deployments' engine handle: a lost replica is EngineUnavailable."""

    def __init__(self, replica: Any) -> None:
        self._replica = replica

    async def info(self) -> EngineInfo:
        return await self._call(self._replica.info)

    async def score(self, *args: Any) -> list[ScoredRow]:
        return await self._call(self._replica.score, *args)

    async def _call(self, method: Callable[..., Any], *args: Any) -> Any:
        try:
            return await method(*args)
        except (ConnectionError, TimeoutError) as error:
            raise EngineUnavailable(f"the teacher cannot be reached: {error}") from error


class InLoop(Worker):
    """The trainer's thread without a thread: its work takes virtual time, before and after, so that a crash finds room."""

    def __init__(self, clock: Callable[[], float], seconds: Callable[[], float]) -> None:
        super().__init__(clock)
        self._takes = seconds

    async def run(self, kind: str, function: Callable[..., Any], *arguments: Any) -> Any:
        await asyncio.sleep(self._takes())
        result = function(*arguments)
        await asyncio.sleep(0)
        return result


class ToyLearner:
    """Its parameters are a digest of all that it was ever trained on, in order, and its optimizer state the ordinals themselves.

    Whatever is trained twice, left out, swapped or changed is there to be seen in every later checkpoint.
    """

    def __init__(
        self,
        paths: RunPaths,
        found: Checkpoint | None,
        learned: Callable[..., None],
        saved: Callable[[Checkpoint], None],
    ) -> None:
        self._paths, self._learned, self._saved = paths, learned, saved
        self.updater = SimpleNamespace(writing=False)
        held = read_model(found.path) if found else {"weights": "", "trained": [], "steps": []}
        self.weights, self.trained, self.steps = held["weights"], held["trained"], held["steps"]

    def learn(self, step: int, selection: Selection, groups: Sequence[Group], lr: float | None = None) -> dict[str, Any]:
        if groups:
            self.weights = digest_of(self.weights, step, groups)
            self.trained = self.trained + [group.ordinal for group in groups]
        self.steps = [*self.steps, step]
        ended = selection.ended
        self._learned(step, [group.ordinal for group in groups], self.weights, self.trained, self.steps)
        return {
            "step": step,
            "weight_version": step,
            "end_of_data": ended,
            "skipped": "end_of_data" if ended else None if groups else "emptied",
            "weights": self.weights,
            "dropped_groups": dict(selection.dropped),
            "dropped_samples": {},
        }

    def write_model(self, folder: Path) -> None:
        held = {"weights": self.weights, "trained": self.trained, "steps": self.steps}
        (folder / MODEL).write_text(json.dumps(held))

    def save(self, step: int, covers: Mapping[int, Sequence[int]], epoch: int, fence: Callable[[], None]) -> Checkpoint:
        saved = checkpoints.save(self._paths, step, covers, write_model=self.write_model, state={}, epoch=epoch, fence=fence)
        self._saved(saved)
        checkpoints.prune(self._paths, 2)
        return saved


def read_model(folder: Path) -> dict[str, Any]:
    return json.loads((folder / MODEL).read_text())


def digest_of(before: str, step: int, groups: Sequence[Group]) -> str:
    made = hashlib.sha256(f"{before} {step}".encode())
    for group in groups:
        made.update(f"{group.ordinal} {group.weight_version}".encode())
        for sample in group.samples:
            made.update(sample.token_ids.tobytes() + sample.logprobs.tobytes() + sample.loss_mask.tobytes())
            made.update(f"{sample.sample_id} {sample.status} {sample.reward}".encode())
            for name in sorted(group.columns):
                made.update(group.columns[name].samples[sample.sample_id]["logprobs"].tobytes())
    return made.hexdigest()
