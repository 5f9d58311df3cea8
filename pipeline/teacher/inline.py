"""Scoring inside the commit (`teacher_stage.mode: inline`): what the stage is measured against.

Invariant: a group is committed together with its wait for the teacher, so the rollout's permit is held for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.buffer.api import Attempt, BufferClient
from pipeline.config.stages import TeacherStage
from pipeline.records import Group
from pipeline.teacher.scorer import score_groups
from pipeline.teacher.teacher import FIELD, Teacher


class InlineScoring:
    """A BufferClient for the evaluator pool: `commit` scores first, everything else is passed on. The teachers are started."""

    def __init__(self, buffer: BufferClient, teachers: Mapping[str, Teacher], settings: TeacherStage) -> None:
        self._buffer, self._teachers, self._settings = buffer, teachers, settings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._buffer, name)

    async def commit(self, attempt: Attempt, group: Group) -> bool:
        """Raises StageFailed when the teacher cannot score the group."""
        columns = await score_groups([group], self._teachers, self._settings) if FIELD in group.task.needs else []
        new = await self._buffer.commit(attempt, group)
        if columns:
            await self._buffer.mark_produced(columns)
        return new
