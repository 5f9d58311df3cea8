"""Figures of a training step. What is not known is None, never 0.0; unscored samples are in no mean and counted beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.records import SOLVED_AT, Group


def rollout_measures(groups: Sequence[Group], step: int) -> dict[str, Any]:
    """Rewards, counts and staleness of all groups that the step consumed, before any filter.

    Staleness is measured at consumption: the version before this update (step - 1) minus the group's version at dispatch.
    """
    samples = [sample for group in groups for sample in group.samples]
    scored = [sample.reward for sample in samples if sample.reward is not None]
    staleness = [step - 1 - group.weight_version for group in groups]
    lengths = [int(sample.loss_mask.sum()) for sample in samples if sample.status == "ok"]
    return {
        "groups": len(groups),
        "total": len(samples),
        "scored": len(scored),
        "solved": sum(reward >= SOLVED_AT for reward in scored),
        "aborted": sum(sample.status == "aborted" for sample in samples),
        "reward_mean": mean(scored),
        "response_tokens_mean": mean(lengths),
        "dropped_tokens": sum(sample.dropped_tokens() for sample in samples),
        "staleness_mean": mean(staleness),
        "staleness_max": max(staleness, default=None),
    }


def mean(values: Sequence[float]) -> float | None:
    return float(np.mean(values)) if len(values) else None


@dataclass(slots=True)
class Tally:
    """Sums and maxima over the chunks of a step."""

    sums: dict[str, float] = field(default_factory=dict)
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, **values: float) -> None:
        for name, value in values.items():
            self.sums[name] = self.sums.get(name, 0.0) + value

    def top(self, **values: float) -> None:
        for name, value in values.items():
            self.maxima[name] = max(self.maxima.get(name, -math.inf), value)

    def share(self, name: str, of: str) -> float | None:
        """sums[name] / sums[of], or None when there is nothing to divide by or the quotient is not finite."""
        below = self.sums.get(of, 0.0)
        return known(self.sums.get(name, 0.0) / below) if below and name in self.sums else None


def known(value: float | None) -> float | None:
    """JSON has no NaN: a figure that is not finite is not known."""
    return value if value is not None and math.isfinite(value) else None
