"""What benchmarks share: a run's buffer in a temporary folder, and stand-ins for what they do not measure."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.buffer.schema import create_run
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.config.schema import RunConfig
from pipeline.paths import RunPaths


@asynccontextmanager
async def bench_buffer(
    config: RunConfig, clock: Callable[[], float], threaded: bool = False
) -> AsyncIterator[tuple[BufferService, RunPaths]]:
    with tempfile.TemporaryDirectory() as folder:
        paths = RunPaths(Path(folder) / "bench")
        create_run(paths, {})
        buffer = BufferService(paths, BufferSettings.from_config(config), clock=clock, threaded=threaded)
        await buffer.open(new_run_epoch=True)
        try:
            yield buffer, paths
        finally:
            await buffer.close()


class StandInTokens:
    """Stands in for a renderer: tokens that mean nothing."""

    digest = ""
    vocab_size = 64

    def render(self, messages: Any) -> np.ndarray:
        return np.arange(1, 17, dtype=np.int32)

    def decode(self, token_ids: np.ndarray) -> str:
        return ""


async def in_this_thread(function: Callable[..., Any], *args: Any) -> Any:
    """In place of `asyncio.to_thread`: virtual time has no threads."""
    return function(*args)
