"""The measurement runs and its figures are figures."""

from __future__ import annotations

from pipeline.buffer.bench import measure_commits


async def test_commits_are_measured_beside_raw_appends(tmp_path):
    figures = await measure_commits(tmp_path, rows=2, tokens=16, groups=8)
    assert set(figures) == {"groups_per_s", "mb_per_s", "p50_ms", "p99_ms", "raw_mb_per_s", "over_raw"}
    assert all(value > 0 for value in figures.values())
