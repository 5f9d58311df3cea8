"""The order of an evaluation: every (task, copy) once, round-robin over the datasets (ABCABC...), so that all progress together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

from pipeline.records import Task

Unit = tuple[Task, int]
"""A task and the index of one of its samples."""


def interleave(tasks: Sequence[Task]) -> list[Unit]:
    """Within a dataset the order is that of the tasks, all copies of one after the other."""
    datasets: dict[str, list[Unit]] = {}
    for task in tasks:
        datasets.setdefault(task.dataset, []).extend((task, index) for index in range(task.samples))
    return [unit for row in zip_longest(*datasets.values()) for unit in row if unit is not None]
