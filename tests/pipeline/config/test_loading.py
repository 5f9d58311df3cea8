import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipeline.config.loading import dump, flatten, load
from pipeline.errors import ConfigError

MINIMAL = {
    "student": {"architecture": {}},
    "teachers": {"t": {"architecture": {}, "supervised": {}}},
    "datasets": {"words": {"generator": "spell_backward"}},
}


def write(folder: Path, data=MINIMAL) -> Path:
    path = folder / "run.yaml"
    path.write_text(data if isinstance(data, str) else yaml.safe_dump(data))
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load(path, overrides)
    return str(caught.value)


@pytest.mark.fault(24)
def test_origin_of_every_value_is_known(tmp_path):
    loaded = load(write(tmp_path, {**MINIMAL, "trainer": {"steps": 7}}), ["trainer.lr=0.5", "rollout.sampling={top_k: 3}"])
    assert (loaded.config.trainer.steps, loaded.origins["trainer.steps"]) == (7, "file")
    assert (loaded.config.trainer.lr, loaded.origins["trainer.lr"]) == (0.5, "override")
    assert (loaded.config.rollout.sampling.top_k, loaded.origins["rollout.sampling.top_k"]) == (3, "override")
    assert loaded.origins["trainer.seed"] == "default"
    assert loaded.origins["datasets.words.generator"] == "file"
    assert set(loaded.origins) == set(flatten(loaded.config))


def test_override_reaches_into_lists_and_makes_missing_sections(tmp_path):
    path = write(tmp_path, {**MINIMAL, "specs": [{"agent": "single_turn"}]})
    config = load(path, ["specs.0.batch_size=null", "layout.nodes.a=[0, 1]", "eval.k=[1]"]).config
    assert config.specs[0].batch_size is None
    assert config.layout.nodes == {"a": (0, 1)}


@pytest.mark.parametrize("override", [[], ["layout=cluster.json", "layout.nodes.b=[2]"]])
def test_a_layout_may_be_a_file_of_its_own(tmp_path, override):
    (tmp_path / "cluster.json").write_text('{"nodes": {"a": [0, 1], "b": {"gpus": [0], "cpu": 8}}, "default_memory_gb": 32}')
    if not override:
        loaded = load(write(tmp_path, {**MINIMAL, "layout": "cluster.json"}))
        assert loaded.config.layout.nodes["b"].cpu == 8
        assert loaded.origins["layout.nodes.b.cpu"] == loaded.origins["layout.nodes.a"] == "file"
    else:
        loaded = load(write(tmp_path), override[:1])
        assert loaded.origins["layout.default_memory_gb"] == "override"
        assert "layout is 'cluster.json', which has no keys" in refusal(write(tmp_path), *override)
    assert loaded.config.layout.nodes["a"] == (0, 1) and loaded.config.layout.default_memory_gb == 32


def test_a_layout_file_that_is_not_there_or_wrong_is_refused(tmp_path):
    path = write(tmp_path, {**MINIMAL, "layout": "cluster.yaml"})
    assert f"{tmp_path / 'cluster.yaml'}: no such configuration file" in refusal(path)
    (tmp_path / "cluster.yaml").write_text("nodes: {a: {gpsu: [0]}}")
    assert "unknown key layout.nodes.a.gpsu; did you mean layout.nodes.a.gpus?" in refusal(path)


def test_repairs_run_four_at_a_time_unless_said(tmp_path):
    specs = [{"task_type": "swe", "resource": {"cpu": 1}}, {"task_type": "swe2"}, {"task_type": "swe", "evaluator_id": "x"}]
    path = write(tmp_path, {**MINIMAL, "specs": [*specs, {"task_type": "single_turn", "resource": {"cpu": 2}}]})
    loaded = load(path, ["specs.2.resource.concurrency=6"])
    assert [spec.resource.concurrency for spec in loaded.config.specs] == [4, 64, 6, 64]
    assert loaded.config.specs[0].resource.cpu == 1 and loaded.origins["specs.0.resource.concurrency"] == "default"


@pytest.mark.parametrize(
    ("override", "wanted"),
    [
        ("trainer.stepz=3", "unknown key trainer.stepz; did you mean trainer.steps?"),
        ("trainr.steps=3", "unknown key trainr; did you mean trainer?"),
        ("lr=1", "unknown key lr; did you mean trainer.lr?"),
        ("rollout.temperature=1", "unknown key rollout.temperature; did you mean rollout.sampling.temperature?"),
        ("teachers.t.smothing=0", "unknown key teachers.t.smothing; did you mean teachers.t.smoothing?"),
        ("specs=[{agnt: x}]", "unknown key specs.0.agnt; did you mean specs.0.agent?"),
        ("layout.nodes.a={gpsu: [0]}", "unknown key layout.nodes.a.gpsu; did you mean layout.nodes.a.gpus?"),
        ("layout.nodes.a=[0, x]", "layout.nodes.a.1: 'x': input should be a valid integer"),
        ("rollout.samples_per_task=0", "rollout.samples_per_task: 0 is out of bounds, must be >= 1"),
        (
            "algorithm.name=gpro",
            "algorithm.name: 'gpro' is not one of 'opd', 'grpo', 'grpo_opd', 'dagger', 'aggrevate' or 'iter_sft'; "
            "did you mean 'grpo'?",
        ),
        ("trainer.steps=many", "trainer.steps: 'many': input should be a valid integer"),
        ("buffer.capacity=3", "buffer.capacity 3 is below 64 = rollout.tasks_per_step 32 * (rollout.max_staleness 1 + 1)"),
        ("datasets.words.task_type=swe", "datasets.words.task_type 'swe' has no spec; specs cover ['single_turn']"),
        ("student.path=x", "student: give exactly one of path, package, architecture"),
        ("trainer.steps", "is not of the form key.path=value"),
        ("trainer.steps.x=1", "trainer.steps is 7, which has no keys"),
        ("trainer.steps=[1", "the value is not valid YAML"),
    ],
)
def test_bad_override_is_one_clear_line(tmp_path, override, wanted):
    text = refusal(write(tmp_path, {**MINIMAL, "trainer": {"steps": 7}}), override)
    assert wanted in text
    assert len(text.splitlines()) == 1


