"""Repair tasks from files in SWE-bench's columns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError, DataError, VerifierError
from pipeline.fetcher.catalog import Catalog
from pipeline.fetcher.swe import PYTEST, repair_of
from pipeline.fetcher.verifiers import load_verifier
from pipeline.sandboxes.base import ImageFolder

ROW = {
    "instance_id": "a__1",
    "repo": "a/a",
    "base_commit": "abc",
    "problem_statement": "It is broken.",
    "patch": "--- a/x\n+++ b/x\n@@ -1 +1 @@\n-1\n+2\n",
    "test_patch": "",
    "FAIL_TO_PASS": '["t.py::new"]',
    "PASS_TO_PASS": "[]",
    "files": {"x": "1\n"},
}


def catalog_of(folder: Path, rows: list[dict[str, Any]], suffix: str = ".jsonl", **changes: Any) -> Catalog:
    path = folder / f"tasks{suffix}"
    if suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    dataset = {"source": "swe", "path": path, "task_type": "swe", "split": {"held_out": []}, "evaluate": False, **changes}
    return Catalog(
        RunConfig.model_validate(
            {
                "student": {"architecture": {}},
                "datasets": {"d": dataset},
                "specs": [{"task_type": "swe", "agent": "swe"}],
                "algorithm": {"name": "grpo"},
            }
        )
    )


def test_a_row_becomes_a_task_whose_patch_the_model_does_not_see(tmp_path: Path):
    task = catalog_of(tmp_path, [ROW]).task(0)
    assert task.task_id == "d/a__1" and task.messages == (("user", "It is broken."),) and task.answer == ROW["patch"]
    repair = repair_of(task)
    assert repair.fail_to_pass == ("t.py::new",) and repair.pass_to_pass == () and repair.contents == {"x": "1\n"}
    assert repair.test_command == PYTEST
    assert json.loads(json.dumps(task.metadata)) == task.metadata


def test_published_parquet_files_with_a_folder_of_ones_own(tmp_path: Path):
    (tmp_path / "repo").mkdir()
    row = {key: value for key, value in ROW.items() if key != "files"} | {"folder": str(tmp_path / "repo")}
    assert repair_of(catalog_of(tmp_path, [row], ".parquet").task(0)).contents == tmp_path / "repo"


def test_published_rows_with_an_image_begin_in_its_folder(tmp_path: Path):
    row = {key: value for key, value in ROW.items() if key != "files"} | {"image": "a:1"}
    assert repair_of(catalog_of(tmp_path, [row]).task(0)).contents == ImageFolder("a:1", "/testbed")


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"FAIL_TO_PASS": None}, "tasks.jsonl:1: column 'FAIL_TO_PASS' is missing"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS is empty"),
        ({"FAIL_TO_PASS": "[oops"}, "column 'FAIL_TO_PASS' is not a JSON list"),
        ({"PASS_TO_PASS": [1]}, "column 'PASS_TO_PASS' is not a list of test ids"),
        ({"patch": 3}, "column 'patch' holds a int"),
        ({"files": None}, "none of 'folder', 'files' and 'image'"),
        ({"files": {"x": 1}}, "'files' is not a mapping"),
        ({"folder": "relative"}, "folder 'relative' is not the absolute path"),
    ],
)
def test_what_a_row_lacks_is_named_with_its_line(tmp_path: Path, change: dict[str, Any], wanted: str):
    with pytest.raises(ConfigError, match="tasks.jsonl:1") as caught:
        catalog_of(tmp_path, [{**ROW, **change}])
    assert wanted in str(caught.value)


def test_an_id_that_stands_twice_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="duplicate"):
        catalog_of(tmp_path, [ROW, ROW])


def test_a_key_that_the_source_does_not_read_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="datasets.d.generator is not used by source 'swe'"):
        catalog_of(tmp_path, [ROW], generator="x")


def test_another_task_is_no_repair_and_a_patch_is_not_judged_by_its_text(tmp_path: Path):
    from dataclasses import replace

    task = catalog_of(tmp_path, [ROW]).task(0)
    with pytest.raises(DataError, match="no repair task"):
        repair_of(replace(task, metadata={}))
    with pytest.raises(VerifierError, match="agent swe"):
        load_verifier("swe")(task, ROW["patch"])
