"""The fixed workload of `rollout bench teacher` as whole runs: six actors, the durable DAG, a teacher behind Serve.

Invariant: rollouts and calls take what the virtual clock gives them; the trainer trains a small model for real, in passes enough to
take about as long as the workload says, and what it took is printed. The steps of the workload are all of those that are timed, and
begin as on the virtual clock: what loads has loaded in steps before them, of which nothing is under way any more.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from pipeline.bench.teacher import SCALE, Mode, Workload, bench_config, bounds, by_the_row
from pipeline.buffer.schema import open_reader
from pipeline.config.loading import dump, read_config
from pipeline.config.schema import RunConfig
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
SETTLED_S = 0.01
"""Columns that were recorded within this time of one another are of one call, which ended within this time before."""
CALM_S = 1.0
"""The last rollout before the workload goes on for this long after the others should be scored."""


def figures(workload: Workload, root: Path) -> dict[str, float]:
    """ray_stage_over_inline, ray_stage_over_none, ray_stage_over_bound, ray_permits_while_scoring_{stage,inline}: as on the virtual
    clock. ray_{stage,inline,none}_s: seconds of the workload's steps. ray_train_s: median of the updates. ray_hop_s: median time
    from the end of a training to the start of the rollout that waited for it. ray_select_s: median time from a step's last column,
    or from the end of the training before it, until the step's groups are taken."""
    runs = {mode: _run(workload, mode, root, mode) for mode in MODES}
    seconds = {mode: _seconds(paths, workload) for mode, paths in runs.items()}
    updates = [json.loads(line)["update_s"] for paths in runs.values() for line in paths.metrics.read_text().splitlines()]
    return {
        "ray_stage_over_inline": seconds["inline"] / seconds["stage"],
        "ray_stage_over_none": seconds["stage"] / seconds["none"],
        "ray_stage_over_bound": _over_bound(by_the_row(workload), root),
        **{f"ray_permits_while_scoring_{mode}": permits_while_scoring(runs[mode], workload) for mode in ("stage", "inline")},
        **{f"ray_{mode}_s": value for mode, value in seconds.items()},
        "ray_train_s": statistics.median(updates),
        "ray_hop_s": statistics.median(_hops(node_times(runs["stage"]), workload)),
        "ray_select_s": statistics.median(_selections(runs["stage"], workload)),
    }


def permits_while_scoring(paths: RunPaths, workload: Workload) -> float:
    """Mean number of groups between the start of their attempt and its commit, at the beginning and the end of the teacher's calls.
    A call took what is stated, and ended when its columns were recorded."""
    began = (_before(workload) * workload.groups,)
    with closing(open_reader(paths.database)) as db:
        held = [tuple(row) for row in db.execute("SELECT started_at, ended_at FROM attempts WHERE ordinal >= ?", began)]
        columns = db.execute("SELECT produced_at FROM fields WHERE ordinal >= ? ORDER BY produced_at", began)
        recorded = [row["produced_at"] for row in columns]
    moments = [at for end in _calls(recorded) for at in (end - workload.call_s / SCALE, end - SETTLED_S)]
    return statistics.mean(sum(start <= at <= end for start, end in held) for at in moments)


def _calls(recorded: list[float]) -> Iterator[float]:
    before = 0.0
    for at in recorded:
        if at - before > SETTLED_S:
            yield at
        before = at


def _hops(times: dict[str, dict[str, float]], workload: Workload) -> Iterator[float]:
    for step in _steps_that_wait(workload):
        yield times[f"rollout[{step}]"]["started"] - times[f"train[{step - _together(workload)}]"]["done"]


def _selections(paths: RunPaths, workload: Workload) -> Iterator[float]:
    times = node_times(paths)
    with closing(open_reader(paths.database)) as db:
        rows = db.execute("SELECT step, max(produced_at) FROM ordinals JOIN fields USING (ordinal) GROUP BY step")
        columns = {step: at for step, at in rows}
        selected = {step: at for step, at in db.execute("SELECT step, at FROM selections")}
    for step in _steps_that_wait(workload):
        yield selected[step] - max(columns[step], times[f"train[{step - 1}]"]["done"])


def _steps_that_wait(workload: Workload) -> range:
    """Of the workload: for a training of it."""
    before = _before(workload)
    return range(before + _together(workload) + 1, before + workload.steps + 1)


def _over_bound(workload: Workload, root: Path) -> float:
    return _seconds(_run(workload, "stage", root, "by_the_row"), workload) / max(bounds(workload).values())


def _seconds(paths: RunPaths, workload: Workload) -> float:
    """From the first rollout of the workload to the last training. On the virtual clock the second rollout begins with the first;
    here it begins a training later, which costs the stage nothing and the inline hook 0.1 s less: 1.63 times in place of 1.65."""
    times, before = node_times(paths), _before(workload)
    return times[f"train[{before + workload.steps}]"]["done"] - times[f"rollout[{before + 1}]"]["started"]


def _before(workload: Workload) -> int:
    """Steps before the workload's: twice as many as roll out at the same time."""
    return 2 * _together(workload)


def _together(workload: Workload) -> int:
    return workload.max_staleness + 1


def _run(workload: Workload, mode: Mode, root: Path, name: str) -> RunPaths:
    config, tasks = root / f"{name}.yaml", root / "tasks.jsonl"
    tasks.write_text("".join(json.dumps({"prompt": f"say {item}", "answer": str(item)}) + "\n" for item in range(60)))
    config.write_text(dump(_with_steps_before(workload)))
    return completed_run(read_config(config, [*_whole_run(workload, tasks), *MODES[mode]]), root, name)[0]


def _with_steps_before(workload: Workload) -> RunConfig:
    """The first of them are as the workload's, so that all of its processes are there. The rollouts of the others take no time, but
    for the first: everything else is scored by its end."""
    config, seconds = bench_config(workload), workload.seconds()
    calm, begins = (steps * workload.groups for steps in (_together(workload), _before(workload)))
    scored_s = begins * (workload.call_s + workload.rows * workload.row_s) / SCALE
    before = {ordinal: seconds[ordinal] for ordinal in range(calm)} | {calm: scored_s + CALM_S}
    script = config.engine.script.model_copy(
        update={"seconds_by_ordinal": before | {begins + ordinal: value for ordinal, value in seconds.items()}}
    )
    return config.model_copy(update={"engine": config.engine.model_copy(update={"script": script})})


def _whole_run(workload: Workload, tasks: Path) -> tuple[str, ...]:
    """What a whole run needs on top of the parts that the virtual clock plays."""
    permits = workload.permits * workload.rows
    return (
        "student.architecture={hidden: 8, layers: 1, heads: 2, mlp: 16, max_positions: 64}",
        f"datasets.bench={{source: jsonl, path: {tasks}}}",
        f"specs.0.resource.cpu={SAMPLE_CPU}",
        f"layout.nodes={{permits: {{cpu: {permits * SAMPLE_CPU}, memory_gb: 0.1}}}}",
        f"trainer.steps={_before(workload) + workload.steps}",
        f"algorithm.passes={PASSES}",
        "eval={every: 0, items: 1, teacher: false}",
        "observe.bars=false",
        "observe.trackers=[]",
    )
