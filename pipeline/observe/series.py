"""Which figure of a step's metrics is shown where: the only place that knows the trainer's names."""

from __future__ import annotations

import math
from typing import Any

KEYS: dict[str, tuple[str, ...]] = {
    "reward": ("reward_mean", "reward"),
    "loss": ("loss",),
    "kl_teacher": ("kl_teacher", "teacher_kl"),
    "kl_behaviour": ("kl_behaviour", "behaviour_kl"),
    "entropy": ("entropy",),
    "staleness_mean": ("staleness_mean",),
    "staleness_max": ("staleness_max",),
    "seconds": ("seconds",),
}


def figure(metrics: dict[str, Any], name: str) -> float | None:
    """The figure of one step, or None when it was not measured (missing, null or not finite)."""
    for key in KEYS[name]:
        value = metrics.get(key)
        if isinstance(value, int | float) and math.isfinite(value):
            return float(value)
    return None


def series(lines: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """(steps, values) with NaN where a step did not measure the figure; empty when none did."""
    values = [figure(line, name) for line in lines]
    if all(value is None for value in values):
        return [], []
    return [int(line["step"]) for line in lines], [math.nan if value is None else value for value in values]
