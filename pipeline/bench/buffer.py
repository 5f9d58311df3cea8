"""Durable commits beside other ways to put the same rows away: the same groups, the same number in flight, turn by turn.

Invariant: what a side has taken is read back and compared with what it was given, or its figure does not count.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from pipeline.buffer import codec
from pipeline.buffer.api import Attempt, BufferClient
from pipeline.config.schema import RunConfig
from pipeline.errors import RolloutError
from pipeline.records import STUDENT, Group, Sample, Sampling, Stopping, Task

OURS = "buffer"
IN_FLIGHT = 4
ROUNDS = 5
WARM = 1
"""Rounds before those that count."""

Put = Callable[[], Awaitable[object]]
Columns = dict[str, np.ndarray]
"""One group: column -> [rows, tokens]."""


@dataclass(frozen=True, slots=True)
class Shape:
    rows: int
    tokens: int
    groups: int
    """A round."""

    @property
    def megabytes(self) -> float:
        """Of a round's arrays."""
        return self.groups * self.rows * self.tokens * sum(dtype.itemsize for _, dtype in codec.ARRAYS) / 1e6


@dataclass(frozen=True, slots=True)
class Turn:
    seconds: float
    waits: list[float]
    """Of each call, in seconds."""


SHAPES = (Shape(4, 2048, 96), Shape(32, 2048, 32), Shape(256, 2048, 12))


class Side(Protocol):
    async def prepare(self, groups: Sequence[Group]) -> list[Put]:
        """A call a group. What it takes to get there is not measured."""
        ...

    async def take_back(self, groups: Sequence[Group]) -> list[Columns]:
        """What was put, and need not be kept any longer."""
        ...


class Commits:
    """The replay buffer, in this process or another. A round is a step of a run that trains nothing."""

    def __init__(self, buffer: BufferClient) -> None:
        self._buffer = buffer
        self._attempts: list[Attempt] = []
        self._step = 0

    async def new_groups(self, shape: Shape) -> list[Group]:
        self._step += 1
        slots = await self._buffer.assign(self._step, shape.groups, None)
        self._attempts = [await self._buffer.start_attempt(slot.ordinal, 0, "bench") for slot in slots]
        return [_group(attempt, self._step, shape) for attempt in self._attempts]

    async def prepare(self, groups: Sequence[Group]) -> list[Put]:
        return [partial(self._buffer.commit, attempt, group) for attempt, group in zip(self._attempts, groups, strict=True)]

    async def take_back(self, groups: Sequence[Group]) -> list[Columns]:
        return [columns(group) for group in await self._buffer.read([group.ordinal for group in groups], False)]


class RawAppends:
    """The bytes of each group, appended to a file and synced with nothing around them."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = -1

    async def prepare(self, groups: Sequence[Group]) -> list[Put]:
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND)
        return [partial(self._append, codec.encode_group(group)) for group in groups]

    async def _append(self, data: bytes) -> None:
        if os.write(self._file, data) != len(data):
            raise RolloutError(f"{self._path} was not written whole")
        os.fdatasync(self._file)

    async def take_back(self, groups: Sequence[Group]) -> list[Columns]:
        os.close(self._file)
        data, start, found = self._path.read_bytes(), 0, []
        for group in groups:
            end = start + len(codec.encode_group(group))
            found.append(columns(codec.decode_group(data[start:end])))
            start = end
        return found


def bench_config(shapes: Sequence[Shape] = SHAPES, rounds: int = ROUNDS) -> RunConfig:
    """Of a run whose buffer holds all that is measured."""
    said = {
        "student": {"architecture": {}},
        "datasets": {"words": {"generator": "spell_backward"}},
        "algorithm": {"name": "grpo"},
        "rollout": {"tasks_per_step": 1},
        "buffer": {"capacity": sum(shape.groups for shape in shapes) * (WARM + rounds)},
    }
    return RunConfig.model_validate(said)


async def compare(
    commits: Commits, others: Mapping[str, Side], shapes: Sequence[Shape] = SHAPES, rounds: int = ROUNDS
) -> dict[str, float]:
    """over_<other>_<rows>x<tokens>: how many times faster commits are than the other side; mb_per_s_, groups_per_s_ and p99_ms_ of
    commits. Each is the median of `rounds`, in which the sides take turns, so that a ratio is of one moment of a noisy machine.

    Raises RolloutError when a side gives back something else than it took.
    """
    sides: dict[str, Side] = {OURS: commits, **others}
    found: dict[str, float] = {}
    for shape in shapes:
        played = [await _round(commits, sides, shape, number) for number in range(WARM + rounds)][WARM:]
        measured = {f"over_{name}": [turns[name].seconds / turns[OURS].seconds for turns in played] for name in others} | {
            "mb_per_s": [shape.megabytes / turns[OURS].seconds for turns in played],
            "groups_per_s": [shape.groups / turns[OURS].seconds for turns in played],
            "p99_ms": [1000 * float(np.percentile(turns[OURS].waits, 99)) for turns in played],
        }
        found |= {f"{key}_{shape.rows}x{shape.tokens}": float(np.median(values)) for key, values in measured.items()}
    return found


def columns(group: Group) -> Columns:
    """Samples of equal length."""
    return {name: np.stack([getattr(sample, name) for sample in group.samples]) for name, _ in codec.ARRAYS}


async def _round(commits: Commits, sides: Mapping[str, Side], shape: Shape, number: int) -> dict[str, Turn]:
    groups = await commits.new_groups(shape)
    order = list(sides)[number % len(sides) :] + list(sides)[: number % len(sides)]
    turns = {}
    for name in order:
        turns[name] = await _turn(await sides[name].prepare(groups))
        returned = await sides[name].take_back(groups)
        if not all(map(_same, map(columns, groups), returned)):
            raise RolloutError(f"{name} gave back other rows than it took")
    return turns


async def _turn(puts: Sequence[Put]) -> Turn:
    waits: list[float] = []
    following = iter(puts)

    async def one_after_the_other() -> None:
        for put in following:
            began = time.perf_counter()
            await put()
            waits.append(time.perf_counter() - began)

    began = time.perf_counter()
    await asyncio.gather(*(one_after_the_other() for _ in range(IN_FLIGHT)))
    return Turn(time.perf_counter() - began, waits)


def _same(given: Columns, returned: Columns) -> bool:
    """By bits."""
    return given.keys() == returned.keys() and all(
        array.dtype == returned[name].dtype and array.tobytes() == returned[name].tobytes() for name, array in given.items()
    )


def _group(attempt: Attempt, step: int, shape: Shape) -> Group:
    rng = np.random.default_rng(attempt.ordinal)
    task = Task(
        attempt.ordinal, "bench/0", "bench", "single_turn", (("user", "?"),), None, "exact", shape.rows, Sampling(), Stopping(), 0
    )
    samples = tuple(_sample(attempt.ordinal, index, shape.tokens, rng) for index in range(shape.rows))
    return Group(attempt.ordinal, step, attempt.number, task, 0, samples)


def _sample(ordinal: int, index: int, tokens: int, rng: np.random.Generator) -> Sample:
    return Sample(
        sample_id=f"{ordinal}.{index}",
        index=index,
        status="ok",
        reward=0.0,
        token_ids=rng.integers(0, 1 << 15, tokens).astype(np.int32),
        loss_mask=np.ones(tokens, np.uint8),
        logprobs=-rng.random(tokens).astype(np.float32),
        executor=np.full(tokens, STUDENT, np.uint8),
        versions=np.zeros(tokens, np.int32),
        finish_reason="finish",
    )
