"""The ledger of a run of which nothing runs: opened for a moment by whoever holds the run's lock."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from typing import Any

from pipeline.buffer.schema import open_writer
from pipeline.buffer.service import BufferService
from pipeline.buffer.settings import BufferSettings
from pipeline.errors import StoreError
from pipeline.paths import RunPaths


@asynccontextmanager
async def offline(paths: RunPaths, settings: BufferSettings, *, new_run_epoch: bool = False) -> AsyncIterator[BufferService]:
    service = BufferService(paths, settings)
    await service.open(new_run_epoch)
    try:
        yield service
    finally:
        await service.close()


async def record_state(
    paths: RunPaths, settings: BufferSettings, state: str, error: str | None = None, *, new_run_epoch: bool = False, **facts: Any
) -> None:
    async with offline(paths, settings, new_run_epoch=new_run_epoch) as service:
        await service.set_run(state, error, **facts)


def compact(paths: RunPaths) -> None:
    """Give the room of rows that were removed back to the file system."""
    with closing(open_writer(paths.database)) as db:
        try:
            db.execute("VACUUM")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        except sqlite3.Error as error:
            raise StoreError(f"{paths.database} cannot be compacted: {error}") from error
