import math

import pytest

from pipeline.observe.timeline import (
    TimelineWriter,
    busy_seconds,
    first_step_seconds,
    in_flow_order,
    occupancy,
    picture,
    read_timeline,
    run_seconds,
    snapshot,
    thin,
)
from tests.pipeline.observe.fakes import status


def row(t, step=0, **stages):
    return {
        "t": t,
        "step": step,
        "states": {},
        "stages": {name: {"pid": pid, "busy_s": busy} for name, (pid, busy) in stages.items()},
    }


def test_a_snapshot_holds_what_the_plots_need():
    made = snapshot(status(10), 5.0)
    assert made["step"] == 10 and made["version"] == 10 and made["t"] == 5.0
    assert "fetched" not in made["states"] and made["states"]["running"] == 17
    assert made["stages"]["trainer"].keys() == {"pid", "in", "out", "backlog", "oldest_s", "busy_s"}
    assert made["capacity"] == {"total": 64, "used": 32}


def test_the_file_grows_slowly_with_the_length_of_the_run(tmp_path):
    writer = TimelineWriter(tmp_path / "stages.jsonl", started_at=0.0)
    second = sum(writer.append({}, float(t)) for t in range(3600))
    day = sum(writer.append({}, float(t)) for t in range(3600, 24 * 3600))
    assert second == 3600
    assert day < 3 * 3600 * math.log(24)
    assert len(read_timeline(tmp_path / "stages.jsonl")) == second + day + 1


def test_the_start_of_a_run_is_written_once(tmp_path):
    path = tmp_path / "stages.jsonl"
    TimelineWriter(path, started_at=100.0).append(status(0), 110.0)
    TimelineWriter(path, started_at=500.0).append(status(1), 510.0)
    assert [line["t"] for line in read_timeline(path)] == [100.0, 110.0, 510.0]


def test_time_between_stop_and_resume_does_not_count_but_start_up_does():
    rows = [row(0), row(50), row(51), row(5000), row(5001, step=1)]
    assert run_seconds(rows) == [0, 50, 51, 51, 52]
    assert first_step_seconds(rows) == 52
    assert first_step_seconds(rows[:-1]) is None
    assert run_seconds([]) == []


def test_busy_seconds_add_up_over_restarts_of_a_stage():
    rows = [row(0, trainer=(1, 2.0)), row(1, trainer=(1, 5.0)), row(2, trainer=(2, 0.5)), row(3, trainer=(2, 1.5)), row(4)]
    assert busy_seconds(rows) == {"trainer": 6.5}


def test_occupancy_is_the_slope_of_busy_time_and_a_restart_is_a_gap():
    rows = [row(0, trainer=(1, 0.0)), row(2, trainer=(1, 1.0)), row(3, trainer=(2, 0.9)), row(4), row(5, trainer=(2, 1.0))]
    shares = occupancy(rows)["trainer"]
    assert shares[1] == pytest.approx(0.5)
    assert all(math.isnan(shares[index]) for index in (0, 2, 3, 4))


def test_the_picture_of_a_run_is_by_seconds_that_it_ran_and_has_a_bound():
    rows = [row(100), row(110, trainer=(1, 0.0)), row(112, step=1, trainer=(1, 1.0)), row(900, trainer=(2, 0.1))]
    shown = picture(rows)
    assert [(point["seconds"], point["step"]) for point in shown] == [(0, 0), (10, 0), (12, 1), (12, 0)]
    assert [point["stages"].get("trainer", {}).get("busy") for point in shown] == [None, None, 0.5, None]
    assert picture([]) == []
    many = picture([row(second) for second in range(5000)])
    assert len(many) == 400 and many[-1]["seconds"] == 4999


def test_thinning_keeps_both_ends():
    assert thin(list(range(1000)), 5) == [0, 250, 500, 749, 999]
    assert thin([1, 2], 5) == [1, 2]


def test_stages_are_shown_in_the_order_of_the_flow():
    shuffled = ["zeta", "trainer", "replay_buffer", "fetcher", "alpha"]
    assert in_flow_order(shuffled) == ["fetcher", "replay_buffer", "trainer", "alpha", "zeta"]
