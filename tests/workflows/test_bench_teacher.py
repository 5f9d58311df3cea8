"""The benchmark's workload as whole runs: the figures that are promised, from runs that end."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.bench.teacher import Workload
from workflows import bench_teacher


@pytest.mark.slow
def test_three_whole_runs_give_the_figures_that_are_promised(tmp_path: Path) -> None:
    found = bench_teacher.figures(Workload(steps=3, groups=2, permits=4), tmp_path)
    assert found.keys() == {
        "ray_stage_over_inline", "ray_stage_over_none", "ray_stage_over_bound", "ray_permits_while_scoring_stage",
        "ray_permits_while_scoring_inline", "ray_stage_s", "ray_inline_s", "ray_none_s", "ray_train_s", "ray_hop_s", "ray_select_s",
    }  # fmt: skip
    assert found["ray_stage_over_none"] == pytest.approx(found["ray_stage_s"] / found["ray_none_s"])
    # Step 3 rolls out once step 1 is trained: two rollouts of 0.1 s or more follow one another, and two calls of 0.09 s.
    assert found["ray_hop_s"] > 0 and found["ray_select_s"] > 0
    assert found["ray_none_s"] > 0.2 and found["ray_inline_s"] > 0.38 and found["ray_stage_s"] > 0.38
