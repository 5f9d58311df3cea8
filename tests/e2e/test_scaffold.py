"""mini-swe-agent as the agent of a whole run, where the extra `scaffold` is installed: what is captured is what is trained on."""

from __future__ import annotations

import json
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pipeline.sandboxes.local import MISSING

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("minisweagent") is None, reason="did not run: mini-swe-agent (extra scaffold) is not installed"),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"did not run: {MISSING}"),
]
CONFIG = Path(__file__).parents[2] / "configs" / "swe_dagger.yaml"
STEPS, TASKS = 2, 3
WORDS = [
    "specs.0.agent=mini-swe-agent",
    "datasets.repairs.stopping={max_turns: 20, max_context: 12000, max_seconds: 100}",
    "datasets.repairs.sampling.max_tokens=400",
    "student.architecture={hidden: 8, layers: 1, heads: 2, mlp: 16, max_positions: 12000}",
    "engine={kind: scripted, max_context: 12000, script: {tokens: 6}}",
    "algorithm.beta={kind: linear, start: 0.6, end: 0.6}",
    f"rollout={{tasks_per_step: {TASKS}, samples_per_task: 1}}",
    f"trainer={{steps: {STEPS}, warmup_steps: 0, max_tokens_per_chunk: 12000}}",
    "eval.every=0",
]


@pytest.mark.timeout(600)
def test_a_program_of_others_plays_and_what_it_was_answered_is_trained_on(rollout):
    done = rollout.call("run", CONFIG, *WORDS, "--run-id", "mini", timeout_s=240)
    assert done.code == 0, done.err
    paths = rollout.run("mini")
    metrics = lines(paths.metrics)
    for step in range(1, STEPS + 1):
        samples, turns = lines(paths.details / f"train_{step:06d}.jsonl"), lines(paths.details / f"train_{step:06d}.turns.jsonl")
        assert [sample["class"] for sample in samples] == ["solved"] * TASKS
        assert {turn["executor"] for turn in turns} == {"student", "teacher"}
        # The student says nothing that is a command, and mini-swe-agent forgets it; the teacher's turns stay.
        forgotten = sum(turn["tokens"] for turn in turns if turn["executor"] == "student")
        assert metrics[step - 1]["dropped_tokens"] == sum(sample["dropped_tokens"] for sample in samples) == forgotten > 0
        kept = sum(turn["tokens"] for turn in turns if turn["executor"] == "teacher")
        assert metrics[step - 1]["tokens"] == sum(sample["response_tokens"] for sample in samples) == kept
        assert metrics[step - 1]["loss_imitation"] > 0
    assert rollout.processes() == []


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
