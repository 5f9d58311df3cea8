"""`rollout tasks check` on repair tasks: each must fail before, and pass with its patch."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from pipeline.sandboxes.local import MISSING

PATCH = "--- a/a.py\n+++ b/a.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"
TESTS = (
    "--- /dev/null\n+++ b/t.py\n@@ -0,0 +1,3 @@\n+import sys, a\n+good = {'new': a.x == 2, 'old': a.x > 0}\n"
    "+sys.exit(not all(good[name] for name in sys.argv[1:]))\n"
)
GOOD = {
    "instance_id": "good",
    "problem_statement": "x is 1; 2 is expected.",
    "patch": PATCH,
    "test_patch": TESTS,
    "FAIL_TO_PASS": ["new"],
    "PASS_TO_PASS": ["old"],
    "files": {"a.py": "x = 1\n"},
    "test_command": "python3 t.py",
}
NO_BUG = {**GOOD, "instance_id": "no_bug", "FAIL_TO_PASS": ["old"], "problem_statement": "a"}
NO_CURE = {**GOOD, "instance_id": "no_cure", "patch": PATCH.replace("= 2", "= 3"), "problem_statement": "b"}
TORN = {**GOOD, "instance_id": "torn", "test_patch": TESTS + PATCH.replace("-x = 1", "-x = 7"), "problem_statement": "c"}


def checked(rollout, folder: Path, rows: list[dict], *options: str) -> tuple[int, dict]:
    if shutil.which("bwrap") is None:
        pytest.skip(MISSING)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "student": {"architecture": {}},
        "datasets": {
            "d": {"source": "swe", "path": "tasks.jsonl", "task_type": "swe", "split": {"held_out": []}, "evaluate": False}
        },
        "specs": [{"task_type": "swe", "agent": "swe"}],
        "algorithm": {"name": "grpo"},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(config))
    code, out, _ = rollout("tasks", "check", folder / "run.yaml", "--json", *options)
    return code, json.loads(out)["datasets"]["d"]


def test_a_sound_task_holds_as_often_as_asked(rollout, tmp_path: Path):
    code, found = checked(rollout, tmp_path, [GOOD], "--times", "3")
    assert code == 0 and found["checked"] == found["solved"] == 3 and found["failures"] == []


def test_each_unsound_task_is_named_with_what_is_wrong(rollout, tmp_path: Path):
    code, found = checked(rollout, tmp_path, [GOOD, NO_BUG, NO_CURE, TORN])
    why = {failure["task_id"]: failure["why"] for failure in found["failures"]}
    assert code == 1 and found["solved"] == 1
    assert why["d/no_bug"] == "old passes before"
    assert why["d/no_cure"] == "the tests fail with the reference patch"
    assert "does not apply" in why["d/torn"]
