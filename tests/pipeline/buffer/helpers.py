"""Groups and buffers made by hand."""

from __future__ import annotations

import tempfile
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np

from pipeline.buffer.schema import create_run
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.paths import RunPaths
from pipeline.records import Column, Group, Sample, Sampling, Stopping, Task


def make_task(ordinal: int, needs: tuple[str, ...] = (), samples: int = 2) -> Task:
    return Task(
        ordinal, f"words/{ordinal}", "words", "single_turn", (("user", "hi"),), "ih", "exact", samples, Sampling(), Stopping(), 7,
        needs, "big" if needs else None, {"index": ordinal},
    )  # fmt: skip


def make_sample(ordinal: int, index: int, tokens: int = 5) -> Sample:
    rng = np.random.default_rng([ordinal, index])
    logprobs = -rng.random(tokens).astype(np.float32)
    logprobs[: tokens // 2] = np.nan
    return Sample(
        f"{ordinal}.{index}", index, "ok", 1.0, rng.integers(0, 99, tokens).astype(np.int32), np.ones(tokens, np.uint8), logprobs,
        np.ones(tokens, np.uint8), np.zeros(tokens, np.int32), "finish", "ih", turns=({"tokens": tokens},),
    )  # fmt: skip


def make_group(attempt, step: int, needs: tuple[str, ...] = (), *, samples: int = 2, tokens: int = 5, version: int = 0) -> Group:
    rows = tuple(make_sample(attempt.ordinal, index, tokens) for index in range(samples))
    return Group(attempt.ordinal, step, attempt.number, make_task(attempt.ordinal, needs, samples), version, rows)


def make_column(ordinal: int, samples: int = 2, tokens: int = 5, name: str = "teacher") -> Column:
    arrays = {f"{ordinal}.{i}": {"logprobs": np.full(tokens, -0.5, np.float32)} for i in range(samples)}
    return Column(name, ordinal, "big", "abc", arrays)


def make_settings(**changes) -> BufferSettings:
    values = {"tasks_per_step": 2, "max_staleness": 1, "capacity": 4, **changes}
    return BufferSettings(**values)


def fast_folder() -> tempfile.TemporaryDirectory:
    """In memory where the machine can, for tests that open hundreds of runs."""
    shm = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=shm if shm.is_dir() else None)


def new_run(folder: Path, name: str = "run", **facts) -> RunPaths:
    paths = RunPaths(Path(folder) / name)
    create_run(paths, facts)
    return paths


@asynccontextmanager
async def opened(paths: RunPaths, settings: BufferSettings | None = None, *, epoch: bool = False, **options):
    buffer = BufferService(paths, settings or make_settings(), **options)
    await buffer.open(epoch)
    try:
        yield buffer
    finally:
        await buffer.close()


async def roll_out(buffer, ordinal: int, step: int, needs: tuple[str, ...] = (), *, version: int = 0, **shape):
    """One attempt from start to commit; returns it."""
    attempt = await buffer.start_attempt(ordinal, version, "worker")
    await buffer.commit(attempt, make_group(attempt, step, needs, version=version, **shape))
    return attempt


async def fill_step(buffer, step: int, count: int = 2, needs: tuple[str, ...] = (), *, version: int = 0) -> list[int]:
    """Assign, roll out and close a step; returns its ordinals."""
    ordinals = [slot.ordinal for slot in await buffer.assign(step, count, None)]
    for ordinal in ordinals:
        await roll_out(buffer, ordinal, step, needs, version=version)
    await buffer.close_rollout(step)
    return ordinals


def same(left, right) -> bool:
    """Deep equality by bits: arrays with their types and NaNs."""
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()
    if isinstance(left, float):
        return isinstance(right, float) and np.float64(left).tobytes() == np.float64(right).tobytes()
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, tuple | list):
        return type(left) is type(right) and len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dataclass_fields__"):
        return type(left) is type(right) and all(
            same(getattr(left, name), getattr(right, name)) for name in left.__dataclass_fields__
        )
    return type(left) is type(right) and left == right
