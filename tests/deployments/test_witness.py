"""The lines beside the ledger: written when they are true, and whole."""

import json
import sqlite3
from multiprocessing import get_context

import pytest

from deployments.witness import CommitWitness, TrainWitness, append_line
from pipeline.errors import LateCommit
from tests.pipeline.buffer.helpers import make_group, new_run, opened, roll_out


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


async def test_a_commit_is_witnessed_once_it_is_acknowledged(tmp_path):
    paths = new_run(tmp_path)
    async with opened(paths) as buffer:
        witness = CommitWitness(buffer, tmp_path / "commits")
        await witness.assign(1, 2, None)
        first = await witness.start_attempt(0, 0, "w")
        second = await witness.start_attempt(0, 0, "w")
        with pytest.raises(LateCommit):
            await witness.commit(first, make_group(first, 1))
        assert lines(tmp_path / "commits") == []
        await witness.commit(second, make_group(second, 1))
        (line,) = lines(tmp_path / "commits")
    assert (line["ordinal"], line["attempt"]) == (0, 2)
    stored = sqlite3.connect(paths.database).execute("SELECT rows_sha256 FROM ledger WHERE ordinal = 0").fetchone()
    assert stored == (line["sha256"],)


async def test_what_was_read_is_what_was_trained(tmp_path):
    async with opened(new_run(tmp_path)) as buffer:
        witness = TrainWitness(buffer, tmp_path / "trained")
        await witness.assign(1, 2, None)
        for ordinal in (0, 1):
            await roll_out(buffer, ordinal, 1)
        await witness.close_rollout(1)
        await witness.select(1)
        await witness.read([1, 0], True)
        await witness.record_step(1, {"weights": "abc"})
        (line,) = lines(tmp_path / "trained")
        assert (line["step"], line["ordinals"], line["weights"]) == (1, [1, 0], "abc")
        assert (await buffer.steps())["trained_step"] == 1


def _append(path, writer):
    for number in range(200):
        append_line(path, writer=writer, number=number, filler="x" * 300)


def test_lines_of_several_processes_stay_whole(tmp_path):
    context = get_context("spawn")
    writers = [context.Process(target=_append, args=(tmp_path / "log", number)) for number in range(3)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    found = [(line["writer"], line["number"]) for line in lines(tmp_path / "log")]
    assert sorted(found) == [(writer, number) for writer in range(3) for number in range(200)]
