"""Picks answers of an evaluation for people to look at: always the same ones, right and wrong in the proportion they came in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.observe.evaluations import sample_lines
from pipeline.records import SOLVED_AT

SHOWN = 12
LONGEST = 600


def sample_rows(folder: Path, evaluation_id: str, count: int = SHOWN) -> list[dict[str, str]]:
    """`{question, answer, expected, verdict}` of evenly spread samples; verdict is right, wrong or none (not scored)."""
    lines = sample_lines(folder, evaluation_id)
    stride = max(1, len(lines) // count)
    return [_row(line) for line in lines[::stride][:count]]


def _row(line: dict[str, Any]) -> dict[str, str]:
    reward = line.get("reward")
    verdict = "none" if reward is None else "right" if reward >= SOLVED_AT else "wrong"
    return {
        "question": _short(line.get("question")),
        "answer": _short(line.get("text")),
        "expected": _short(line.get("answer")),
        "verdict": verdict,
    }


def _short(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
