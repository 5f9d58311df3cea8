"""Plays an evaluation in this process, over any engine, without a run: what `rollout eval` and the service share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any

from pipeline.agents.base import Renderer
from pipeline.config.schema import RunConfig
from pipeline.engines.base import Engine
from pipeline.evaluation.summary import Played
from pipeline.evaluator.evaluating import Evaluation, OnSample
from pipeline.evaluator.machine import this_machine
from pipeline.evaluator.placement import PlacementPool
from pipeline.evaluator.spec import specs_from_config
from pipeline.evaluator.worker import EvaluatorWorker
from pipeline.evaluator.workers import Workers
from pipeline.records import Task


async def play_here(
    config: RunConfig,
    engine: Engine,
    renderer: Renderer,
    tasks: Sequence[Task],
    version: int,
    on_sample: OnSample | None = None,
    done: Collection[tuple[int, int]] = (),
    *,
    teachers: Mapping[str, Engine] | None = None,
    offload: Callable[..., Awaitable[Any]] = asyncio.to_thread,
) -> list[Played]:
    """All samples of the tasks but those of `done`, by weight version `version`. One worker, on this machine's resources.

    teachers: by alias, the engines of those that act in it (`eval.beta`).
    """
    clock = asyncio.get_running_loop().time
    nodes = this_machine(config.run.ray).by_node()
    specs = specs_from_config(config)
    worker = EvaluatorWorker(config, renderer, engine, specs, nodes[0].node, offload=offload, teachers=teachers)
    placement = PlacementPool(nodes, patience_s=config.rollout.admission_patience_s, clock=clock)
    workers = Workers([worker], placement, config.run.max_actor_restarts, clock)
    return await Evaluation(specs, placement, workers, config.rollout.retries).play(tasks, version, on_sample, done)
