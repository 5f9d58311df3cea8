"""What an evaluation says: accuracy, pass@k, coverage and failure classes, by dataset and over all.

Invariant: a sample that was not scored is in no accuracy and in no pass@k; it stays in `total`, and so in `accuracy_all`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.errors import FAILURE_CLASSES, failure_class
from pipeline.evaluation.passk import pass_at_k
from pipeline.records import SOLVED_AT, Sample, Task

Played = tuple[Task, Sample]


def summarise(
    evaluation_id: str,
    played: Sequence[Played],
    *,
    k: Sequence[int] = (),
    min_coverage: float = 0.0,
    version: int | None = None,
) -> dict[str, Any]:
    """JSON-able. `valid` is False, with the reasons in `why_invalid`, when a dataset's coverage is below `min_coverage`, or when
    a `version` is given and a token was made by another. Raises ConfigError when k is above a task's number of samples."""
    by_dataset: dict[str, list[Played]] = {}
    for task, sample in played:
        by_dataset.setdefault(task.dataset, []).append((task, sample))
    results = {name: figures(entries, k) for name, entries in sorted(by_dataset.items())}
    versions = versions_of([sample for _, sample in played])
    why = [
        f"{name}: {result['scored']} of {result['total']} samples are scored, below min_coverage {min_coverage:g}"
        for name, result in results.items()
        if result["coverage"] < min_coverage
    ]
    if version is not None and versions not in ([], [version]):
        why.append(f"samples carry the weight versions {versions}, not {version} alone")
    return {
        "id": evaluation_id,
        "weight_version": version if version is not None else (versions[0] if versions else None),
        "versions": versions,
        "valid": not why,
        "why_invalid": why,
        "results": results,
        "overall": figures(played, k),
        "failure_classes": classes([sample for _, sample in played]),
    }


def figures(played: Sequence[Played], k: Sequence[int]) -> dict[str, Any]:
    """accuracy: over scored samples; accuracy_all: errored ones count as not solved; None where nothing was measured."""
    samples = [sample for _, sample in played]
    rewards = [sample.reward for sample in samples if sample.reward is not None]
    solved, scored, total = sum(reward >= SOLVED_AT for reward in rewards), len(rewards), len(samples)
    return {
        "accuracy": solved / scored if scored else None,
        "accuracy_all": solved / total if total else None,
        "solved": solved,
        "scored": scored,
        "total": total,
        "coverage": scored / total if total else 1.0,
        "reward": float(np.mean(rewards)) if rewards else None,
        "pass@k": {str(size): _pass_at(played, size) for size in k},
        "failure_classes": classes(samples),
    }


def _pass_at(played: Sequence[Played], k: int) -> float | None:
    """Mean over the tasks that have k scored samples; None when none has."""
    scored: dict[str, list[bool]] = {}
    for task, sample in played:
        if k > task.samples:
            pass_at_k(task.samples, 0, k)
        if sample.reward is not None:
            scored.setdefault(f"{task.ordinal} {task.task_id}", []).append(sample.reward >= SOLVED_AT)
    values = [pass_at_k(len(hits), sum(hits), k) for hits in scored.values() if len(hits) >= k]
    return float(np.mean(values)) if values else None


def classes(samples: Sequence[Sample]) -> dict[str, int]:
    """Samples by failure class; all classes are there."""
    counts = Counter(failure_class(sample.reward, sample.finish_reason, solved_at=SOLVED_AT) for sample in samples)
    return {name: counts[name] for name in FAILURE_CLASSES}


def versions_of(samples: Sequence[Sample]) -> list[int]:
    """Weight versions that made any token, ascending."""
    found: set[int] = set()
    for sample in samples:
        found.update(sample.versions.tolist())
    return sorted(version for version in found if version >= 0)
