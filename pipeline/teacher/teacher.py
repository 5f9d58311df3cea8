"""A teacher: one model behind one or more engine replicas, and the ways in which its aliases read a task.

Invariant: a reply counts only after it was checked; a bad one costs its own group, not the call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.agents.base import Renderer
from pipeline.buffer.api import BacklogItem
from pipeline.config.schema import RunConfig
from pipeline.engines.base import Engine, EngineInfo, ScoreRow, Signal
from pipeline.errors import ConfigError, RolloutError, StageFailed, root_cause
from pipeline.records import Column, Group
from pipeline.teacher.routing import Vocabulary, aliases_by_dataset, check_vocabulary, teacher_groups
from pipeline.teacher.scoring import Ask, build_column, match_replies, score_rows

FIELD = "teacher"
"""The field that this stage produces."""

INFO_S = 60.0
"""Deadline of an engine's answer at start-up."""

Messages = tuple[tuple[str, str], ...]
Shots = Callable[[str, int], Messages]
"""(dataset, count) -> solved examples as alternating user and assistant turns."""


@dataclass(frozen=True, slots=True)
class Reading:
    """How one alias reads the tasks of one dataset."""

    alias: str
    shots: Messages
    renderer: Renderer | None
    """The teacher's own; needed with shots only."""
    extra_tokens: int
    """What the shots add to a row, for the caps."""

    def prompt(self, messages: Messages) -> np.ndarray | None:
        """int32 [P]: the teacher's own prompt, or None when it reads what the student read."""
        if not self.shots or self.renderer is None:
            return None
        systems = tuple(message for message in messages if message[0] == "system")
        others = tuple(message for message in messages if message[0] != "system")
        return self.renderer.render(systems + self.shots + others)


class Teacher:
    """Implements stage.Scorer over the replicas of one model."""

    def __init__(
        self, name: str, engines: Sequence[Engine], readings: Mapping[str, Reading], *, signal: Signal, top_k: int
    ) -> None:
        self.name = name
        self.replicas = len(engines)
        self._engines = list(engines)
        self._readings = dict(readings)
        self._signal, self._top_k = signal, top_k
        self._info: EngineInfo | None = None

    async def start(self, student: Vocabulary) -> None:
        """Ask every replica who it is. Raises ConfigError when it is no teacher for this student, StageFailed when it is mute."""
        for replica, engine in enumerate(self._engines):
            try:
                async with asyncio.timeout(INFO_S):
                    info = await engine.info()
            except Exception as error:
                message = f"replica {replica} of teacher {self.name!r} does not answer: {root_cause(error)}"
                raise StageFailed(FIELD, message) from error
            check_vocabulary(self.name, info, student)
            if self._info is not None and info.digest != self._info.digest:
                raise ConfigError(f"teachers.{self.name}: replicas hold different models ({info.digest}, {self._info.digest})")
            self._info = info

    def tokens(self, item: BacklogItem) -> int:
        """Tokens of the rows that an item becomes."""
        return item.tokens + item.rows * self._readings[item.dataset].extra_tokens

    async def score(self, groups: list[Group], replica: int) -> dict[int, Column | Exception]:
        """ordinal -> its column, or why this group has none. What the engine raises is the fault of the whole call."""
        rows: dict[int, list[ScoreRow]] = {}
        results: dict[int, Column | Exception] = {}
        for group in groups:
            try:
                rows[group.ordinal] = score_rows(group, self._reading(group).prompt(group.task.messages))
            except RolloutError as error:
                results[group.ordinal] = error
        asked = [row for of_group in rows.values() for row in of_group]
        replies = match_replies(asked, await self._engines[replica].score(asked, self._signal, self._top_k)) if asked else {}
        for group in groups:
            if group.ordinal in rows:
                results[group.ordinal] = self._column(group, rows[group.ordinal], replies)
        return results

    def _reading(self, group: Group) -> Reading:
        return self._readings[group.task.dataset]

    def _column(self, group: Group, rows: list[ScoreRow], replies: Mapping) -> Column | Exception:
        reading, info = self._reading(group), self._info
        if info is None:
            raise RuntimeError(f"teacher {self.name} was not started")
        digest = f"{info.digest}+{len(reading.shots) // 2}shots" if reading.shots else info.digest
        ask = Ask(self._signal, self._top_k, info.vocab_size)
        try:
            return build_column(group, rows, replies, ask, name=FIELD, producer=reading.alias, digest=digest)
        except RolloutError as error:
            return error


def make_teachers(
    config: RunConfig, engines: Mapping[str, Sequence[Engine]], renderers: Mapping[str, Renderer], shots: Shots
) -> dict[str, Teacher]:
    """alias -> its teacher; aliases that name one model share one.

    engines: by alias, at least one alias of every group of `teacher_groups`. renderers: by alias, for those with shots.
    Raises ConfigError for an alias without engines or without the renderer that it needs.
    """
    by_dataset = aliases_by_dataset(config)
    teachers: dict[str, Teacher] = {}
    for group in teacher_groups(config):
        found = next((engines[alias] for alias in group.aliases if engines.get(alias)), None)
        if found is None:
            raise ConfigError(f"teachers.{group.name}: no engine serves it; engines are {sorted(engines)}")
        readings = {
            dataset: _reading(config, alias, dataset, renderers, shots)
            for dataset, alias in by_dataset.items()
            if alias in group.aliases
        }
        opd = config.algorithm.opd
        teacher = Teacher(group.name, found, readings, signal=opd.signal, top_k=opd.top_k)
        teachers.update(dict.fromkeys(group.aliases, teacher))
    return teachers


def _reading(config: RunConfig, alias: str, dataset: str, renderers: Mapping[str, Renderer], shots: Shots) -> Reading:
    settings = config.teachers[alias]
    if settings.shots == 0:
        return Reading(alias, (), None, 0)
    if alias not in renderers:
        raise ConfigError(f"teachers.{alias}.shots is {settings.shots}, and there is no renderer for its prompt")
    renderer, examples = renderers[alias], shots(dataset, settings.shots)
    bare: Messages = (("user", ""),)
    extra = len(renderer.render(examples + bare)) - len(renderer.render(bare))
    return Reading(alias, examples, renderer, extra)
