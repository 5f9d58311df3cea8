"""`rollout bench buffer`: durable commits against the same bytes appended and synced with nothing around them, in one process."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from pipeline.buffer.bench import measure_commits

SHAPES = ((4, 64, 64), (256, 2048, 12))
"""Rows, tokens, groups a round."""
ROUNDS = 3


async def figures(folder: Path) -> dict[str, float]:
    """over_raw_<rows>x<tokens>: megabytes a second over those of the raw append; p99_ms_ and groups_per_s_ of commits. Medians."""
    found: dict[str, float] = {}
    for rows, tokens, groups in SHAPES:
        rounds = []
        for number in range(ROUNDS):
            place = folder / f"{number}"
            place.mkdir(exist_ok=True)
            rounds.append(await measure_commits(place, rows, tokens, groups))
        for key in ("over_raw", "p99_ms", "groups_per_s"):
            found[f"{key}_{rows}x{tokens}"] = float(np.median([figures[key] for figures in rounds]))
    return found
