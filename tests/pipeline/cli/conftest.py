import json
from pathlib import Path

import pytest
import yaml

from pipeline.cli.main import run


@pytest.fixture
def config_file(tmp_path) -> Path:
    rows = [{"id": n, "prompt": f"say {n}", "answer": str(n)} for n in range(40)]
    (tmp_path / "d.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {
        "student": {"architecture": {}},
        "teachers": {"big": {"architecture": {}, "supervised": {}}},
        "datasets": {"d": {"source": "jsonl", "path": "d.jsonl"}},
        "trainer": {"steps": 8},
        "rollout": {"tasks_per_step": 4},
    }
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(data))
    return path


@pytest.fixture
def rollout(capsys):
    """Run a command in this process: (exit code, stdout, stderr)."""

    def call(*arguments) -> tuple[int, str, str]:
        code = run([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call
