"""Scoring without the stage: inside the commit (`teacher_stage.mode: inline`), or when a step is selected (`score_at_select`).

Invariant: the teachers, their settings and the columns are those of the stage; only the moment differs. Inline holds the
rollout's permit while the teacher works, and is there to be measured against; at select the trainer waits for the teacher.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

from pipeline.config.stages import TeacherStage
from pipeline.records import Group
from pipeline.teacher.scorer import score_groups
from pipeline.teacher.teacher import FIELD, Teacher


class ScoreOnDemand:
    """connect: the started teachers by alias. Asked for when there is something to score, so that nobody waits before."""

    def __init__(self, connect: Callable[[], Awaitable[Mapping[str, Teacher]]], settings: TeacherStage) -> None:
        self._connect = connect
        self._settings = settings

    async def __call__(self, groups: Sequence[Group]) -> None:
        """Puts the column into each group that has a teacher and lacks it.

        Raises StageFailed when a teacher cannot score a group: here nobody can drop it.
        """
        wanted = [group for group in groups if group.task.teacher is not None and FIELD not in group.columns]
        if not wanted:
            return
        columns = await score_groups(wanted, await self._connect(), self._settings)
        for group, column in zip(wanted, columns, strict=True):
            group.columns[FIELD] = column
