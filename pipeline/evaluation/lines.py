"""A played sample as one line of `samples.jsonl`, and as much of it as a summary needs, read back.

Invariant: a summary of lines that were read back equals the summary of the samples that they were written from.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.evaluation.details import sample_line
from pipeline.evaluation.summary import Played
from pipeline.records import Sample, Task


def full_line(task: Task, sample: Sample) -> dict[str, Any]:
    """The line of the artefacts, with all messages, turns and weight versions, so that nothing else must be kept."""
    versions = sorted({int(version) for version in sample.versions if version >= 0})
    messages = [list(message) for message in task.messages]
    return sample_line(task, sample) | {"messages": messages, "turns": list(sample.turns), "weight_versions": versions}


def done_units(lines: Iterable[dict[str, Any]]) -> set[tuple[int, int]]:
    """(ordinal, index) of the samples that are there."""
    return {(line["ordinal"], line["index"]) for line in lines}


def played_again(tasks: Sequence[Task], lines: Iterable[dict[str, Any]]) -> list[Played]:
    """In the order of tasks and indices; of a sample that is there twice the first counts."""
    by_ordinal = {task.ordinal: task for task in tasks}
    first: dict[tuple[int, int], dict[str, Any]] = {}
    for line in lines:
        first.setdefault((line["ordinal"], line["index"]), line)
    return [(by_ordinal[ordinal], _sample(line)) for (ordinal, _), line in sorted(first.items()) if ordinal in by_ordinal]


def _sample(line: dict[str, Any]) -> Sample:
    """Without its tokens: a summary reads none."""
    nothing = np.zeros(0)
    return Sample(
        sample_id=line["sample_id"],
        index=line["index"],
        status=line["status"],
        reward=line["reward"],
        token_ids=nothing.astype(np.int32),
        loss_mask=nothing.astype(np.uint8),
        logprobs=nothing.astype(np.float32),
        executor=nothing.astype(np.uint8),
        versions=np.asarray(line["weight_versions"], np.int32),
        finish_reason=line["finish_reason"],
        text=line["text"],
        abort_reason=line["abort_reason"],
        error=line["error"],
    )
