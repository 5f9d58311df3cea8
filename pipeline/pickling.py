"""How records travel between processes: thousands of small ones a step, each by the values of its fields."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

C = TypeVar("C", bound=type)


def by_fields(record: C) -> C:
    """For a dataclass of two fields or more: pickled as the call that makes it again. Left alone, one with slots looks its fields
    up at each instance, which costs more than what is in them."""
    values = attrgetter(*(field.name for field in fields(record)))

    def __reduce__(self: Any) -> tuple[Any, ...]:
        return record, values(self)

    record.__reduce__ = __reduce__
    return record
