"""Which teacher scores which dataset, and which aliases are one model.

Invariant: after start-up every dataset that needs a teacher has one that reads the student's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from pipeline.config.models import Teacher
from pipeline.config.schema import RunConfig
from pipeline.engines.base import EngineInfo
from pipeline.errors import ConfigError

_BESIDE_THE_MODEL = {"shots", "replicas"}
"""Settings of an alias that do not change what its engine answers."""


class Vocabulary(Protocol):
    """What the check needs of the student's renderer."""

    digest: str
    vocab_size: int


@dataclass(frozen=True, slots=True)
class TeacherGroup:
    """Aliases that name one model: one deployment serves them all."""

    name: str
    """The first of its aliases, in the order of the configuration."""
    aliases: tuple[str, ...]
    source: Teacher
    replicas: int
    """The most that any alias asks for."""


def aliases_by_dataset(config: RunConfig) -> dict[str, str]:
    """dataset -> alias, for the datasets that have a teacher. Raises ConfigError for an alias that is not configured."""
    named = {dataset: config.teacher_of(dataset) for dataset in config.datasets}
    found = {dataset: alias for dataset, alias in named.items() if alias is not None}
    for dataset, alias in found.items():
        if alias not in config.teachers:
            raise ConfigError(f"datasets.{dataset}.teacher {alias!r} is unknown; teachers are {sorted(config.teachers)}")
    return found


def teacher_groups(config: RunConfig) -> tuple[TeacherGroup, ...]:
    """The models to deploy: aliases that no dataset uses are left out, equal models are one."""
    used = set(aliases_by_dataset(config).values())
    by_model: dict[str, list[str]] = {}
    for alias, teacher in config.teachers.items():
        if alias in used and teacher.has_engine():  # which plays where the agent is
            by_model.setdefault(teacher.model_dump_json(exclude=_BESIDE_THE_MODEL), []).append(alias)
    return tuple(
        TeacherGroup(
            name=aliases[0],
            aliases=tuple(aliases),
            source=config.teachers[aliases[0]],
            replicas=max(config.teachers[alias].replicas for alias in aliases),
        )
        for aliases in by_model.values()
    )


def check_vocabulary(alias: str, teacher: EngineInfo, student: Vocabulary) -> None:
    """Refuse a teacher that reads other tokens than the student writes. Rows of padding in its output matrix are fine.

    An engine without a tokenizer of its own (an empty digest: `fixed_cost`) reads any. Raises ConfigError naming both.
    """
    who = (
        f"teachers.{alias} ({teacher.model}, tokenizer {teacher.tokenizer_digest}, {teacher.vocab_size} output rows) and "
        f"the student (tokenizer {student.digest}, {student.vocab_size} tokens)"
    )
    if teacher.tokenizer_digest and teacher.tokenizer_digest != student.digest:
        raise ConfigError(f"{who} have different tokenizers: a teacher must score the student's own token ids")
    if teacher.vocab_size < student.vocab_size:
        raise ConfigError(f"{who} do not fit: the teacher has no output row for some of the student's tokens")
