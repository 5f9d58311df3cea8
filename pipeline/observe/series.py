"""Figures of the training steps as curves. The names are the trainer's (trainer/measures.py, trainer/update.py)."""

from __future__ import annotations

import math
from typing import Any


def figure(metrics: dict[str, Any], name: str) -> float | None:
    """The figure of one step, or None when it was not measured (missing, null or not finite)."""
    value = metrics.get(name)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def series(lines: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) with NaN where a step did not measure the figure; empty when none did."""
    values = [figure(line, name) for line in lines]
    if all(value is None for value in values):
        return [], []
    return [int(line["step"]) for line in lines], [math.nan if value is None else value for value in values]