@pytest.mark.fault(24)
def test_every_fault_gets_its_own_line(tmp_path):
    lines = refusal(write(tmp_path), "trainer.lr=-1", "trainer.seeds=1", "eval.n=0").splitlines()
    assert len(lines) == 3
    assert all(line.startswith(str(tmp_path / "run.yaml")) for line in lines)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", "holds a nothing, not a mapping"),
        ("- a\n- b\n", "holds a list, not a mapping"),
        ("student: {a\nb: 1\n", "run.yaml:2:2: not valid YAML"),
        ("run: {seed: 1}\nrun: {seed: 2}\n", "run.yaml:2:1: not valid YAML: key 'run' is given twice"),
        ("run: {seed: 1}\n", "student: this key is required and missing"),
    ],
)
def test_bad_file_is_refused_with_its_line(tmp_path, text, wanted):
    assert wanted in refusal(write(tmp_path, text))


def test_missing_file(tmp_path):
    assert "no such configuration file" in refusal(tmp_path / "none.yaml")


def test_paths_are_relative_to_the_file(tmp_path, monkeypatch):
    data = {**MINIMAL, "student": {"path": "model"}, "datasets": {"d": {"source": "jsonl", "path": "sub/d.jsonl"}}}
    path = write(tmp_path, data)
    monkeypatch.chdir(path.parent.parent)
    config = load(path, ["rollout.reuse=file:old.bin"]).config
    assert config.datasets["d"].path == tmp_path / "sub/d.jsonl"
    assert config.student.path == tmp_path / "model"
    assert config.rollout.reuse == f"file:{tmp_path}/old.bin"
    assert load(path, ["rollout.reuse=run:abc"]).config.rollout.reuse == "run:abc"


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["layout.nodes={a: [0], b: {gpus: [1, 2], cpu: 4, memory_gb: 2}}", "layout.default_cpu=3", "layout.default_memory_gb=1.5"],
        ["engine.kind=scripted", "engine.script={tokens_by_ordinal: {3: 4}, fail_by_ordinal: {1: hang}}"],
        ["datasets.words.params={min_word_len: 3, note: 'é: 1'}", "run.name='on'", "trainer.lr=1e-5", "eval.k=[1]"],
    ],
)
def test_dump_loads_back_equal(tmp_path, overrides):
    config = load(write(tmp_path), overrides).config
    again = tmp_path / "config.yaml"
    again.write_text(dump(config))
    loaded = load(again)
    assert loaded.config == config
    assert "default" not in loaded.origins.values()


def test_loading_is_light():
    script = (
        "import sys, time; t = time.process_time(); import pipeline.config.loading; s = time.process_time() - t\n"
        "assert not {'ray', 'torch', 'transformers'} & set(sys.modules)\n"
        "print(s)"
    )
    seconds = min(float(subprocess.run([sys.executable, "-c", script], capture_output=True, check=True).stdout) for _ in range(3))
    assert seconds < 0.5


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("engine.kind=vllm", "engine 'vllm' needs exactly one of url and launch; got neither"),
        ("engine.url=http://host", "url is for the engines openai, vllm, sglang; the engine is 'torch'"),
        ("engine={kind: openai, launch: {python: p}}", "cannot be launched"),
        ("engine={kind: vllm, url: host}", "does not start with http"),
        ("engine={kind: vllm, url: 'http://host', served_model: x}", "served_model is for the engine openai"),
        ("teachers.t={engine: openai, url: 'http://host', architecture: {}}", "needs `path`"),
    ],
)
def test_a_server_that_does_not_fit_its_engine_is_refused(tmp_path, override, message):
    assert message in refusal(write(tmp_path), override)


def test_a_launched_engine_is_one_line_and_its_interpreter_lies_beside_the_file(tmp_path):
    engine = load(write(tmp_path), ["engine={kind: vllm, launch: {python: env/bin/python}}"]).config.engine
    assert engine.launch.python == tmp_path / "env/bin/python"
    engine = load(write(tmp_path), ["engine={kind: sglang, url: ['http://a:1', 'http://b:1']}"]).config.engine
    assert engine.urls == ("http://a:1", "http://b:1")
