"""How the tasks of a step become batches: plain callables (list[Task], dict[task type, EvaluatorSpec]) -> list[Batch].

A strategy may name its batches as it likes; the batcher names them anew. Every task goes into exactly one batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest

from pipeline.errors import ConfigError
from pipeline.evaluator.spec import EvaluatorSpec
from pipeline.importing import pick
from pipeline.records import Batch, Task

Strategy = Callable[[list[Task], dict[str, EvaluatorSpec]], list[Batch]]


def load_strategy(name: str) -> Strategy:
    """A strategy by short name or `module:attribute`. Raises ConfigError."""
    return pick(name, {"fifo": fifo, "longest_first": longest_first, "interleaved": interleaved}, "rollout.strategy")


def fifo(tasks: Sequence[Task], specs: Mapping[str, EvaluatorSpec]) -> list[Batch]:
    """By task type in the order of first sight; a batch is sealed at the spec's `batch_size` (None: once, at the end)."""
    open_batches: dict[str, list[int]] = {}
    sealed: list[Batch] = []
    for task in tasks:
        spec = spec_of(task, specs)
        waiting = open_batches.setdefault(task.task_type, [])
        waiting.append(task.ordinal)
        if spec.batch_size is not None and len(waiting) >= spec.batch_size:
            sealed.append(_seal(spec, open_batches.pop(task.task_type), len(sealed)))
    for task_type, waiting in open_batches.items():
        sealed.append(_seal(specs[task_type], waiting, len(sealed)))
    return sealed


def longest_first(tasks: Sequence[Task], specs: Mapping[str, EvaluatorSpec]) -> list[Batch]:
    """As fifo, over tasks in falling order of expected length: what takes longest starts first."""
    return fifo(sorted(tasks, key=expected_length, reverse=True), specs)


def interleaved(tasks: Sequence[Task], specs: Mapping[str, EvaluatorSpec]) -> list[Batch]:
    """The batches of fifo, round-robin over task types: no type waits behind all of another."""
    by_type: dict[str, list[Batch]] = {}
    for batch in fifo(tasks, specs):
        by_type.setdefault(batch.task_type, []).append(batch)
    rounds = zip_longest(*by_type.values())
    return [batch for turn in rounds for batch in turn if batch is not None]


def expected_length(task: Task) -> float:
    """Characters of prompt and answer, or what the item's own column `expected_length` says."""
    said = task.metadata.get("row", {}).get("expected_length")
    if isinstance(said, int | float):
        return float(said)
    return float(sum(len(content) for _, content in task.messages) + len(task.answer or ""))


def spec_of(task: Task, specs: Mapping[str, EvaluatorSpec]) -> EvaluatorSpec:
    """Raises ConfigError that lists the specs; never takes another type's."""
    if task.task_type not in specs:
        raise ConfigError(f"task {task.task_id} is of type {task.task_type!r}, which has no spec; specs cover {sorted(specs)}")
    return specs[task.task_type]


def _seal(spec: EvaluatorSpec, ordinals: list[int], number: int) -> Batch:
    return Batch(str(number), spec.evaluator_id, spec.task_type, tuple(ordinals))
