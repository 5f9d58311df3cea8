"""What trackers are told over two processes of a run, and what is said where a package is missing.

Small modules stand in for the packages here; where the real ones are installed, they are tried as well.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.observe import trackers
from pipeline.observe.trackers import EXTRAS, check_trackers
from tests.pipeline.observe.fakes import config

ROOT = Path(__file__).parents[3]
PROCESS = """
import json, sys
from pathlib import Path
from pipeline.config.schema import RunConfig
from pipeline.observe.trackers import open_tracker
from pipeline.paths import RunPaths
from tests.pipeline.observe.fakes import config

name, folder, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
tracker = open_tracker(name, RunPaths(folder), RunConfig.model_validate(config()))
for step in range(1, last + 1):
    added = tracker.add("train", step, {"loss": 1.0 / step, "note": "text", "gone": None, "by": {"words": 0.5}}, 1000.0 + step)
    print(json.dumps([step, added]))
tracker.add("eval", 0, {"accuracy": 0.25}, 1000.0)
tracker.flush()
tracker.close()
"""
FAKES = {
    "wandb": """
import json
from pathlib import Path

class Settings:
    def __init__(self, **settings):
        assert settings["init_timeout"] < 60

class Run:
    def __init__(self, folder):
        self.folder = folder
    def define_metric(self, name, step_metric):
        assert step_metric == name.replace("*", "step")
    def log(self, values):
        with open(self.folder / "told.jsonl", "a") as file:
            file.write(json.dumps(values) + "\\n")
    def finish(self):
        (self.folder / "finished").touch()

def teardown():
    pass

def init(*, mode, dir, project, id, name, config, settings):
    assert mode == "offline" and project == "spell" and id == "a-run-1" and config["trainer"]["steps"] == 120
    return Run(Path(dir))
""",
    "trackio": """
import json
from pathlib import Path

FOLDER = Path(__file__).parent

class Run:
    def log(self, values, step):
        with open(FOLDER / "told.jsonl", "a") as file:
            file.write(json.dumps({**values, "step": step}) + "\\n")

def finish():
    print("trackio says good-bye")
    (FOLDER / "finished").touch()

def init(*, project, name, config, resume, **options):
    print("trackio says hello")
    assert project == "spell" and name == "a run#1" and resume == "allow"
    return Run()
""",
}


def process(name: str, run: Path, last: int, packages: Path | None = None, **environment: str) -> list[list]:
    """A process of a run that adds steps 1 to `last`; what each `add` returned."""
    path = [str(packages)] if packages else []
    command = f"import sys; sys.path[:0] = {[*path, str(ROOT)]!r}\n{PROCESS}"
    done = subprocess.run(
        [sys.executable, "-c", command, name, str(run), str(last)],
        capture_output=True, text=True, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", EXTRAS)
def test_each_step_is_told_once_over_two_processes(tmp_path, name):
    packages, run = tmp_path / "packages", tmp_path / "a run#1"
    packages.mkdir()
    run.mkdir()
    (packages / f"{name}.py").write_text(FAKES[name])
    told = (run if name == "wandb" else packages) / "told.jsonl"
    assert process(name, run, 2, packages) == [[1, True], [2, True]], "and nothing else on stdout"
    assert process(name, run, 3, packages) == [[1, False], [2, False], [3, True]]
    lines = [json.loads(line) for line in told.read_text().splitlines()]
    assert [line["train/loss"] for line in lines if "train/loss" in line] == [1.0, 0.5, 1 / 3]
    assert [line["eval/accuracy"] for line in lines if "eval/accuracy" in line] == [0.25]
    assert lines[0]["train/by/words"] == 0.5 and not {"train/note", "train/gone"} & lines[0].keys()
    assert told.with_name("finished").exists()


def test_what_a_kill_may_have_cost_trackio_is_told_again(tmp_path):
    packages, run = tmp_path / "packages", tmp_path / "a run#1"
    packages.mkdir()
    run.mkdir()
    (packages / "trackio.py").write_text(FAKES["trackio"].replace('print("trackio says good-bye")', "import os; os._exit(0)"))
    process("trackio", run, 2, packages)
    assert process("trackio", run, 2, packages) == [[1, True], [2, True]]


@pytest.mark.parametrize("name", EXTRAS)
def test_a_missing_package_is_one_line_that_names_the_extra(name, monkeypatch):
    monkeypatch.setattr(trackers, "find_spec", lambda package: None)
    with pytest.raises(ConfigError, match=rf"observe.trackers: '{name}' needs the package {name}.*'\.\[{name}\]'"):
        check_trackers(["tensorboard", name])
    check_trackers(["tensorboard"])


def test_a_name_that_is_no_tracker_is_refused():
    with pytest.raises(ValueError, match="tensorboard"):
        RunConfig.model_validate({**config(), "observe": {"trackers": ["tensorbord"]}})


def installed(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(name) is None, reason=f"not tried with the real package: pip install -e '.[{name}]'")


@installed("wandb")
def test_the_real_wandb_writes_offline(tmp_path):
    run = tmp_path / "a run#1"
    run.mkdir()
    assert process("wandb", run, 2) == [[1, True], [2, True]]
    assert process("wandb", run, 3) == [[1, False], [2, False], [3, True]]
    files = sorted(run.glob("wandb/offline-run-*/run-a-run-1.wandb"))
    records = b"".join(path.read_bytes() for path in files)
    value = rb"\x82\x01.([0-9.]+)"  # field 16 of an item of history or summary, behind its key
    assert len(files) == 2 and set(re.findall(b"train/step" + value, records)) == {b"1", b"2", b"3"}
    assert set(re.findall(b"train/by/words" + value, records)) == {b"0.5"}
    assert set(re.findall(b"eval/accuracy" + value, records)) == {b"0.25"}


@installed("trackio")
def test_the_real_trackio_keeps_them_locally(tmp_path):
    run = tmp_path / "a run#1"
    run.mkdir()
    where = {"TRACKIO_DIR": str(tmp_path / "store"), "HF_HUB_OFFLINE": "1"}
    assert process("trackio", run, 2, **where) == [[1, True], [2, True]]
    assert process("trackio", run, 3, **where) == [[1, False], [2, False], [3, True]]
    look = (
        "import json; from trackio.sqlite_storage import SQLiteStorage as store; runs = store.get_runs('spell');"
        "print(json.dumps([runs, store.get_logs('spell', runs[0])]))"
    )
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, timeout=120, env={**os.environ, **where})
    names, logs = json.loads(done.stdout)
    assert names == ["a run#1"]
    assert sorted((line["step"], line["train/loss"]) for line in logs if "train/loss" in line) == [(1, 1.0), (2, 0.5), (3, 1 / 3)]
