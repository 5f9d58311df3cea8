"""`rollout bench buffer`: commits through the ReplayBuffer actor against the package TransferQueue, on one Ray, in one run.

Invariant: all sides take the same arrays from one process, which commits as the evaluator pool does; the package's settings are
its own.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import ray

from deployments import cluster
from deployments.calls import CALL_S, RemoteStage
from deployments.hosting import OPTIONS
from deployments.names import NAMESPACE, actor_name
from deployments.replay_buffer import ReplayBuffer
from deployments.threads import keep_memory, take_turns
from deployments.witness import CommitWitness
from pipeline.bench import buffer
from pipeline.bench.buffer import Columns, Commits, Put, RawAppends, Shape, Side
from pipeline.buffer import codec
from pipeline.buffer.contents import EncodedGroup, encode_group
from pipeline.buffer.reader import read_run_epoch
from pipeline.buffer.schema import create_run
from pipeline.cli.runs import write_config
from pipeline.config.training import Ray
from pipeline.paths import RunPaths
from pipeline.records import Group

LOGICAL_CPUS = 8
"""TransferQueue asks for one a storage unit and one for its controller, whatever the machine has."""
START_S = 60.0
RAY = "over_ray_*: beside calls of an actor that does nothing with the same bytes"
MISSING = "over_transferqueue_*: not measured, the extra `bench` is not installed: pip install 'rollout-pipeline[bench]'"


def figures(folder: Path, shapes: Sequence[Shape] = buffer.SHAPES, rounds: int = buffer.ROUNDS) -> dict[str, Any]:
    """See `pipeline.bench.buffer.compare`."""
    paths, config = RunPaths(folder / "bench"), buffer.bench_config(shapes, rounds)
    create_run(paths, {})
    write_config(paths, config)
    os.environ.setdefault("TQ_NUM_THREADS", str(min(8, os.cpu_count() or 1)))  # as the package itself corrects it, call by call
    cluster.start(paths, Ray(num_cpus=LOGICAL_CPUS), None)
    try:
        return asyncio.run(_compare(paths, shapes, rounds))
    finally:
        cluster.stop(paths)


async def _compare(paths: RunPaths, shapes: Sequence[Shape], rounds: int) -> dict[str, Any]:
    take_turns()  # as the evaluator pool's process does
    keep_memory()
    options = OPTIONS | {"name": actor_name(paths.run_id, ReplayBuffer.stage), "namespace": NAMESPACE}
    actor = ray.remote(ReplayBuffer).options(**options).remote(str(paths.root), read_run_epoch(paths))
    await asyncio.wait_for(asyncio.wrap_future(actor.ready.remote().future()), START_S)
    others, missing = other_sides(paths)
    others["ray"] = ActorCalls()
    notes = [f"{buffer.IN_FLIGHT} in flight on every side; medians of {rounds} rounds in which the sides take turns", RAY, *missing]
    commits = Commits(CommitWitness(RemoteStage(paths.run_id, ReplayBuffer.stage), paths.commits))
    measured = await buffer.compare(commits, others, shapes, rounds)
    return {"figures": measured, "notes": notes}


def other_sides(paths: RunPaths) -> tuple[dict[str, Side], list[str]]:
    """What commits are compared with here, and a line for what cannot be."""
    sides: dict[str, Side] = {"raw": RawAppends(paths.root / "raw")}
    if find_spec("transfer_queue") is None:
        return sides, [MISSING]
    return sides | {"transferqueue": TransferQueue()}, []


class ActorCalls:
    """Calls of an actor that only keeps what it gets, encoded before: what Ray's own calls cost, which commits go beside."""

    def __init__(self) -> None:
        self._keeper = ray.remote(Keeper).options(num_cpus=0, max_concurrency=OPTIONS["max_concurrency"]).remote()

    async def prepare(self, groups: Sequence[Group]) -> list[Put]:
        return [partial(self._keep, encode_group(group)) for group in groups]

    async def _keep(self, group: EncodedGroup) -> None:
        await asyncio.wait_for(self._keeper.keep.remote(group), CALL_S)

    async def take_back(self, groups: Sequence[Group]) -> list[Columns]:
        ordinals = [group.ordinal for group in groups]
        kept = await asyncio.wait_for(self._keeper.take_back.remote(ordinals), CALL_S)
        return [buffer.columns(codec.decode_group(group.rows.data)) for group in kept]


class Keeper:
    def __init__(self) -> None:
        self._kept: dict[int, EncodedGroup] = {}

    async def keep(self, group: EncodedGroup) -> None:
        self._kept[group.ordinal] = group

    async def take_back(self, ordinals: list[int]) -> list[EncodedGroup]:
        return [self._kept.pop(ordinal) for ordinal in ordinals]


class TransferQueue:
    """The package, in memory: a key a row, a partition a round."""

    def __init__(self) -> None:
        import transfer_queue

        self._queue = transfer_queue
        self._round = 0
        transfer_queue.init()

    async def prepare(self, groups: Sequence[Group]) -> list[Put]:
        self._round += 1
        return [partial(self._put, _keys(group), _fields(group)) for group in groups]

    async def _put(self, keys: list[str], fields: Any) -> None:
        await self._queue.async_kv_batch_put(keys=keys, partition_id=self._partition, fields=fields)

    async def take_back(self, groups: Sequence[Group]) -> list[Columns]:
        found = []
        for keys in map(_keys, groups):
            rows = await self._queue.async_kv_batch_get(keys=keys, partition_id=self._partition)
            found.append({name: np.stack([row.numpy() for row in column.unbind()]) for name, column in rows.items()})
            await self._queue.async_kv_clear(keys=keys, partition_id=self._partition)
        return found

    @property
    def _partition(self) -> str:
        return f"round_{self._round}"


def _keys(group: Group) -> list[str]:
    return [sample.sample_id for sample in group.samples]


def _fields(group: Group) -> Any:
    import torch
    from tensordict import TensorDict

    arrays = {name: torch.from_numpy(array) for name, array in buffer.columns(group).items()}
    return TensorDict(arrays, batch_size=len(group.samples))
