import json

from rich.console import Console

from pipeline.observe.summary import build_summary, read_summary, write_summary
from pipeline.observe.tables import duration, percent, render_runs, render_status, render_table
from pipeline.paths import RunPaths
from tests.pipeline.observe.fakes import STEPS, make_run, status, write_evaluation


def text_of(renderable, width=100):
    console = Console(width=width, record=True, file=open("/dev/null", "w"), markup=False)
    console.print(renderable)
    return console.export_text()


def test_the_summary_has_what_the_contract_names(tmp_path):
    paths = make_run(tmp_path)
    summary = build_summary(paths, status(STEPS, state="finished"))
    write_summary(paths, summary)
    assert read_summary(paths.summary) == summary == json.loads(paths.summary.read_text())
    assert (summary["accuracy_before"], summary["accuracy_after"], summary["accuracy_teacher"]) == (0.128, 0.868, 0.928)
    assert summary["by_dataset"] == {"spell_backward": {"before": 0.128, "after": 0.868, "teacher": 0.928}}
    assert summary["steps"] == STEPS and summary["state"] == "finished"
    assert sum(count for name, count in summary["ordinals"].items() if name != "fetched") == summary["ordinals"]["fetched"]
    assert sum(summary["dropped_by_reason"].values()) == summary["ordinals"]["dropped"]
    assert list(summary["seconds"]) == ["fetcher", "batcher", "evaluator_pool", "teacher_scorer", "replay_buffer", "trainer"]
    assert 80 < summary["seconds"]["evaluator_pool"] < 95
    assert summary["first_step_s"] == 10.0
    assert summary["versions"]["before"] == 0 and summary["versions"]["after"] == STEPS
    assert "python" in summary["versions"]["packages"]


def test_what_was_not_measured_is_null(tmp_path):
    paths = RunPaths(tmp_path / "new")
    paths.root.mkdir()
    summary = build_summary(paths, {})
    for name in ("accuracy_before", "accuracy_after", "accuracy_teacher", "first_step_s", "seconds_total", "state"):
        assert summary[name] is None
    assert summary["steps"] == 0 and summary["by_dataset"] == {}


def test_unscored_samples_are_outside_the_accuracy_and_an_invalid_evaluation_is_not_the_result(tmp_path):
    paths = RunPaths(tmp_path / "run")
    write_evaluation(paths, "eval_000000", 0.1)
    write_evaluation(paths, "eval_000020", 0.5, items=100, unscored=10)
    write_evaluation(paths, "eval_000040", 0.9, items=100, unscored=50)
    summary = build_summary(paths, {})
    assert summary["accuracy_before"] == 0.1
    assert summary["accuracy_after"] == 0.5
    assert summary["versions"]["after"] == 20


def test_a_run_without_a_first_evaluation_has_no_before(tmp_path):
    paths = RunPaths(tmp_path / "run")
    write_evaluation(paths, "eval_000020", 0.5)
    summary = build_summary(paths, {})
    assert summary["accuracy_before"] is None and summary["accuracy_after"] == 0.5


def test_several_teachers_are_pooled(tmp_path):
    paths = RunPaths(tmp_path / "run")
    write_evaluation(paths, "teacher_one", 1.0, items=100)
    write_evaluation(paths, "teacher_two", 0.5, items=100)
    assert build_summary(paths, {})["accuracy_teacher"] == 0.75


def test_the_table_fits_a_terminal_and_says_where_the_files_are(tmp_path):
    paths = make_run(tmp_path)
    text = text_of(render_table(build_summary(paths, status(STEPS, state="finished")), paths), width=200)
    figures = ("12.8 %", "86.8 %", "+74.0 points", "92.8 %", "3840", "zero_advantage 3")
    for part in ("finished", *figures, "evaluator_pool", "metrics.jsonl", str(paths.root)):
        assert part in text
    narrow = text_of(render_table(build_summary(paths, status(STEPS)), RunPaths(tmp_path)), width=80)
    assert max(map(len, narrow.splitlines())) <= 80 and "+74.0 points" in narrow


def test_markup_in_names_is_shown_and_not_obeyed(tmp_path):
    summary = {**build_summary(RunPaths(tmp_path / "x"), {}), "run_id": "[red]x", "error": "list[int] is [bold]bad"}
    dropped = {"dropped_by_reason": {"filter[dapo]": 2}, "stages": {"[red]x": {"node": "[bold]"}}}
    text = "".join(map(text_of, (render_table(summary, RunPaths(tmp_path)), render_status(summary | dropped))))
    for part in ("[red]x", "list[int] is [bold]bad", "filter[dapo] 2", "[bold] "):
        assert part in text
    row = {"run_id": "[red]x", "path": "runs/[/red]", "error": "no [bench]"}
    assert all(part in text_of(render_runs([row])) for part in ("[red]x", "runs/[/red]", "no [bench]"))


def test_status_shows_stages_with_pid_backlog_and_oldest():
    text = text_of(render_status({**status(50, state="failed"), "error": "stage trainer: out of memory"}))
    for part in ("failed", "step 50/120", "evaluator_pool", "4102", "0.8 s", "stage trainer: out of memory", "regenerated 0"):
        assert part in text
    assert "unknown" in text_of(render_status({}))


def test_the_list_of_runs_shows_accuracies_as_percent():
    row = {
        "run_id": "a",
        "state": "running",
        "step": 3,
        "steps": 9,
        "accuracy_before": 0.1,
        "accuracy_after": None,
        "path": "runs/a",
    }
    text = text_of(render_runs([row]))
    assert "3/9" in text and "10.0 % → –" in text


def test_units():
    assert [duration(value) for value in (None, 0.25, 59.9, 60)] == ["–", "0.2 s", "59.9 s", "1 min 00 s"]
    assert [duration(value) for value in (59.97, 245, 3599.9, 7620)] == ["1 min 00 s", "4 min 05 s", "1 h 00 min", "2 h 07 min"]
    assert [percent(value) for value in (None, 0.0, 0.868)] == ["–", "0.0 %", "86.8 %"]
