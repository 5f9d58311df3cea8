"""`rollout status` and `rollout report`, on a real ledger."""

import json

import pytest
import typer
from typer.testing import CliRunner

from pipeline.cli import report, status
from pipeline.errors import UserError
from tests.pipeline.buffer.helpers import fill_step, new_run, opened
from tests.pipeline.observe.fakes import write_evaluation


@pytest.fixture
def app():
    made = typer.Typer()
    status.register(made)
    report.register(made)
    return made


@pytest.fixture
async def runs(tmp_path):
    for name in ("first", "second"):
        paths = new_run(tmp_path, name, steps=4)
        paths.config.write_text("run:\n  name: words\n")
        async with opened(paths) as buffer:
            await fill_step(buffer, 1)
            await buffer.select(1)
            await buffer.record_step(1, {"loss": 1.5, "reward_mean": None})
    write_evaluation(paths, "eval_000000", 0.25, items=20)
    return tmp_path


def call(app, runs, *arguments):
    return CliRunner().invoke(app, [*arguments, "--runs-dir", str(runs)], catch_exceptions=False)


def test_status_as_json_is_one_object_that_adds_up(app, runs):
    found = json.loads(call(app, runs, "status", "first", "--json").stdout)
    ordinals = found["ordinals"]
    assert sum(count for name, count in ordinals.items() if name != "fetched") == ordinals["fetched"] == 2
    assert found["run_id"] == "first" and found["step"] == 1 and found["steps"] == 4


def test_status_of_one_run_for_people(app, runs):
    text = call(app, runs, "status", "first").stdout
    assert "first" in text and "step 1/4" in text and "consumed" in text


def test_status_lists_all_runs(app, runs):
    (runs / "broken").mkdir()
    (runs / "broken" / "config.yaml").write_text("")
    rows = {row["run_id"]: row for row in json.loads(call(app, runs, "status", "--json").stdout)["runs"]}
    assert rows["second"]["accuracy_before"] == 0.25 and rows["first"]["step"] == 1
    assert rows["broken"]["state"] == "unreadable" and rows["broken"]["error"]
    text = call(app, runs, "status").stdout
    assert "second" in text and "25.0 %" in text and "broken" in text


def test_status_without_runs_says_where_it_looked(app, tmp_path):
    assert str(tmp_path) in call(app, tmp_path, "status").stdout


def test_report_prints_the_path_of_what_it_wrote(app, runs):
    path = runs / "second" / "report.html"
    assert call(app, runs, "report", "second").stdout.strip() == str(path)
    assert "25.0 %" in path.read_text()


def test_report_draws_the_learning_curve_alone(app, runs, tmp_path):
    out = tmp_path / "curve.png"
    assert call(app, runs, "report", "second", "--picture", str(out)).stdout.strip() == str(out)
    assert out.read_bytes().startswith(b"\x89PNG") and not (runs / "second" / "report.html").exists()
    with pytest.raises(UserError, match="none/curve.png cannot be written: No such file"):
        call(app, runs, "report", "second", "--picture", str(tmp_path / "none" / "curve.png"))


@pytest.mark.parametrize("command", ["status", "report"])
def test_an_unknown_run_is_refused_with_the_nearest(app, runs, command):
    with pytest.raises(UserError, match="first"):
        call(app, runs, command, "frist")
