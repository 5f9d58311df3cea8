"""What was acknowledged survives SIGKILL; what an old writer tries afterwards does not get in."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.buffer import codec
from pipeline.buffer.reader import read_status
from pipeline.buffer.segments import segment_path
from pipeline.buffer.service import BufferService
from pipeline.errors import AttemptRefused, FencedOut, LateCommit, RolloutError, StoreCorrupt
from tests.pipeline.buffer.helpers import fill_step, make_column, make_group, make_settings, new_run, opened, roll_out, same

ROOT = Path(__file__).parents[3]

WRITER = """
import asyncio, os, sys
from pipeline.buffer import codec
from pipeline.errors import AttemptRefused
from pipeline.paths import RunPaths
from tests.pipeline.buffer.helpers import make_group, make_settings, opened

async def main(folder, witness, new_epoch):
    told = os.open(witness, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    settings = make_settings(tasks_per_step=6, max_staleness=0, capacity=6)
    async with opened(RunPaths(folder), settings, epoch=new_epoch) as buffer:
        step = max((await buffer.steps())["selections"], default=0)
        print("ready", flush=True)
        while True:
            step += 1
            slots = await buffer.assign(step, 6, None)

            async def roll(ordinal):
                try:
                    attempt = await buffer.start_attempt(ordinal, 0, "w")
                except AttemptRefused:
                    return
                group = make_group(attempt, step, tokens=8000 if ordinal % 3 == 0 else 5)
                if await buffer.commit(attempt, group):
                    os.write(told, f"{ordinal} {attempt.number} {codec.digest(codec.encode_group(group))}\\n".encode())

            await asyncio.gather(*(roll(slot.ordinal) for slot in slots))
            await buffer.close_rollout(step)
            await buffer.select(step)

from pathlib import Path
asyncio.run(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "new"))
"""


def write_and_kill(paths, witness: Path, new_epoch: bool, after_s: float, told: int = 0) -> None:
    """One life of a buffer process, ended `after_s` seconds from its `told`-th acknowledged group on. Its status is read from here
    in the middle of its writing, and after its death."""
    command = [sys.executable, "-c", WRITER, str(paths.root), str(witness), "new" if new_epoch else "same"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"ready\n"
    before = lines(witness)
    while lines(witness) < before + told and process.poll() is None:
        time.sleep(0.005)
    time.sleep(after_s)
    counts = read_status(paths)["ordinals"]
    assert counts["fetched"] == sum(counts[state] for state in counts if state != "fetched")
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    assert read_status(paths)["attempts"]["regenerated"] == 0


def lines(file: Path) -> int:
    return len(file.read_bytes().splitlines()) if file.exists() else 0


async def test_acknowledged_groups_survive_sigkill_at_any_moment(tmp_path):
    paths, witness = new_run(tmp_path), tmp_path / "witness"
    luck = random.Random(7)
    told: list[list[str]] = []
    for number in range(60):  # more than ten on a machine that is busy with other things
        write_and_kill(paths, witness, bool(number % 2), luck.uniform(0.0, 0.12), told=number % 5 * 2)
        told = [line.split() for line in witness.read_text().splitlines()]
        if number >= 9 and len(told) > 30:
            break
    assert len({ordinal for ordinal, _, _ in told}) == len(told), "rolled out twice"
    async with opened(paths, make_settings(tasks_per_step=6, max_staleness=0, capacity=6)) as buffer:
        groups = await buffer.read([int(ordinal) for ordinal, _, _ in told], columns=False)
        found = [[str(group.ordinal), str(group.attempt), codec.digest(codec.encode_group(group))] for group in groups]
        assert found == told
        taken = [ordinal for ordinals in (await buffer.steps())["selections"].values() for ordinal in ordinals]
        assert taken == sorted(set(taken))


async def test_a_restarted_buffer_lets_its_workers_commit(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        await buffer.assign(1, 2, None)
        attempt = await buffer.start_attempt(0, 0, "w")
    async with opened(paths) as buffer:
        assert await buffer.commit(attempt, make_group(attempt, 1))


async def test_a_new_cluster_loses_running_attempts_and_refuses_their_commits(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        await buffer.assign(1, 2, None)
        old = await buffer.start_attempt(0, 0, "w")
        done = await roll_out(buffer, 1, 1, ("teacher",))
    async with opened(paths, epoch=True) as driver:
        await driver.set_run("running")
    async with opened(paths) as buffer:
        status = await buffer.status()
        assert status["ordinals"]["pending"] == 1 and status["attempts"]["lost"] == 1
        with pytest.raises(LateCommit, match="run epoch"):
            await buffer.commit(old, make_group(old, 1))
        assert await buffer.commit(done, make_group(done, 1, ("teacher",))) is False
        assert [item.ordinal for item in await buffer.backlog("teacher", 9)] == [1]
        with pytest.raises(AttemptRefused):
            await buffer.start_attempt(1, 0, "w")
        new = await buffer.start_attempt(0, 0, "w")
        assert (new.number, new.failures, new.epoch) == (2, 0, 1)  # a lost attempt is no failure: its seeds are used again


async def test_samples_of_an_unfinished_group_outlive_the_cluster(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        await buffer.assign(1, 2, None)
        attempt = await buffer.start_attempt(0, 0, "w")
        sample = make_group(attempt, 1).samples[0]
        await buffer.store_sample(attempt, sample)
    async with opened(paths, epoch=True) as buffer:
        assert same(await buffer.stored_samples(0), [sample])


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.fault(39)
async def test_an_old_writer_is_fenced_out_in_every_call_and_nothing_of_it_is_merged(tmp_path, threaded):
    paths = new_run(tmp_path)
    async with opened(paths, threaded=threaded) as old:
        await old.assign(1, 2, None)
        attempt = await old.start_attempt(0, 0, "w")
        async with opened(paths, threaded=threaded) as new:
            with pytest.raises(FencedOut, match="newer writer"):
                await old.commit(attempt, make_group(attempt, 1, tokens=50_000))
            for call in (old.select(1), old.assign(2, 2, None), old.status(), old.wait_scored(1, 5), old.set_run("running")):
                with pytest.raises(FencedOut):
                    await call
            assert (await new.status())["ordinals"]["running"] == 1
            assert await new.commit(attempt, make_group(attempt, 1))
            (group,) = await new.read([0], False)
            assert group.attempt == 1


@pytest.mark.fault(39)
async def test_a_buffer_of_an_old_cluster_cannot_take_the_run_from_its_successor(tmp_path):
    """Ray restarts an actor wherever it is told to: also in a cluster that a resume has left behind."""
    paths = new_run(tmp_path)
    async with opened(paths, epoch=True) as driver:
        first = driver.run_epoch
    async with opened(paths, epoch=True) as new:
        left_behind = BufferService(paths, make_settings())
        with pytest.raises(FencedOut, match=f"run epoch {new.run_epoch}.* run epoch {first}"):
            await left_behind.open(run_epoch=first)
        await new.set_run("running")
        restarted = BufferService(paths, make_settings())
        await restarted.open(run_epoch=new.run_epoch)
        await restarted.close()


async def test_rows_live_in_segments_or_in_the_database_by_size(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        await buffer.assign(1, 2, None)
        await roll_out(buffer, 0, 1)
        assert list(paths.groups.glob("*.seg")) == []
        await roll_out(buffer, 1, 1, ("teacher",), tokens=8000)
        await buffer.mark_produced([make_column(1, tokens=60_000)])
        (segment,) = paths.groups.glob("*.seg")
        assert segment.stat().st_size > 12_000 * (1 + 4) + 120_000 * 4
        assert [group.ordinal for group in await buffer.read([0, 1], True)] == [0, 1]


async def test_damaged_and_lost_segments_are_named(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        await buffer.assign(1, 2, None)
        await roll_out(buffer, 0, 1, tokens=8000)
        path = segment_path(paths.groups, 1)
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(StoreCorrupt, match=r"000001\.seg"):
            await buffer.read([0], False)
        path.unlink()
        with pytest.raises(StoreCorrupt, match="rows of ordinal 0 are lost"):
            await buffer.read([0], False)


async def test_a_moved_run_folder_goes_on(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        await buffer.assign(1, 2, None)
        await roll_out(buffer, 0, 1, tokens=8000)
    moved = type(paths)(tmp_path / "elsewhere")
    paths.root.rename(moved.root)
    async with opened(moved, epoch=True) as buffer:
        assert len(await buffer.read([0], False)) == 1
        await roll_out(buffer, 1, 1)


async def test_rows_stay_until_the_last_but_one_checkpoint_covers_them(tmp_path):
    paths = new_run(tmp_path)
    settings = make_settings(keep_groups=3, segment_bytes=1)
    async with opened(paths, settings) as buffer:
        for step in range(1, 9):
            slots = await buffer.assign(step, 2, None)
            for slot in slots:
                await roll_out(buffer, slot.ordinal, step, tokens=8000)
            await buffer.close_rollout(step)
            await buffer.select(step)
            if step % 2 == 0:
                await buffer.mark_trained(step, f"c{step}")
                kept = [group.ordinal for group in await buffer.read(list(range(99)), False)]
                covered = max(0, 2 * (step - 2))
                assert kept == list(range(max(0, covered - 3), 2 * step))
                assert len(list(paths.groups.glob("*.seg"))) <= len(kept) + 1
        assert sqlite3.connect(paths.database).execute("SELECT count(*) FROM ledger WHERE rows_sha256 IS NULL").fetchone() == (0,)


async def test_without_keep_groups_nothing_is_evicted_and_gc_says_what_it_did(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        for step in (1, 2, 3):
            await fill_step(buffer, step)
            await buffer.select(step)
            await buffer.mark_trained(step, f"c{step}")
        assert await buffer.gc() == {"groups": 0, "bytes": 0}
    async with opened(paths, make_settings(keep_groups=1)) as buffer:
        assert await buffer.gc() == {"groups": 3, "bytes": 0}
        assert [group.ordinal for group in await buffer.read(list(range(6)), False)] == [3, 4, 5]


async def test_segments_of_dropped_groups_and_of_dead_writers_are_removed(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        await buffer.assign(1, 2, None)
        await roll_out(buffer, 0, 1, tokens=8000)
    (paths.groups / "000007.seg").write_bytes(b"written by someone who died before the transaction")
    async with opened(paths) as buffer:
        await roll_out(buffer, 1, 1, tokens=8000)
        assert await buffer.discard(0, "scoring")
        assert [path.name for path in paths.groups.glob("*.seg")] == ["000008.seg"]


async def test_opening_twice_the_same_way_changes_no_counts(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        await fill_step(buffer, 1)
        before = await buffer.status()
    async with opened(paths) as buffer:
        assert await buffer.status() == before


async def test_a_foreign_group_number_is_no_crash(tmp_path):
    async with opened(new_run(tmp_path)) as buffer:
        with pytest.raises(RolloutError, match="ordinal 5 was never assigned"):
            await buffer.start_attempt(5, 0, "w")
