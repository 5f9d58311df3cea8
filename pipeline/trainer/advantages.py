"""Advantages of GRPO: one number a sample, from the rewards of its own group.

Invariant: a sample that is not scored or fully masked is in no mean, no deviation and no loss; its advantage is None.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

STD_EPS = 1e-6
"""Added to the deviation; rewards of one group are either all equal (deviation 0) or far apart."""


def group_advantages(rewards_s: Sequence[float | None], *, std: bool) -> list[float | None]:
    """A_i = r_i - mean(r), divided by (std(r) + eps) when `std`: Shao et al. 2024 (DeepSeekMath), section 4.1.

    `std=False` is the form of Liu et al. 2025 ("Dr. GRPO"), which does not favour groups with nearly equal rewards.
    rewards_s: one entry a sample; None for samples that do not count. The deviation is that of the population, so that a
    group with one scored sample gets 0 and not NaN.
    """
    scored = np.asarray([reward for reward in rewards_s if reward is not None], np.float64)
    if not len(scored):
        return [None] * len(rewards_s)
    mean = scored.mean()
    scale = scored.std() + STD_EPS if std else 1.0
    return [None if reward is None else float((reward - mean) / scale) for reward in rewards_s]
