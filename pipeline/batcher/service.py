"""The batcher: runs the configured strategy, and accepts only a partition of the step's tasks."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

from pipeline.batcher.strategies import Strategy, load_strategy, spec_of
from pipeline.buffer.api import StageReport
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.evaluator.spec import EvaluatorSpec, specs_from_config
from pipeline.records import Batch, Task


class Batcher:
    def __init__(self, config: RunConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = config.rollout.strategy
        self._strategy = load_strategy(self._name)
        self._specs = specs_from_config(config)
        self._clock = clock
        self._tasks = 0
        self._batches = 0
        self._busy_s = 0.0

    def batch(self, step: int | str, tasks: Sequence[Task]) -> list[Batch]:
        """Batches named `<step>.<n>`, in the strategy's order: the same tasks give the same batches. Raises ConfigError."""
        started = self._clock()
        batches = partition(self._name, self._strategy, tasks, self._specs)
        self._tasks += len(tasks)
        self._batches += len(batches)
        self._busy_s += self._clock() - started
        return [replace(batch, batch_id=f"{step}.{number}") for number, batch in enumerate(batches)]

    def report(self) -> StageReport:
        return StageReport(
            stage="batcher",
            actor="Batcher",
            pid=os.getpid(),
            node=os.uname().nodename,
            started=self._tasks,
            finished=self._tasks,
            backlog=0,
            oldest_s=0.0,
            busy_s=self._busy_s,
            detail={"batches": self._batches, "strategy": self._name},
        )


def partition(name: str, strategy: Strategy, tasks: Sequence[Task], specs: dict[str, EvaluatorSpec]) -> list[Batch]:
    """What the strategy makes of the tasks. Raises ConfigError, by its name, if a task is lost, repeated, invented or misplaced."""
    for task in tasks:
        spec_of(task, specs)
    batches = [batch for batch in strategy(list(tasks), dict(specs)) if batch.ordinals]
    wanted = Counter(task.ordinal for task in tasks)
    given = Counter(ordinal for batch in batches for ordinal in batch.ordinals)
    invented = sorted(ordinal for ordinal in given if ordinal not in wanted)
    lost = sorted((wanted - given).elements())
    repeated = sorted((given - wanted).keys() - set(invented))
    for fault, ordinals in (("invented", invented), ("lost", lost), ("repeated", repeated)):
        if ordinals:
            raise ConfigError(f"rollout.strategy {name!r} {fault} {_some(ordinals)} of {len(tasks)} tasks")
    types = {task.ordinal: task.task_type for task in tasks}
    for batch in batches:
        spec = specs.get(batch.task_type)
        if spec is None or batch.evaluator_id != spec.evaluator_id:
            raise ConfigError(f"rollout.strategy {name!r} gave a batch to evaluator {batch.evaluator_id!r} for {batch.task_type!r}")
        strangers = [ordinal for ordinal in batch.ordinals if types[ordinal] != batch.task_type]
        if strangers:
            raise ConfigError(f"rollout.strategy {name!r} put {_some(strangers)} of another type into a {batch.task_type!r} batch")
    return batches


def _some(ordinals: list[int]) -> str:
    shown = ", ".join(map(str, ordinals[:5]))
    return f"{'ordinal' if len(ordinals) == 1 else 'ordinals'} {shown}{', ...' if len(ordinals) > 5 else ''}"
