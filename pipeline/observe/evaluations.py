"""Reads what evaluations left in eval_details/ (evaluation/details.py writes it); a figure that was not measured is None."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.observe.jsonlines import read_jsonlines

_EVAL = re.compile(r"eval_(\d+)\.summary\.json")
_TEACHER = re.compile(r"teacher_(.+)\.summary\.json")


@dataclass(frozen=True, slots=True)
class Score:
    """Held-out accuracy over the samples that were scored."""

    accuracy: float | None
    solved: float
    scored: int
    total: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    id: str
    step: int | None
    """Weight version of the student; None: a teacher."""
    alias: str | None
    datasets: dict[str, Score]
    failure_classes: dict[str, int]
    valid: bool
    why_invalid: tuple[str, ...]

    @property
    def overall(self) -> Score:
        return pooled(self.datasets.values())


def pooled(scores: Any) -> Score:
    """All samples of several scores as one; unscored ones stay outside the accuracy."""
    scores = list(scores)
    solved, scored = sum(score.solved for score in scores), sum(score.scored for score in scores)
    return Score(solved / scored if scored else None, solved, scored, sum(score.total for score in scores))


def student_evaluations(folder: Path) -> list[Evaluation]:
    """Evaluations of the student by step."""
    found = [_read(path, step=int(match[1])) for path, match in _matches(folder, _EVAL)]
    return sorted((item for item in found if item is not None), key=lambda item: item.step or 0)


def before_and_after(evaluations: list[Evaluation]) -> tuple[Evaluation | None, Evaluation | None]:
    """The valid evaluation of version 0, and the newest valid one of a later version."""
    valid = [item for item in evaluations if item.valid]
    before = valid[0] if valid and valid[0].step == 0 else None
    after = valid[-1] if valid and valid[-1].step else None
    return before, after


def teacher_evaluations(folder: Path) -> list[Evaluation]:
    """Evaluations of the teachers by alias."""
    found = [_read(path, alias=match[1]) for path, match in _matches(folder, _TEACHER)]
    return sorted((item for item in found if item is not None), key=lambda item: item.alias or "")


def sample_lines(folder: Path, evaluation_id: str) -> list[dict[str, Any]]:
    """The samples of one evaluation, a record a sample."""
    return read_jsonlines(folder / f"{evaluation_id}.jsonl")


def conversations(folder: Path, evaluation_id: str) -> list[dict[str, Any]]:
    """`sample_lines`, each with the records of its turns in `turns`."""
    turns: dict[str, list[dict[str, Any]]] = {}
    for turn in read_jsonlines(folder / f"{evaluation_id}.turns.jsonl"):
        turns.setdefault(turn["sample_id"], []).append(turn)
    return [line | {"turns": turns.get(line["sample_id"], [])} for line in sample_lines(folder, evaluation_id)]


def teacher_scores(teachers: list[Evaluation]) -> dict[str, Score]:
    """Score by dataset over all teachers."""
    names = {name for teacher in teachers for name in teacher.datasets}
    return {name: pooled(teacher.datasets[name] for teacher in teachers if name in teacher.datasets) for name in sorted(names)}


def _matches(folder: Path, pattern: re.Pattern[str]) -> list[tuple[Path, re.Match[str]]]:
    if not folder.is_dir():
        return []
    return [(path, match) for path in sorted(folder.iterdir()) if (match := pattern.fullmatch(path.name))]


def _read(path: Path, *, step: int | None = None, alias: str | None = None) -> Evaluation | None:
    try:
        raw = json.loads(path.read_text())
    except ValueError:
        return None
    datasets = {name: _score(figures) for name, figures in (raw.get("results") or {}).items()}
    return Evaluation(
        id=path.name.removesuffix(".summary.json"),
        step=step,
        alias=alias,
        datasets=datasets,
        failure_classes={name: count for name, count in (raw.get("failure_classes") or {}).items() if count},
        valid=raw.get("valid") is not False,
        why_invalid=tuple(raw.get("why_invalid") or ()),
    )


def _score(figures: dict[str, Any]) -> Score:
    return Score(figures.get("accuracy"), figures.get("solved") or 0, figures.get("scored") or 0, figures.get("total") or 0)
