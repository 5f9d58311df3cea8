"""A run folder as a real run leaves it, without running one: every figure is a smooth function of the step plus seeded noise."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from pipeline.evaluation import details
from pipeline.evaluation.summary import summarise
from pipeline.observe.metrics import MetricsWriter
from pipeline.observe.timeline import TimelineWriter, timeline_path
from pipeline.paths import RunPaths
from pipeline.records import Sample, Sampling, Stopping, Task, aborted_sample

STEPS, TASKS, STEP_S, START_S = 120, 32, 0.9, 9.0
STARTED_AT = 1_760_000_000.0
STAGES = ("fetcher", "batcher", "evaluator_pool", "teacher_scorer", "replay_buffer", "trainer")
BUSY = {"fetcher": 0.03, "batcher": 0.02, "evaluator_pool": 0.82, "teacher_scorer": 0.31, "replay_buffer": 0.11, "trainer": 0.58}


def learned(step: float) -> float:
    """Held-out accuracy of the fake student."""
    return 0.11 + 0.76 / (1 + math.exp(-(step - 45) / 12))


def results(steps: int = STEPS) -> dict[int, dict[str, Any]]:
    rng = np.random.default_rng(0)
    made = {}
    for step in range(1, steps + 1):
        noise = rng.normal(0, 1, 6)
        kl = 1.4 * math.exp(-step / 40) + 0.08
        made[step] = {
            "groups": TASKS,
            "reward_mean": None if step in (60, 61, 62) else min(1.0, max(0.0, learned(step) - 0.04 + 0.05 * noise[0])),
            "loss": kl * 1.1 + 0.05 * noise[1],
            "teacher_kl": kl + 0.03 * noise[2],
            "kl_behaviour": 0.004 + 0.002 * abs(noise[3]),
            "entropy": 1.9 * math.exp(-step / 60) + 0.2 + 0.03 * noise[4],
            "staleness_mean": 0.8 + 0.1 * noise[5],
            "staleness_max": 2 if step % 17 == 0 else 1,
            "lr": 1e-3,
            "skipped": None,
        }
    return made


def status(step: int, steps: int = STEPS, state: str = "running", busy_s: float | None = None) -> dict[str, Any]:
    dropped = step // 25
    trained = step // 20 * 20 * TASKS
    ordinals = {
        "pending": 0 if step >= steps else 8,
        "running": 0 if step >= steps else 17,
        "written": 0 if step >= steps else 4,
        "ready": 0 if step >= steps else 3,
        "consumed": step * TASKS - trained,
        "trained": trained,
        "dropped": dropped,
    }
    seconds = START_S + step * STEP_S if busy_s is None else busy_s
    return {
        "run_id": "spell-20261009-101500-1a2b",
        "state": state,
        "error": None,
        "step": step,
        "steps": steps,
        "weight_version": step,
        "checkpoint_step": step // 20 * 20,
        "ordinals": {"fetched": sum(ordinals.values()), **ordinals},
        "dropped_by_reason": {"zero_advantage": dropped - dropped // 4, "infra_conn": dropped // 4} if dropped >= 4 else {},
        "attempts": {"started": step * TASKS + 20, "lost": 2, "late": 0, "regenerated": 0},
        "capacity": {"total": 64, "used": 32 if step < steps else 0},
        "stages": {
            name: {
                "actor": f"spell:{name}", "pid": 4100 + index, "node": "laptop", "in": step * TASKS, "out": step * TASKS,
                "backlog": index, "oldest_s": 0.4 * index, "busy_s": BUSY[name] * max(0.0, seconds - START_S),
            }
            for index, name in enumerate(STAGES)
        },
        "workflow": {"id": "spell", "nodes_done": 5 * step, "nodes_rerun": 0},
    }  # fmt: skip


def make_run(root: Path, steps_done: int = STEPS) -> RunPaths:
    """The folder of a run that has come to `steps_done`; the ledger itself is not part of it."""
    paths = RunPaths(root / "spell-20261009-101500-1a2b")
    paths.root.mkdir(parents=True)
    paths.config.write_text(yaml.safe_dump(config(), sort_keys=False))
    MetricsWriter(paths.metrics).sync(results(steps_done))
    timeline = TimelineWriter(timeline_path(paths), STARTED_AT)
    rng = np.random.default_rng(1)
    busy = dict.fromkeys(STAGES, 0.0)
    for second in range(int(START_S), int(START_S + steps_done * STEP_S) + 2):
        row = status(min(steps_done, max(0, int((second - START_S) / STEP_S))))
        for name in STAGES:
            busy[name] += min(1.0, max(0.0, BUSY[name] + 0.12 * rng.normal()))
            row["stages"][name]["busy_s"] = busy[name]
        timeline.append(row, STARTED_AT + second)
    for step in range(0, steps_done + 1, 20):
        write_evaluation(paths, f"eval_{step:06d}", learned(step))
    write_evaluation(paths, "teacher_speller", 0.93)
    return paths


def write_evaluation(paths: RunPaths, name: str, accuracy: float, items: int = 250, unscored: int = 0) -> None:
    """Written by the real writer. `accuracy` is over the scored items; the unscored ones stand in front."""
    words = ("planet", "<b>bold</b>", "lantern", "river", "copper", "meadow")
    order = np.random.default_rng(items).permutation(items - unscored)
    played = []
    for index in range(items):
        word = words[index % 6]
        task = Task(
            index, f"spell/{index}", "spell_backward", "single_turn", (("user", f"Spell this word backward: {word}"),), word[::-1],
            "exact", 1, Sampling(), Stopping(), 0,
        )  # fmt: skip
        if index < unscored:
            lost = aborted_sample(index, 0, [1, 2], abort_reason="infra_conn", error="ConnectionError: refused", phase="run")
            played.append((task, lost))
            continue
        right = order[index - unscored] < round(accuracy * (items - unscored))
        played.append((task, _sample(index, word[::-1] if right else word, float(right))))
    details.write(paths.details, name, played, summarise(name, played, min_coverage=0.9))


def _sample(ordinal: int, text: str, reward: float) -> Sample:
    ones = np.ones(4, np.int32)
    mask = np.ones(4, np.uint8)
    return Sample(f"{ordinal}.0", 0, "ok", reward, ones, mask, np.zeros(4, np.float32), mask, ones, "finish", text)


def config() -> dict[str, Any]:
    shape = {"hidden": 64, "layers": 2, "heads": 4}
    return {
        "run": {"name": "spell", "seed": 0},
        "student": {"architecture": shape},
        "teachers": {"speller": {"architecture": {**shape, "layers": 4}, "supervised": {"steps": 400}}},
        "datasets": {"spell_backward": {"generator": "spell_backward"}},
        "rollout": {"tasks_per_step": TASKS, "samples_per_task": 4},
        "algorithm": {"name": "opd"},
        "trainer": {"steps": STEPS},
    }
