"""summary.json: what a run came to, from its evaluations, its ledger and its timeline. What was not measured is null."""

from __future__ import annotations

import json
import os
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from platform import python_version
from typing import Any

from pipeline.observe.evaluations import Score, before_and_after, pooled, student_evaluations, teacher_evaluations, teacher_scores
from pipeline.observe.jsonlines import jsonable
from pipeline.observe.timeline import busy_seconds, first_step_seconds, in_flow_order, read_timeline, run_seconds, timeline_path
from pipeline.paths import RunPaths

_PACKAGES = ("rollout-pipeline", "ray", "torch", "transformers", "numpy")


def build_summary(paths: RunPaths, status: dict[str, Any]) -> dict[str, Any]:
    """The whole summary; `status` is what `rollout status --json` says, possibly of a run still in progress or empty.

    Accuracies are held-out, over scored samples, of valid evaluations: `before` is that of version 0, `after` the newest one
    of a later version. Overall pools the datasets.
    """
    before, after = before_and_after(student_evaluations(paths.details))
    teachers = teacher_scores([item for item in teacher_evaluations(paths.details) if item.valid])
    rows = read_timeline(timeline_path(paths))
    seconds, busy = run_seconds(rows), busy_seconds(rows)
    return jsonable(
        {
            "run_id": status.get("run_id") or paths.run_id,
            "state": status.get("state"),
            "error": status.get("error"),
            "accuracy_before": before.overall.accuracy if before else None,
            "accuracy_after": after.overall.accuracy if after else None,
            "accuracy_teacher": pooled(teachers.values()).accuracy,
            "by_dataset": _by_dataset(before.datasets if before else {}, after.datasets if after else {}, teachers),
            "steps": status.get("step") or 0,
            "steps_planned": status.get("steps"),
            "ordinals": status.get("ordinals") or {},
            "attempts": status.get("attempts") or {},
            "dropped_by_reason": status.get("dropped_by_reason") or {},
            "replaced": status.get("replaced") or 0,
            "short_late": status.get("short_late") or 0,
            "seconds": {name: round(busy[name], 2) for name in in_flow_order(busy)},
            "seconds_total": round(seconds[-1], 2) if seconds else None,
            "first_step_s": first_step_seconds(rows),
            "versions": {
                "before": before.step if before else None,
                "after": after.step if after else None,
                "weights": status.get("weight_version"),
                "checkpoint": status.get("checkpoint_step"),
                "packages": _packages(),
            },
        }
    )


def write_summary(paths: RunPaths, summary: dict[str, Any]) -> None:
    """Replace summary.json as a whole."""
    aside = paths.summary.with_suffix(".json.tmp")
    aside.write_text(json.dumps(summary, indent=2) + "\n")
    os.replace(aside, paths.summary)


def read_summary(path: Path) -> dict[str, Any] | None:
    """None when there is none yet."""
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except ValueError:
        return None


def _by_dataset(before: dict[str, Score], after: dict[str, Score], teacher: dict[str, Score]) -> dict[str, dict[str, float | None]]:
    columns = {"before": before, "after": after, "teacher": teacher}
    names = sorted({name for scores in columns.values() for name in scores})
    return {
        name: {column: scores[name].accuracy if name in scores else None for column, scores in columns.items()} for name in names
    }


def _packages() -> dict[str, str]:
    found = {"python": python_version()}
    for name in _PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found
