"""metrics.jsonl: one line a training step, each step once and in order, through crashes and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.observe.jsonlines import JsonLines, read_jsonlines


class MetricsWriter:
    """Follows the ledger, which is the truth; the file can be deleted and is written again from it."""

    def __init__(self, path: Path) -> None:
        self._file = JsonLines(path)
        self.step = int(self._file.last["step"]) if self._file.last else 0
        """The newest step in the file."""

    def sync(self, results: dict[int, dict[str, Any]]) -> list[int]:
        """Append the steps that the file lacks and return them. Raises OSError when the file cannot be written."""
        missing = sorted(int(step) for step in results if int(step) > self.step)
        by_step = {int(step): metrics for step, metrics in results.items()}
        self._file.append({**by_step[step], "step": step} for step in missing)
        if missing:
            self.step = missing[-1]
        return missing


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl by step."""
    return sorted((line for line in read_jsonlines(path) if "step" in line), key=lambda line: line["step"])
