"""What the pipeline costs on top of its engine: the same requests through a whole run, and to the bare engine in this process."""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.buffer.lock import RunLock
from pipeline.buffer.schema import create_run
from pipeline.cli.runs import create_run_folder
from pipeline.config.loading import Loaded, read_config
from pipeline.config.schema import RunConfig
from pipeline.engines.base import Engine, GenerateRequest, Version
from pipeline.engines.renderer import ChatRenderer
from pipeline.engines.weights import WeightStore
from pipeline.fetcher.catalog import Catalog
from pipeline.paths import RunPaths
from pipeline.records import sample_seed
from workflows.bench_cpu import PARTS, REST, NodeCpu
from workflows.run import Driver

SCRIPTED = ("engine.kind=scripted", "engine.slots=64", "engine.script.seconds=1.0", "trainer.steps=2", "eval.items=1")
"""64 slots and 1 s a request: 8 s a step for the bare engine."""
TORCH = ("trainer.steps=18", "eval.items=1")
READ = {"scripted": 0, "torch": 6}
"""The last steps of a run are not timed: the CPU that they take is read, which takes some itself."""
ON_POLICY = (
    "algorithm.name=grpo", "rollout.max_staleness=0", "rollout.tasks_per_step=128", "eval.every=0", "eval.teacher=false",
    "observe.bars=false",
)  # fmt: skip
"""512 requests a step (of 4 samples), without a teacher, and with no training beside the rollouts: they have the machine."""
WARM = 1
"""Steps left out of the figures: the first loads what later ones find loaded."""
CORES = len(os.sched_getaffinity(0))


def figures(path: Path, root: Path) -> dict[str, Any]:
    """`pipeline_over_engine_*`: throughput of rollout[k] over the bare engine's; 1 is an engine without a pipeline around it.

    `torch_cpu_s`: CPU of all processes from the start of a rollout to its end, mean; `torch_cpu_s_<part>`: of those which do it.
    `torch_cpu_bound`: what `pipeline_over_engine_torch` would be if no core were idle in that time.
    """
    found = {}
    for name, overrides in (("scripted", SCRIPTED), ("torch", TORCH)):
        measured = measure(path, overrides, root, name, READ[name])
        found |= {f"pipeline_over_engine_{name}": measured.pop("over_engine")} | {
            f"{name}_{key}": measured[key] for key in measured
        }
    return {"figures": found, "notes": [f"scripted: {' '.join(SCRIPTED)}", f"torch: {' '.join(TORCH)}"]}


def measure(path: Path, overrides: tuple[str, ...], root: Path, name: str, read: int) -> dict[str, float]:
    """Median seconds of rollout[k] in a run of `path`, and of the bare engine with the requests of the same steps; of the last
    `read` steps the CPU."""
    loaded = read_config(path, [*ON_POLICY, *overrides])
    timed = loaded.config.trainer.steps - read
    with NodeCpu(RunPaths(root / name).nodes, "rollout", range(timed + 1, timed + read + 1)) as cpu:
        paths, config = completed_run(loaded, root, name)
    rollouts = [times["done"] - times["started"] for node, times in node_times(paths).items() if node.startswith("rollout[")]
    bare = asyncio.run(_bare(config, paths))
    pipeline_s, engine_s = statistics.median(rollouts[WARM:timed]), statistics.median(bare[WARM:timed])
    found = {"pipeline_s": pipeline_s, "engine_s": engine_s, "over_engine": engine_s / pipeline_s}
    if not read:
        return found
    parts = {part: statistics.fmean(node[part] for node in cpu.spent) for part in (*PARTS.values(), REST)}
    cpu_s = sum(parts.values())
    found |= {"cpu_s": cpu_s, "cpu_bound": min(1.0, engine_s * CORES / cpu_s)}
    return found | {f"cpu_s_{part}": seconds for part, seconds in parts.items()}


def completed_run(loaded: Loaded, root: Path, name: str) -> tuple[RunPaths, RunConfig]:
    """A whole run in `<root>/<name>`, on a Ray of its own; returns its folder, and its configuration as its processes read it."""
    paths = create_run_folder(root, loaded, name, datetime.now())
    started = time.time()
    create_run(paths, {"steps": loaded.config.trainer.steps, "started_at": started})
    config = read_config(paths.config).config
    with RunLock(paths) as lock:
        Driver(paths, config, lock, started).run()
    return paths, config


def node_times(paths: RunPaths) -> dict[str, dict[str, float]]:
    """Node -> when it `started` and was `done` (seconds since the epoch), in the order of their starts, from log/nodes.jsonl."""
    times: dict[str, dict[str, float]] = {}
    for line in paths.nodes.read_text().splitlines():
        event = json.loads(line)
        times.setdefault(event["node"], {})[event["event"]] = event["t"]
    return dict(sorted(times.items(), key=lambda node: node[1]["started"]))


async def _bare(config: RunConfig, paths: RunPaths) -> list[float]:
    """Seconds of each step's requests, a call a group, all at the same time."""
    weights = WeightStore(paths.weights)
    published = weights.latest()
    if published is None:
        raise AssertionError("the run published weights")
    renderer, catalog = ChatRenderer.load(published.path), Catalog(config)
    engine = _engine(config, published.path)
    seconds = []
    for step in range(config.trainer.steps):
        first = step * config.rollout.tasks_per_step
        tasks = [catalog.task(first + slot) for slot in range(config.rollout.tasks_per_step)]
        started = time.perf_counter()
        await asyncio.gather(*(engine.generate(_requests(renderer, task), Version()) for task in tasks))
        seconds.append(time.perf_counter() - started)
    await engine.close()
    return seconds


def _requests(renderer: ChatRenderer, task: Any) -> list[GenerateRequest]:
    prompt = renderer.render(task.messages)
    return [
        GenerateRequest(f"{task.ordinal}.{index}.0", prompt, task.sampling, sample_seed(task, index, 0))
        for index in range(task.samples)
    ]


def _engine(config: RunConfig, folder: Path) -> Engine:
    if config.engine.kind == "scripted":
        from pipeline.engines.scripted import ScriptedEngine

        return ScriptedEngine(config.engine, None, folder)
    from pipeline.engines.torch_engine import TorchEngine

    return TorchEngine(folder, None, config.engine, dtype=config.student.dtype)
