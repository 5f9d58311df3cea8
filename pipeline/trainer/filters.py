"""Which groups and samples are trained on. Kept plus dropped, by reason, is what came in: for groups and for samples.

A dropped sample of a kept group is masked out of the loss and of its group's baseline; the group keeps its shape.
Imports no torch: the pool asks `drop_reason` for each finished group, and draws others in place of the dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.config.stages import Filters
from pipeline.importing import load_callable
from pipeline.records import Group, Sample


@dataclass(frozen=True, slots=True)
class FilterResult:
    groups: tuple[Group, ...]
    """Groups with at least one kept sample, in the order given."""
    kept: frozenset[str]
    """Ids of the samples that are trained on."""
    dropped_groups: dict[str, int]
    """Reason -> groups."""
    dropped_samples: dict[str, int]
    """Reason -> samples; those of dropped groups are counted under the group's reason."""


def drop_reason(group: Group, filters: Filters) -> str | None:
    """Why the whole group teaches nothing, or None. `zero_advantage`: its scored rewards are all equal (Yu et al. 2025, DAPO,
    "dynamic sampling"), which a group with fewer than two scored samples satisfies."""
    if filters.zero_advantage:
        rewards = {sample.reward for sample in group.samples if sample.reward is not None}
        if len(rewards) < 2:
            return "zero_advantage"
    if filters.custom is not None:
        return load_callable(filters.custom, "rollout.filters.custom")(group)
    return None


def sample_reason(sample: Sample, step: int, filters: Filters) -> str | None:
    """Why a sample is not trained on, or None: aborted, nothing to train on, rejection sampling, then finish-only."""
    if sample.status == "aborted":
        return "aborted"
    if not sample.loss_mask.any():
        return "empty"
    if filters.rejection == "all" or (filters.rejection == "warmup_only" and step < filters.warmup_steps):
        if sample.reward is None:
            return "unscored"
        if sample.reward <= 0:
            return "rejected"
    if filters.finish_only and sample.finish_reason != "finish":
        return "unfinished"
    return None


def apply(groups: Sequence[Group], step: int, filters: Filters) -> FilterResult:
    """Group filters first, then sample filters on the survivors; a group that loses all its samples is `emptied`."""
    kept_groups: list[Group] = []
    kept: set[str] = set()
    dropped_groups: Counter[str] = Counter()
    dropped_samples: Counter[str] = Counter()
    for group in groups:
        whole = drop_reason(group, filters)
        if whole is not None:
            dropped_groups[whole] += 1
            dropped_samples[whole] += len(group.samples)
            continue
        reasons = {sample.sample_id: sample_reason(sample, step, filters) for sample in group.samples}
        dropped_samples.update(reason for reason in reasons.values() if reason is not None)
        survivors = {sample_id for sample_id, reason in reasons.items() if reason is None}
        if survivors:
            kept_groups.append(group)
            kept |= survivors
        else:
            dropped_groups["emptied"] += 1
    return FilterResult(tuple(kept_groups), frozenset(kept), dict(dropped_groups), dict(dropped_samples))
