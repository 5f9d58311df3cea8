"""Picks answers of an evaluation for people to look at: evenly spread, so the same items in each evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.observe.evaluations import sample_lines
from pipeline.observe.timeline import thin
from pipeline.records import SOLVED_AT

SHOWN = 12
LONGEST = 600


def sample_rows(folder: Path, evaluation_id: str, count: int = SHOWN) -> list[dict[str, str]]:
    """`{question, answer, expected, verdict}` of evenly spread samples; verdict is right, wrong or none (not scored)."""
    return [_row(line) for line in thin(sample_lines(folder, evaluation_id), count)]


def _row(line: dict[str, Any]) -> dict[str, str]:
    reward = line.get("reward")
    verdict = "none" if reward is None else "right" if reward >= SOLVED_AT else "wrong"
    return {
        "question": _short(line.get("prompt")),
        "answer": _short(line.get("error") if line.get("status") == "aborted" else line.get("text")),
        "expected": _short(line.get("answer")),
        "verdict": verdict,
    }


def _short(value: Any) -> str:
    text = "–" if value is None else str(value)
    return text if len(text) <= LONGEST else text[: LONGEST - 1] + "…"
