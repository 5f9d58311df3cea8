import re
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from pipeline.cli.runs import check_run_id, create_run_folder, find_run, list_runs, new_run_id, run_root, write_config
from pipeline.config.loading import load, read_config
from pipeline.errors import UserError
from pipeline.paths import RunPaths

NOW = datetime(2030, 1, 2, 3, 4, 5)
CUSTOM = Path(__file__).parents[3] / "configs" / "custom_task" / "run.yaml"


def test_run_root(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run_root(None, {}) == tmp_path / "runs"
    assert run_root(None, {"ROLLOUT_RUNS": str(tmp_path / "a")}) == tmp_path / "a"
    assert run_root(Path("b"), {"ROLLOUT_RUNS": "a"}) == tmp_path / "b"


def test_generated_ids_are_valid_and_differ():
    ids = {new_run_id("my run!", NOW) for _ in range(20)}
    assert len(ids) > 15
    assert all(re.fullmatch(r"my-run-20300102-030405-[0-9a-f]{4}", check_run_id(run_id)) for run_id in ids)
    assert check_run_id(new_run_id("é" * 90, NOW)).startswith("run-")


@pytest.mark.parametrize("run_id", ["", "-a", ".a", "a/b", "a b", "a" * 65, "..", "é"])
def test_bad_ids_are_refused(run_id):
    with pytest.raises(UserError, match="is not valid"):
        check_run_id(run_id)


def test_a_run_folder_stands_alone_and_can_be_moved(config_file, tmp_path):
    loaded = load(config_file)
    paths = create_run_folder(tmp_path / "runs", loaded, "one", NOW)
    assert paths.root == tmp_path / "runs" / "one"
    (config_file.parent / "d.jsonl").unlink()
    moved = tmp_path / "elsewhere" / "one"
    shutil.copytree(paths.root, moved)
    shutil.rmtree(paths.root)
    config = load(moved / "config.yaml").config
    assert config.datasets["d"].path == moved / "data" / "d.jsonl"
    assert config.datasets["d"].path.is_file()
    assert config.run.id == "one"
    same = {name: value for name, value in config.model_dump().items() if name not in ("run", "datasets")}
    assert same == {name: value for name, value in loaded.config.model_dump().items() if name not in ("run", "datasets")}


def test_a_file_of_saved_trajectories_moves_with_its_run(config_file, tmp_path):
    (config_file.parent / "saved.jsonl").write_text("{}\n")
    paths = create_run_folder(tmp_path / "runs", load(config_file, ["rollout.reuse=file:saved.jsonl"]), "one", NOW)
    moved = paths.root.rename(tmp_path / "elsewhere")
    reuse = load(moved / "config.yaml").config.rollout.reuse
    assert reuse == f"file:{moved}/data/reuse.jsonl" and Path(reuse.removeprefix("file:")).read_text() == "{}\n"


def test_an_id_that_exists_is_refused(config_file, tmp_path):
    loaded = load(config_file)
    create_run_folder(tmp_path / "runs", loaded, "one", NOW)
    with pytest.raises(
        UserError, match="run 'one' exists already in .*: choose another --run-id, or go on with `rollout resume one`"
    ):
        create_run_folder(tmp_path / "runs", loaded, "one", NOW)
    named = load(config_file, ["run.id=two"])
    assert create_run_folder(tmp_path / "runs", named, None, NOW).run_id == "two"
    assert create_run_folder(tmp_path / "runs", loaded, None, NOW).run_id.startswith("run-20300102-030405-")


def test_a_changed_configuration_stays_movable(config_file, tmp_path):
    paths = create_run_folder(tmp_path / "runs", load(config_file), "one", NOW)
    longer = load(paths.config, ["trainer.steps=99"]).config
    write_config(paths, longer)
    assert read_config(paths.config).config == longer
    moved = paths.root.rename(tmp_path / "moved")
    assert read_config(RunPaths(moved).config).config.datasets["d"].path == moved / "data" / "d.jsonl"


def test_a_missing_input_leaves_no_folder(config_file, tmp_path):
    loaded = load(config_file, ["datasets.d.path=none.jsonl"])
    with pytest.raises(UserError, match="no such file"):
        create_run_folder(tmp_path / "runs", loaded, "one", NOW)
    assert not (tmp_path / "runs" / "one").exists()


def test_find_and_list(config_file, tmp_path):
    root = tmp_path / "runs"
    with pytest.raises(UserError, match="no run 'one' in .*; there are no runs"):
        find_run(root, "one")
    paths = create_run_folder(root, load(config_file), "one", NOW)
    (root / ".cache").mkdir()
    (root / "begun").mkdir()
    assert [found.run_id for found in list_runs(root)] == ["one"]
    assert find_run(root, "one") == paths
    assert find_run(tmp_path, str(paths.root)) == paths
    with pytest.raises(UserError, match="did you mean 'one'"):
        find_run(root, "onee")
    with pytest.raises(UserError, match="has no config.yaml"):
        find_run(root, "begun")


def test_own_modules_travel_with_the_run(tmp_path):
    paths = create_run_folder(tmp_path / "runs", load(CUSTOM), "own", NOW)
    script = (
        "from pipeline.config.loading import read_config\n"
        "from pipeline.fetcher.catalog import Catalog\n"
        "from pipeline.fetcher.verifiers import load_verifier\n"
        f"catalog = Catalog(read_config({str(paths.config)!r}).config)\n"
        "task = catalog.task(0)\n"
        "assert load_verifier(task.verifier)(task, task.answer) == 1.0\n"
        "import my_task; print(my_task.__file__)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60, cwd=tmp_path)
    assert Path(done.stdout.strip()) == paths.code / "my_task.py"
