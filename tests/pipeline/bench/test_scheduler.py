"""The scheduler keeps its costs and fills its pool; the figures are those that the command names."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from pipeline.bench import scheduler
from pipeline.bench.scheduler import Jobs, makespan_ratio, us_per_sample
from pipeline.cli.main import build_app, run


@pytest.mark.slow
def test_the_makespan_is_near_its_lower_bound_also_with_the_patience_on():
    assert makespan_ratio(Jobs.draw(0), "fifo") <= 1.05
    assert makespan_ratio(Jobs.draw(7), "longest_first") <= 1.05


def test_a_lower_bound_is_the_work_or_the_longest_batch():
    assert Jobs((4, 4), (1.0, 3.0), capacity=8).bound_s() == 3.0
    assert Jobs((8, 8), (1.0, 3.0), capacity=8).bound_s() == 4.0
    assert makespan_ratio(Jobs((8, 8), (1.0, 3.0), capacity=8), "fifo") == pytest.approx(1.0)


def test_costs_do_not_grow_with_the_number_of_samples():
    few, many = us_per_sample(1_000), us_per_sample(20_000)
    assert many < 3 * few and many < 100  # bounds that hold on a busy machine; the figures are the command's


@pytest.mark.slow
def test_the_figures_have_the_names_that_are_promised():
    found = scheduler.figures(sizes=(1000,), seeds=(0,), episodes=400)
    assert {"us_per_sample_1e3", "makespan_ratio", "us_per_episode", "kb_per_episode", "us_per_episode_committed"} <= found.keys()
    assert all(value > 0 for name, value in found.items() if name != "kb_per_episode")


@pytest.mark.slow
def test_the_command_prints_one_object_and_nothing_else(tmp_path):
    shown = CliRunner().invoke(build_app(), ["bench", "teacher", "--shape", "tiny", "--json", "--runs-dir", str(tmp_path)])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["figures"].keys() == {"call32_over_8x4", "call32_s", "calls_8x4_s"}


def test_options_of_one_bench_are_refused_by_the_others(capsys):
    assert run(["bench", "buffer", "--shape", "tiny"]) == 2
    assert "--config and --shape are options of other benches, not of buffer" in capsys.readouterr().err
    assert run(["bench", "nothing"]) == 2
