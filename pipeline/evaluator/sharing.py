"""One engine for many samples across processes: what they ask for at the same moment travels in few calls.

Invariant: as `GroupGenerator`: every request ends with its own completion or an exception, and one bad row does not take others.
"""

from __future__ import annotations

import asyncio
from itertools import cycle

from pipeline.engines.base import Completion, Engine, EngineInfo, GenerateRequest, ScoredRow, ScoreRow, Signal, Version
from pipeline.evaluator.generation import CallPolicy, GroupGenerator

WAYS = 8
"""Calls that the requests of one moment are spread over: a call is answered as a whole, and must not wait for all the others."""


class SharedCalls:
    """Implements engines.base.Engine. Request ids must be unique among those who share it. Tries once: the callers try again."""

    def __init__(self, engine: Engine, timeout_s: float) -> None:
        self._engine = engine
        self._policy = CallPolicy(attempts=1, backoff_s=0.0, timeout_s=timeout_s)
        self._ways: dict[Version, cycle[GroupGenerator]] = {}
        self._made: list[GroupGenerator] = []

    async def info(self) -> EngineInfo:
        return await self._engine.info()

    async def generate(self, requests: list[GenerateRequest], version: Version) -> list[Completion]:
        if version not in self._ways:
            ways = [GroupGenerator(self._engine, version, self._policy) for _ in range(WAYS)]
            self._made += ways
            self._ways[version] = cycle(ways)
        return list(await asyncio.gather(*(next(self._ways[version]).generate(request) for request in requests)))

    async def score(self, rows: list[ScoreRow], signal: Signal, top_k: int) -> list[ScoredRow]:
        return await self._engine.score(rows, signal, top_k)

    async def close(self) -> None:
        """The calls; the engine is its owner's."""
        for generator in self._made:
            await generator.close()
