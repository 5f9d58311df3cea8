"""`rollout eval`: a run's newest checkpoint, or a model folder, by the same code as every other evaluation."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file, save_file

from pipeline.engines.digests import model_digest
from pipeline.fetcher.catalog import Catalog
from pipeline.paths import RunPaths


@pytest.fixture
def small(config_file) -> Path:
    """The configuration with a tiny student and two data sets."""
    data = yaml.safe_load(config_file.read_text())
    data["student"] = {"architecture": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 16}}
    data["datasets"]["e"] = data["datasets"]["d"] | {"train": False}
    data["algorithm"] = {"name": "grpo"}
    del data["teachers"]
    config_file.write_text(yaml.safe_dump(data))
    return config_file


@pytest.fixture
def run(small, tmp_path) -> RunPaths:
    """A run folder with one complete checkpoint and one torn, newer one."""
    from pipeline.cli.runs import create_run_folder
    from pipeline.config.loading import read_config
    from pipeline.trainer import checkpoints
    from pipeline.trainer.assets import student_folder

    paths = create_run_folder(tmp_path / "runs", read_config(small), "r1", None)
    config = read_config(paths.config).config
    student = student_folder(config, Catalog(config), paths.cache)

    def write(folder: Path) -> None:
        for file in student.iterdir():
            if file.name != "manifest.json":
                (folder / file.name).write_bytes(file.read_bytes())

    for step in (4, 8):
        checkpoints.save(paths, step, {}, write_model=write, state={}, epoch=1, fence=lambda: None)
    (paths.checkpoint(8) / "model.safetensors").write_bytes(b"torn")
    return paths


def test_a_run_is_evaluated_at_its_newest_complete_checkpoint(rollout, run, tmp_path):
    root = tmp_path / "runs"
    code, out, err = rollout("eval", "r1", "eval.items=3", "eval.n=2", "eval.k=[1, 2]", "--json", "--runs-dir", root)
    assert code == 0, err
    found = json.loads(out)
    assert found["weight_version"] == 4 and Path(found["model"]) == run.checkpoint(4) and found["valid"]
    assert {name: figures["total"] for name, figures in found["results"].items()} == {"d": 6, "e": 6}
    assert set(found["results"]["d"]["pass@k"]) == {"1", "2"} and found["seconds"] > 0
    lines = (Path(found["artefacts"]) / f"{found['id']}.jsonl").read_text().splitlines()
    assert len(lines) == 12 and Path(found["artefacts"]).parent == root / ".evals"
    code, out, _ = rollout("eval", run.root, "eval.items=3", "--runs-dir", root)
    assert code == 0 and "weight version 4" in out and "all" in out


def test_a_checkpoint_knows_its_run_and_another_model_needs_a_configuration(rollout, run, small, tmp_path):
    root = tmp_path / "runs"
    for target in (run.checkpoint(4), "r1/checkpoints/step_000004"):
        code, out, err = rollout("eval", target, "eval.items=2", "--json", "--runs-dir", root)
        assert code == 0 and json.loads(out)["weight_version"] == 4, err
    (student,) = (folder for folder in (root / ".cache" / "students").iterdir() if not folder.name.startswith("."))
    code, _, err = rollout("eval", student, "--runs-dir", root)
    assert code == 2 and "say which configuration's data sets" in err
    code, out, _ = rollout("eval", student, small, "eval.items=2", "--json", "--runs-dir", root)
    same = json.loads(out)
    assert code == 0 and same["weight_version"] == 0 and model_digest(student) == model_digest(run.checkpoint(4))
    assert same["results"] == json.loads(rollout("eval", "r1", "eval.items=2", "--json", "--runs-dir", root)[1])["results"]


def test_a_teacher_that_plays_is_what_the_model_is_measured_by(rollout, run, small, tmp_path):
    data = yaml.safe_load(small.read_text())
    data |= {"algorithm": {"name": "dagger"}, "teachers": {"key": {"engine": "reference"}}, "eval": {"items": 3, "beta": 1.0}}
    small.write_text(yaml.safe_dump(data))
    other = tmp_path / "other"
    shutil.copytree(run.checkpoint(4), other)
    weights = load_file(other / "model.safetensors")
    save_file({name: 0 * values for name, values in weights.items()}, other / "model.safetensors", {"format": "pt"})

    code, out, err = rollout("eval", other, small, "--json", "--runs-dir", tmp_path / "runs")
    found = json.loads(out)
    assert code == 0 and found["overall"]["solved"] == found["overall"]["total"] == 6, err
    turns = (Path(found["artefacts"]) / f"{found['id']}.turns.jsonl").read_text().splitlines()
    assert found["imitation"]["tokens"] == sum(json.loads(turn)["tokens"] for turn in turns) > 6
    vocabulary = len(json.loads((other / "tokenizer.json").read_text())["model"]["vocab"])
    assert found["imitation"]["after"] == pytest.approx(np.log(vocabulary), rel=0.02)
    assert found["imitation"]["before"] != found["imitation"]["after"]
    code, out, _ = rollout("eval", other, small, "--runs-dir", tmp_path / "runs")
    assert code == 0 and f"{found['imitation']['before']:.3f} nats a token before any training" in out
    code, out, _ = rollout("eval", other, small, "eval.beta=0", "--json", "--runs-dir", tmp_path / "runs")
    assert code == 0 and json.loads(out)["imitation"] is None


def test_what_cannot_be_evaluated_is_one_line(rollout, run, tmp_path):
    root = tmp_path / "runs"
    code, _, err = rollout("eval", "r2", "--runs-dir", root)
    assert (code, err) == (2, f"error: no run 'r2' in {root}; there are 1 runs\n")
    (run.checkpoint(4) / "manifest.json").unlink()
    code, _, err = rollout("eval", "r1", "--runs-dir", root)
    assert code == 2 and "has no complete checkpoint yet" in err and err.count("\n") == 1
    code, _, err = rollout("eval", "r1/checkpoints/step_000004", "eval.nn=2", "--runs-dir", root)
    assert code == 2 and "unknown key eval.nn; did you mean eval.n?" in err
    code, _, err = rollout("eval", "r1/checkpoints/step_000004", "eval.beta=1", "--runs-dir", root)
    assert code == 2 and "no teacher acts under algorithm.name 'grpo'" in err
