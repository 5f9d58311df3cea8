"""The comparison itself: who is measured, and that a side which loses rows is found out."""

from __future__ import annotations

import pytest

from pipeline.bench.buffer import Commits, RawAppends, Shape, bench_config, compare
from pipeline.buffer.settings import BufferSettings
from pipeline.errors import RolloutError
from tests.pipeline.buffer.helpers import new_run, opened

SHAPES = (Shape(2, 16, 8), Shape(4, 32, 4))


@pytest.fixture
async def commits(tmp_path):
    settings = BufferSettings.from_config(bench_config(SHAPES, rounds=2))
    async with opened(new_run(tmp_path), settings) as buffer:
        yield Commits(buffer)


async def test_commits_of_every_shape_are_measured_beside_the_others(commits, tmp_path):
    found = await compare(commits, {"raw": RawAppends(tmp_path / "raw")}, SHAPES, rounds=2)
    names = {f"{key}_{shape}" for key in ("over_raw", "mb_per_s", "groups_per_s", "p99_ms") for shape in ("2x16", "4x32")}
    assert found.keys() == names and min(found.values()) > 0


async def test_a_side_that_gives_back_other_rows_has_no_figure(commits, tmp_path):
    class Forgetful(RawAppends):
        async def take_back(self, groups):
            returned = await super().take_back(groups)
            returned[-1]["logprobs"][0, 0] += 1
            return returned

    with pytest.raises(RolloutError, match="forgetful gave back other rows"):
        await compare(commits, {"forgetful": Forgetful(tmp_path / "raw")}, SHAPES, rounds=1)
