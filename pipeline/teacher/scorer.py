"""The teacher stage of a run, and the two ways to score without it. All of them ask the same teachers in the same way."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from pipeline.agents.base import Renderer
from pipeline.buffer.api import BufferClient
from pipeline.config.schema import RunConfig
from pipeline.config.stages import TeacherStage
from pipeline.engines.base import Engine
from pipeline.errors import StageFailed, root_cause
from pipeline.records import Column, Group
from pipeline.teacher.batches import take_batch
from pipeline.teacher.lane import Lane
from pipeline.teacher.routing import Vocabulary
from pipeline.teacher.stage import ScoringStage
from pipeline.teacher.teacher import FIELD, Shots, Teacher, make_teachers


class TeacherScorer(ScoringStage):
    """The scoring stage for the field "teacher". `run` checks the teachers first; `start` does so earlier, if called.

    teachers: replicas by alias (one alias of each group of `routing.teacher_groups` is enough). renderers: by alias, needed for
    aliases with shots. Raises ConfigError for what is missing or does not fit together.
    """

    def __init__(
        self,
        config: RunConfig,
        buffer: BufferClient,
        teachers: Mapping[str, Sequence[Engine]],
        renderers: Mapping[str, Renderer],
        student_renderer: Vocabulary,
        shots: Shots,
        clock: Callable[[], float] = time.time,
        *,
        actor: str = "",
    ) -> None:
        by_alias = make_teachers(config, teachers, renderers, shots)
        self.teachers = by_alias
        self._student = student_renderer
        self._started = False
        super().__init__(
            FIELD,
            distinct(by_alias),
            lambda item: by_alias[item.teacher].name if item.teacher in by_alias else str(item.teacher),
            buffer,
            config.teacher_stage,
            capacity=config.capacity,
            clock=clock,
            actor=actor,
        )

    async def start(self) -> None:
        """Ask every teacher who it is. Raises ConfigError when one cannot score this student."""
        if not self._started:
            await start_teachers(self.teachers, self._student)
            self._started = True


def distinct(teachers: Mapping[str, Teacher]) -> list[Teacher]:
    """Each teacher once, however many aliases it has."""
    return list({teacher.name: teacher for teacher in teachers.values()}.values())


async def start_teachers(teachers: Mapping[str, Teacher], student: Vocabulary) -> None:
    """Raises ConfigError when a teacher cannot score this student."""
    await _together([teacher.start(student) for teacher in distinct(teachers)])


async def _together(coroutines: Iterable[Coroutine[Any, Any, None]]) -> None:
    """All of them at once; the first failure ends the others and is raised as it is."""
    failure: Exception | None = None
    try:
        async with asyncio.TaskGroup() as group:
            for coroutine in coroutines:
                group.create_task(coroutine)
    except ExceptionGroup as failures:
        failure = failures.exceptions[0]
    if failure is not None:
        raise failure


async def score_groups(groups: Sequence[Group], teachers: Mapping[str, Teacher], settings: TeacherStage) -> list[Column]:
    """The columns of the groups, in their order: scored when they are selected (`score_at_select`), or before their
    commit (`inline`). The same caps and deadlines as in the stage, an infrastructure fault is tried once more, and any other
    fault is raised as StageFailed: here nobody can drop a group.
    """
    columns: dict[int, Column] = {}

    async def score_all(teacher: Teacher) -> None:
        lane = Lane(teacher, settings.call_timeout_s)
        waiting = [group for group in groups if teachers[group.task.teacher or ""] is teacher]

        async def replica_loop(replica: int) -> None:
            while waiting:
                batch = take_batch(
                    waiting,
                    rows=lambda group: len(group.samples),
                    tokens=Group.tokens,
                    max_rows=settings.max_batch_rows,
                    max_tokens=settings.max_batch_tokens,
                    replicas=teacher.replicas,
                )
                del waiting[: len(batch)]
                for ordinal, result in (await lane.attempt(batch, replica, again=True)).items():
                    if not isinstance(result, Column):
                        raise StageFailed(FIELD, f"teacher {teacher.name!r}, group {ordinal}: {root_cause(result)}") from result
                    columns[ordinal] = result

        await _together(replica_loop(replica) for replica in range(teacher.replicas))

    await _together(score_all(teacher) for teacher in distinct(teachers))
    return [columns[group.ordinal] for group in groups]
