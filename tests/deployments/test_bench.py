"""What commits are compared with, where the package to compare them with is missing."""

from __future__ import annotations

from deployments import bench
from pipeline.paths import RunPaths


def test_a_missing_extra_is_named_and_the_other_side_is_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(bench, "find_spec", lambda name: None)
    sides, (note,) = bench.other_sides(RunPaths(tmp_path / "run"))
    assert list(sides) == ["raw"]
    assert "over_transferqueue_*: not measured" in note and "pip install 'rollout-pipeline[bench]'" in note
