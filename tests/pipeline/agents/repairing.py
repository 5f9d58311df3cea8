"""A repair task, a student that says what it is told, and programs that play for it: what the tests of agents share."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.agents.scaffold import Scaffold
from pipeline.buffer.api import Attempt
from pipeline.config.schema import RunConfig
from pipeline.engines.base import Completion
from pipeline.engines.renderer import ChatRenderer
from pipeline.evaluator.spec import PlacementToken, specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.fetcher.catalog import Catalog
from pipeline.records import StepContext, Task
from pipeline.sandboxes.local import LocalSandboxes
from pipeline.trainer.tokenizer import build_tokenizer

TOKEN = PlacementToken("local", None, 0.0, 0.5, 0.25)
TRAIN = StepContext(1)
DOWN = {
    "instance_id": "down",
    "problem_statement": "down(2) in a.py gives 3; expected 1.",
    "patch": "--- a/a.py\n+++ b/a.py\n@@ -1,2 +1,2 @@\n def down(x):\n-    return x + 1\n+    return x - 1\n",
    "test_patch": "--- /dev/null\n+++ b/test_a.py\n@@ -0,0 +1,8 @@\n+import unittest\n+from a import down\n+\n"
    "+class T(unittest.TestCase):\n+    def test_new(self):\n+        assert down(2) == 1\n"
    "+    def test_old(self):\n+        assert isinstance(down(0), int)\n",
    "FAIL_TO_PASS": ["test_a.T.test_new"],
    "PASS_TO_PASS": json.dumps(["test_a.T.test_old"]),
    "files": {"a.py": "def down(x):\n    return x + 1\n"},
    "test_command": "python3 -m unittest -q",
}
MEND = "sed -i 's/x + 1/x - 1/' a.py"
PROGRAM = str(Path(__file__).parents[2] / "programs" / "program_standin.py")
append, forget, retry, fail, silent, hang = (
    partial(Scaffold, (sys.executable, PROGRAM, how)) for how in ("append", "forget", "retry", "fail", "silent", "hang")
)


@dataclass
class Says:
    """A student that says what it is told, turn by turn, and then nothing more than the last."""

    renderer: ChatRenderer
    lines: list[str]
    prompts: list[np.ndarray] = field(default_factory=list)

    async def generate(self, requests: list[Any], version: Any) -> list[Completion]:
        replies = []
        for request in requests:
            self.prompts.append(request.prompt)
            text = self.lines[min(int(request.request_id.split(".")[2]), len(self.lines) - 1)]
            tokens = np.append(self.renderer.encode_text(text), self.renderer.eos_token_id).astype(np.int32)
            said = tokens[: request.sampling.max_tokens]
            reason = "stop" if len(said) == len(tokens) else "length"
            replies.append(Completion(request.request_id, said, np.full(len(said), -1.0, np.float32), reason, 0))
        return replies


class World:
    def __init__(
        self, folder: Path, rows: list[dict[str, Any]], algorithm: str = "grpo", agent: str = "swe", **stopping: Any
    ) -> None:
        path = folder / "tasks.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        dataset = {"source": "swe", "path": path, "task_type": "swe", "sampling": {"max_tokens": 200}, "stopping": stopping}
        self.config = RunConfig.model_validate(
            {
                "student": {"architecture": {}},
                "teachers": {"reference": {"engine": "reference"}} if algorithm != "grpo" else {},
                "datasets": {"repairs": {**dataset, "split": {"held_out": []}, "evaluate": False}},
                "specs": [{"task_type": "swe", "agent": agent, "sandbox": {"command_timeout_s": 5, "output_bytes": 400}}],
                "algorithm": {"name": algorithm},
                "rollout": {"samples_per_task": 1},
            }
        )
        catalog = Catalog(self.config)
        build_tokenizer(catalog.texts(), folder / "tokenizer")
        self.renderer = ChatRenderer.load(folder / "tokenizer")
        self.root = folder / "sandboxes"
        self.task: Task = catalog.task(0)

    async def play(self, *lines: str, task: Task | None = None, context: StepContext = TRAIN):
        student = Says(self.renderer, list(lines))
        boxes = LocalSandboxes(root=self.root)
        worker = EvaluatorWorker(
            self.config, self.renderer, student, specs_from_config(self.config), "local", sandboxes={"swe": boxes}
        )
        task = task or self.task
        (sample,) = await worker.run_samples(task, [0], Attempt(task.ordinal, 1, 0, 0), context, [TOKEN])
        assert left_in(self.root) == []
        return sample, student


def left_in(root: Path) -> list[Path]:
    return list(root.iterdir())
