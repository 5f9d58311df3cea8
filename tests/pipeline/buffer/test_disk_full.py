"""A full disk is a clear error, loses nothing that was acknowledged, and is over as soon as there is space."""

from __future__ import annotations

import errno
import shutil
import sqlite3
import subprocess

import pytest

from pipeline.buffer.reader import read_status
from pipeline.buffer.segments import Segments
from pipeline.errors import DiskFull, StoreError
from tests.pipeline.buffer.helpers import make_group, make_settings, new_run, opened, roll_out


@pytest.mark.fault(37)
async def test_no_space_for_a_segment(tmp_path, monkeypatch):
    paths = new_run(tmp_path)

    def full(self, data, sha256):
        raise OSError(errno.ENOSPC, "No space left on device")

    async with opened(paths) as buffer:
        await buffer.assign(1, 2, None)
        first = await buffer.start_attempt(0, 0, "w")
        await roll_out(buffer, 1, 1, tokens=8000)
        monkeypatch.setattr(Segments, "append", full)
        with pytest.raises(DiskFull, match=str(paths.root)):
            await buffer.commit(first, make_group(first, 1, tokens=8000))
        assert (await buffer.status())["ordinals"]["running"] == 1
        monkeypatch.undo()
        assert await buffer.commit(first, make_group(first, 1, tokens=8000))
        assert len(await buffer.read([0, 1], False)) == 2


@pytest.mark.fault(37)
async def test_no_space_for_the_database(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths, make_settings(inline_bytes=1 << 20)) as buffer:
        await buffer.assign(1, 2, None)
        first = await buffer.start_attempt(0, 0, "w")
        db = buffer._store._db
        pages = db.execute("PRAGMA page_count").fetchone()[0]
        db.execute(f"PRAGMA max_page_count = {pages + 3}")
        with pytest.raises(DiskFull, match="no space left"):
            await buffer.commit(first, make_group(first, 1, tokens=20_000))
        db.execute("PRAGMA max_page_count = 100000")
        assert await buffer.commit(first, make_group(first, 1, tokens=20_000))


async def test_a_database_that_stays_locked_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.buffer.schema.BUSY_S", 0.05)
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        other = sqlite3.connect(paths.database, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="database is locked"):
            await buffer.assign(1, 2, None)
        other.execute("ROLLBACK")
        other.close()
        assert len(await buffer.assign(1, 2, None)) == 2


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 4 MB."""
    folder = tmp_path / "small"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)], capture_output=True)
    if made.returncode != 0:
        pytest.skip("may not mount here")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


@pytest.mark.skipif(shutil.which("mount") is None, reason="no mount here")
@pytest.mark.parametrize("tokens", [500, 8000])
@pytest.mark.fault(37)
async def test_a_file_system_that_really_fills(small_disk, tokens):
    paths = new_run(small_disk)
    ballast = small_disk / "ballast"
    ballast.write_bytes(bytes(1_000_000))
    settings = make_settings(tasks_per_step=400, max_staleness=0, capacity=400)
    async with opened(paths, settings) as buffer:
        await buffer.assign(1, 400, None)
        durable = []
        with pytest.raises(DiskFull, match="no space left"):
            for ordinal in range(400):
                attempt = await buffer.start_attempt(ordinal, 0, "w")
                await buffer.commit(attempt, make_group(attempt, 1, samples=4, tokens=tokens))
                durable.append(ordinal)
        assert durable
        assert read_status(paths)["ordinals"]["ready"] == len(durable)
        ballast.unlink()
        assert len(await buffer.read(durable, False)) == len(durable)
        await roll_out(buffer, len(durable), 1)
    async with opened(paths, settings, epoch=True) as buffer:
        assert len(await buffer.read([*durable, len(durable)], False)) == len(durable) + 1
