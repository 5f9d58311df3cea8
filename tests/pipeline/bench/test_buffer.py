"""The buffer's figures are there, whatever the disk."""

from __future__ import annotations

from pipeline.bench import buffer


async def test_commits_of_small_and_large_groups_are_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(buffer, "SHAPES", ((2, 16, 8), (4, 32, 4)))
    found = await buffer.figures(tmp_path)
    assert {"over_raw_2x16", "p99_ms_4x32", "groups_per_s_4x32"} <= found.keys() and min(found.values()) > 0
