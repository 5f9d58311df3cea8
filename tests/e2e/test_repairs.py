"""Whole runs of `configs/swe_dagger.yaml` on Ray: a teacher that takes over, a student that learns from what came of it, and a
program that others wrote in the place of the agent."""

from __future__ import annotations

import json
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from pipeline.paths import RunPaths
from pipeline.sandboxes.local import MISSING
from tests.e2e.program import Program, adds_up, status, trained_as_planned

CONFIG = Path(__file__).parents[2] / "configs" / "swe_dagger.yaml"
STEPS, TASKS, T_MAX = 2, 3, 2
SMALL = [
    f"trainer={{steps: {STEPS}, warmup_steps: 0, max_tokens_per_chunk: 4096}}",
    f"rollout.tasks_per_step={TASKS}",
    "rollout.samples_per_task=1",
    "student.architecture={hidden: 16, layers: 1, heads: 2, mlp: 32, max_positions: 2048}",
    "engine={kind: scripted, script: {tokens: 6}}",
    "datasets.repairs.evaluate=false",
]
LONG = [
    f"trainer={{steps: {STEPS}, warmup_steps: 0, max_tokens_per_chunk: 12000}}",
    "student.architecture={hidden: 8, layers: 1, heads: 2, mlp: 16, max_positions: 12000}",
    "engine={kind: scripted, script: {tokens: 6}, max_context: 12000}",
    "datasets.repairs.stopping={max_turns: 20, max_context: 12000, max_seconds: 100}",
    "datasets.repairs.sampling.max_tokens=400",
]
"""What mini-swe-agent tells its model is long."""
WITH_BUBBLEWRAP = pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"did not run: {MISSING}")
WITH_SCAFFOLD = pytest.mark.skipif(
    find_spec("minisweagent") is None, reason="did not run: mini-swe-agent (extra scaffold) is not installed"
)


@WITH_BUBBLEWRAP
def test_aggrevate_ends_as_planned_and_iter_sft_learns_from_what_it_saved(rollout: Program):
    mixed = ended(rollout, "mixed", "algorithm.name=aggrevate", f"algorithm.t_max.start={T_MAX}")
    who = speakers(mixed)
    assert len(who) == STEPS * TASKS and len(set(who.values())) > 1
    assert all(re.fullmatch(f"s{{0,{T_MAX}}}t+", turns) for turns in who.values())
    assert all(step["loss_imitation"] > 0 for step in lines(mixed.metrics))

    replayed = ended(rollout, "replayed", "algorithm.name=iter_sft", "rollout.reuse=run:mixed", "rollout.filters.rejection=all")
    played, again = samples(mixed), samples(replayed)
    assert {name: sample["tokens"] for name, sample in again.items()} == {name: sample["tokens"] for name, sample in played.items()}
    assert all(sample["reward"] == 1.0 and sample["weight_version"] is None for sample in again.values())
    assert [step["tokens"] for step in lines(replayed.metrics)] == [
        sum(sample["response_tokens"] for sample in lines(details(replayed, step))) for step in range(1, STEPS + 1)
    ]
    assert all(step["loss_imitation"] > 0 for step in lines(replayed.metrics))


@WITH_BUBBLEWRAP
@WITH_SCAFFOLD
def test_a_program_of_others_plays_and_what_it_was_answered_is_trained_on(rollout: Program):
    paths = ended(rollout, "mini", *LONG, "specs.0.agent=mini-swe-agent", "algorithm.beta={start: 0.6}")
    metrics = lines(paths.metrics)
    for step in range(1, STEPS + 1):
        played, turns = lines(details(paths, step)), lines(details(paths, step, ".turns"))
        assert [sample["class"] for sample in played] == ["solved"] * TASKS
        spoken = {who: sum(turn["tokens"] for turn in turns if turn["executor"] == who) for who in ("student", "teacher")}
        # What the student says holds no command, and mini-swe-agent forgets it; what the teacher says stays.
        assert spoken["student"] == sum(sample["dropped_tokens"] for sample in played) == metrics[step - 1]["dropped_tokens"]
        assert spoken["teacher"] == sum(sample["response_tokens"] for sample in played) == metrics[step - 1]["tokens"]
        assert metrics[step - 1]["loss_imitation"] > 0
    assert sum(step["dropped_tokens"] for step in metrics) > 0


def ended(rollout: Program, name: str, *words: str) -> RunPaths:
    done = rollout.call("run", CONFIG, *SMALL, *words, "--run-id", name, timeout_s=120)
    paths = rollout.run(name)
    found = status(paths)
    assert done.code == 0, done.err
    assert found is not None and found["state"] == "finished" and adds_up(found) and trained_as_planned(paths, STEPS, TASKS)
    assert rollout.processes() == []
    return paths


def details(paths: RunPaths, step: int, kind: str = "") -> Path:
    return paths.details / f"train_{step}{kind}.jsonl"


def samples(paths: RunPaths) -> dict[str, dict[str, Any]]:
    return {line["sample_id"]: line for step in range(1, STEPS + 1) for line in lines(details(paths, step))}


def speakers(paths: RunPaths) -> dict[str, str]:
    """Who said the turns of a sample, by first letters."""
    found: dict[str, str] = {}
    for step in range(1, STEPS + 1):
        for turn in lines(details(paths, step, ".turns")):
            found[turn["sample_id"]] = found.get(turn["sample_id"], "") + turn["executor"][0]
    return found


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]
