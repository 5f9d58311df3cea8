"""How fast durable commits are, beside the same bytes appended and synced with nothing around them."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import numpy as np

from pipeline.buffer import codec
from pipeline.buffer.api import Attempt
from pipeline.buffer.schema import create_run
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.paths import RunPaths
from pipeline.records import Group, Sample, Sampling, Stopping, Task


async def measure_commits(folder: Path, rows: int, tokens: int, groups: int, in_flight: int = 4) -> dict[str, float]:
    """Commit `groups` groups of rows x tokens, `in_flight` at a time, into a new run in `folder`, and append as many bytes raw.

    Returns groups_per_s, mb_per_s, p50_ms and p99_ms of a commit, raw_mb_per_s, and over_raw = mb_per_s / raw_mb_per_s.
    """
    paths = RunPaths(folder / f"bench_{rows}x{tokens}")
    create_run(paths, {})
    buffer = BufferService(paths, BufferSettings(tasks_per_step=groups, max_staleness=0, capacity=groups))
    await buffer.open()
    try:
        await buffer.assign(1, groups, None)
        attempts = [await buffer.start_attempt(ordinal, 0, "bench") for ordinal in range(groups)]
        made = [_group(attempt, rows, tokens) for attempt in attempts]
        latencies: list[float] = []
        turns = asyncio.Semaphore(in_flight)
        began = time.perf_counter()
        await asyncio.gather(
            *(_commit(buffer, turns, latencies, attempt, group) for attempt, group in zip(attempts, made, strict=True))
        )
        seconds = time.perf_counter() - began
    finally:
        await buffer.close()
    size = len(codec.encode_group(made[0]))
    raw_s = await asyncio.to_thread(_append_raw, paths.root / "raw", bytes(size), groups)
    megabytes = size * groups / 1e6
    return {
        "groups_per_s": groups / seconds,
        "mb_per_s": megabytes / seconds,
        "p50_ms": float(np.percentile(latencies, 50)) * 1e3,
        "p99_ms": float(np.percentile(latencies, 99)) * 1e3,
        "raw_mb_per_s": megabytes / raw_s,
        "over_raw": raw_s / seconds,
    }


async def _commit(buffer: BufferService, turns: asyncio.Semaphore, latencies: list[float], attempt: Attempt, group: Group) -> None:
    async with turns:
        began = time.perf_counter()
        await buffer.commit(attempt, group)
        latencies.append(time.perf_counter() - began)


def _append_raw(path: Path, data: bytes, count: int) -> float:
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
    try:
        began = time.perf_counter()
        for _ in range(count):
            os.write(file, data)
            os.fdatasync(file)
        return time.perf_counter() - began
    finally:
        os.close(file)


def _group(attempt: Attempt, rows: int, tokens: int) -> Group:
    rng = np.random.default_rng(attempt.ordinal)
    task = Task(
        attempt.ordinal, "bench/0", "bench", "single_turn", (("user", "?"),), None, "exact", rows, Sampling(), Stopping(), 0
    )
    samples = tuple(
        Sample(
            f"{attempt.ordinal}.{index}", index, "ok", 0.0, rng.integers(0, 1 << 15, tokens).astype(np.int32),
            np.ones(tokens, np.uint8), -rng.random(tokens).astype(np.float32), np.ones(tokens, np.uint8),
            np.zeros(tokens, np.int32), "finish",
        )
        for index in range(rows)
    )  # fmt: skip
    return Group(attempt.ordinal, 1, attempt.number, task, 0, samples)
