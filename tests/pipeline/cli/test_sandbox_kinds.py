"""What a configuration is told, before anything starts, when its sandboxes or its agent cannot be had."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[3] / "configs" / "swe_dagger.yaml"
SANDBOX = "specs.0.sandbox"


@pytest.mark.parametrize(
    ("overrides", "wanted"),
    [
        ([f"{SANDBOX}.kind=docker"], "sandbox.kind 'docker' needs sandbox.image"),
        ([f"{SANDBOX}.kind=remote", f"{SANDBOX}.url=http://a", f"{SANDBOX}.token_env=NOT_SET"], "token_env 'NOT_SET' is not set"),
        (["specs.0.agent=mini-swe-agent"], "agent 'mini-swe-agent' is not installed: pip install"),
    ],
)
def test_what_cannot_be_had_is_one_line_and_exit_code_2(
    rollout, monkeypatch: pytest.MonkeyPatch, overrides: list[str], wanted: str
):
    monkeypatch.setattr("pipeline.agents.loading.find_spec", lambda name: None)
    code, _, err = rollout("plan", CONFIG, *overrides)
    assert code == 2 and wanted in err and err.startswith("error: ") and err.count("\n") == 1


def test_tasks_that_begin_in_an_image_want_containers(rollout, tmp_path: Path):
    rows = [json.loads(line) for line in (CONFIG.parent / "data" / "swe_tasks.jsonl").read_text().splitlines()[:4]]
    for row in rows:
        del row["files"]
        row["image"] = "a:1"
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = [f"path={tmp_path / 'tasks.jsonl'}", "split.held_out=[]", "evaluate=false"]
    code, _, err = rollout("plan", CONFIG, *(f"datasets.repairs.{override}" for override in data))
    assert code == 2 and "begins in an image, which needs sandbox.kind 'docker'; it is 'local'" in err
