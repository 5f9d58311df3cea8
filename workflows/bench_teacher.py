"""The fixed workload of `rollout bench teacher` as whole runs: six actors, the durable DAG, a teacher behind Serve.

Invariant: rollouts and calls take what the virtual clock gives them; the trainer trains a small model for real, in passes enough to
take about as long as the workload says, and what it took is printed.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from pipeline.bench.teacher import Mode, Workload, bench_config
from pipeline.config.loading import dump, read_config
from pipeline.paths import RunPaths
from workflows.bench import completed_run, node_times

PASSES = 30
"""Over the 32 rows of a step; one takes some 3 ms."""
SAMPLE_CPU = 0.01
"""A permit: the rollouts wait, they do not compute."""
MODES: dict[Mode, tuple[str, ...]] = {
    "stage": (),
    "inline": ("teacher_stage.mode=inline",),
    "none": ("algorithm.name=grpo",),
}


def figures(workload: Workload, root: Path) -> dict[str, float]:
    """ray_stage_over_inline, ray_stage_over_none: as on the virtual clock. ray_{stage,inline,none}_s: seconds from the first step
    trained to the last, so that what loads in the first is left out. ray_train_s: median of the updates."""
    config, tasks = root / "workload.yaml", root / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"say {item}", "answer": str(item)}) + "\n" for item in range(60)))
    config.write_text(dump(bench_config(workload)))
    seconds, updates = {}, []
    for mode, overrides in MODES.items():
        loaded = read_config(config, [*_whole_run(workload, tasks), *overrides])
        paths, _ = completed_run(loaded, root, mode)
        seconds[mode] = _trained_s(paths, workload.steps)
        updates += [json.loads(line)["update_s"] for line in paths.metrics.read_text().splitlines()]
    return {
        "ray_stage_over_inline": seconds["inline"] / seconds["stage"],
        "ray_stage_over_none": seconds["stage"] / seconds["none"],
        **{f"ray_{mode}_s": value for mode, value in seconds.items()},
        "ray_train_s": statistics.median(updates),
    }


def _whole_run(workload: Workload, tasks: Path) -> tuple[str, ...]:
    """What a whole run needs on top of the parts that the virtual clock plays."""
    permits = workload.permits * workload.rows
    return (
        "student.architecture={hidden: 8, layers: 1, heads: 2, mlp: 16, max_positions: 64}",
        f"datasets.bench={{source: jsonl, path: {tasks}}}",
        f"specs.0.resource.cpu={SAMPLE_CPU}",
        f"layout.nodes={{permits: {{cpu: {permits * SAMPLE_CPU}, memory_gb: 0.1}}}}",
        f"trainer.steps={workload.steps}",
        f"algorithm.passes={PASSES}",
        "eval={every: 0, items: 1, teacher: false}",
        "observe.bars=false",
        "observe.trackers=[]",
    )


def _trained_s(paths: RunPaths, steps: int) -> float:
    times = node_times(paths)
    return times[f"train[{steps}]"]["done"] - times["train[1]"]["done"]
