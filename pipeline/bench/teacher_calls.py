"""One call of 32 rows against eight calls of 4: what batching across groups saves with a given teacher.

Invariant: the same rows, one call after the other, the better of a few rounds each; the first round, which warms up, is left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.bench.teacher import Workload
from pipeline.bench.virtual_time import run_on_virtual_time
from pipeline.config.models import Teacher
from pipeline.engines.base import ScoreRow

ROWS, SMALL = 32, 4
ROUNDS = 3

Score = Callable[[list[ScoreRow]], Awaitable[Any]]


def stated() -> dict[str, float]:
    """Of a teacher with the workload's cost a call, on virtual time."""
    from pipeline.engines.fixed_cost import FixedCostTeacher

    async def measured() -> dict[str, float]:
        engine = FixedCostTeacher(Teacher(engine="fixed_cost", fixed_cost_s=Workload().call_s))
        return await measure(engine.score, tokens=16, vocab=64, clock=asyncio.get_running_loop().time)

    return run_on_virtual_time(measured())


def of_config(path: Path, cache: Path) -> tuple[dict[str, float], str]:
    """Of the first teacher of a configuration, made (or found in the cache) and run in this process; and its name."""
    from pipeline.config.loading import read_config
    from pipeline.engines.torch_engine import TorchEngine
    from pipeline.errors import ConfigError
    from pipeline.fetcher.catalog import Catalog
    from pipeline.trainer.assets import teacher_folder

    config = read_config(path).config
    alias = next((name for name, teacher in config.teachers.items() if teacher.engine == "torch"), None)
    if alias is None:
        raise ConfigError(f"{path}: teachers has none with a model of its own")
    folder = teacher_folder(config, alias, Catalog(config), cache)

    async def measured() -> dict[str, float]:
        engine = TorchEngine(folder, None, config.engine, dtype=config.teachers[alias].dtype)
        try:
            info = await engine.info()
            return await measure(engine.score, tokens=min(info.max_context, 512), vocab=info.vocab_size)
        finally:
            await engine.close()

    return asyncio.run(measured()), f"teachers.{alias} of {path}"


def of_shape(shape: str, device: str, tokens: int = 512) -> tuple[dict[str, float], str]:
    """Of a model of random weights: for whoever has the device. Raises ConfigError for an unknown shape."""
    from pipeline.engines.random_model import RandomModel

    model = RandomModel(shape, device)

    async def score(rows: list[ScoreRow]) -> None:
        model.score(rows)

    return asyncio.run(measure(score, tokens=tokens, vocab=model.vocab_size)), f"a random model of shape {shape} on {device}"


async def measure(score: Score, *, tokens: int, vocab: int, clock: Callable[[], float] = time.perf_counter) -> dict[str, float]:
    """call32_over_8x4, and the seconds of both sides. Rows are half prompt, half scored."""
    rng = np.random.default_rng(0)
    rows = [ScoreRow(str(row), rng.integers(3, vocab, tokens).astype(np.int32), tokens // 2) for row in range(ROWS)]
    parts = [rows[start : start + SMALL] for start in range(0, ROWS, SMALL)]
    whole, split = [], []
    for _ in range(1 + ROUNDS):
        whole.append(await _seconds(score, [rows], clock))
        split.append(await _seconds(score, parts, clock))
    one, eight = min(whole[1:]), min(split[1:])
    return {"call32_over_8x4": one / eight, "call32_s": one, "calls_8x4_s": eight}


async def _seconds(score: Score, calls: Sequence[list[ScoreRow]], clock: Callable[[], float]) -> float:
    began = clock()
    for rows in calls:
        await score(rows)
    return clock() - began
