"""The artefacts of an evaluation or a training step: `{id}.jsonl`, `{id}.turns.jsonl`, `{id}.summary.json`.

Invariant: each file appears whole, and the summary last: where it is, the others are complete.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from pipeline.durable import write_whole
from pipeline.errors import failure_class
from pipeline.evaluation.summary import Played, versions_of
from pipeline.observe.jsonlines import jsonable
from pipeline.records import SOLVED_AT, Sample, Task


def sample_line(task: Task, sample: Sample) -> dict[str, Any]:
    versions = versions_of([sample])
    return {
        "sample_id": sample.sample_id,
        "task_id": task.task_id,
        "dataset": task.dataset,
        "ordinal": task.ordinal,
        "index": sample.index,
        "status": sample.status,
        "reward": sample.reward,
        "class": failure_class(sample.reward, sample.finish_reason, solved_at=SOLVED_AT),
        "finish_reason": sample.finish_reason,
        "abort_reason": sample.abort_reason,
        "agent_reason": sample.agent_reason,
        "error": sample.error,
        "phase": sample.phase,
        "node": sample.node,
        "weight_version": versions[0] if versions else None,
        "tokens": len(sample.token_ids),
        "response_tokens": int(sample.loss_mask.sum()),
        "turns": len(sample.turns),
        "dropped_tokens": sample.dropped_tokens(),
        "seconds": round(sample.seconds, 6),
        "prompt": task.messages[-1][1],
        "answer": task.answer,
        "text": sample.text,
    }


def turn_lines(task: Task, sample: Sample) -> list[dict[str, Any]]:
    head = {"sample_id": sample.sample_id, "task_id": task.task_id}
    return [{**head, "turn": number, "node": sample.node, "gpu": None, **turn} for number, turn in enumerate(sample.turns)]


def write(folder: Path, evaluation_id: str, played: Sequence[Played], summary: dict[str, Any]) -> None:
    """Replaces what an earlier, interrupted writer left."""
    folder.mkdir(parents=True, exist_ok=True)
    _lines(folder / f"{evaluation_id}.jsonl", (sample_line(task, sample) for task, sample in played))
    _lines(folder / f"{evaluation_id}.turns.jsonl", (line for task, sample in played for line in turn_lines(task, sample)))
    write_whole(folder / f"{evaluation_id}.summary.json", json.dumps(jsonable(summary), indent=1) + "\n")


def write_skipped(folder: Path, evaluation_id: str, why: str) -> dict[str, Any]:
    """An evaluation that can no longer be made is recorded as such, not left out. Returns its summary."""
    summary = {"id": evaluation_id, "valid": False, "skipped": why}
    write(folder, evaluation_id, (), summary)
    return summary


def read_summary(folder: Path, evaluation_id: str) -> dict[str, Any] | None:
    """The summary of a complete evaluation, or None."""
    path = folder / f"{evaluation_id}.summary.json"
    return json.loads(path.read_text()) if path.exists() else None


def _lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    write_whole(path, "".join(_line(record) + "\n" for record in records))


def _line(record: dict[str, Any]) -> str:
    try:
        return json.dumps(record, allow_nan=False)
    except (TypeError, ValueError):  # what most records hold nothing of: looking at each value costs more than writing it
        return json.dumps(jsonable(record))
