"""What all configuration models share: unknown keys are refused, and attribute docstrings become the help text."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

T = TypeVar("T")
MAX_DEPTH = 100
"""Of lists and objects in each other, in what comes over a network."""
Many = Annotated[tuple[T, ...], Field(strict=False)]
"""Of a body, whose lists are no tuples."""


class Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


class RequestPart(Strict):
    """Part of a body that comes over a network. Its types are those of its schema: true is no number, and "1" is not 1."""

    model_config = ConfigDict(strict=True)


class Request(RequestPart):
    """A body that comes over a network."""

    @model_validator(mode="before")
    @classmethod
    def _as_sent(cls, data: Any) -> Any:
        return as_sent(data)

    def digest(self) -> str:
        """The same for bodies that ask for the same, however they were written."""
        return hashlib.sha256(json.dumps(self.model_dump(mode="json"), sort_keys=True).encode()).hexdigest()


def as_sent(data: Any) -> Any:
    """What comes over a network, before it is read: half a surrogate pair is no text, and nothing could write it down.

    JSON has one kind of number: 2.0 is the integer 2, also where types are strict. Raises ValueError.
    """
    data = _whole_numbers(data, MAX_DEPTH)
    try:
        json.dumps(data, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text holds half a surrogate pair, which is not Unicode") from error
    return data


def _whole_numbers(data: Any, room: int) -> Any:
    if not room:
        raise ValueError(f"lists and objects are nested deeper than {MAX_DEPTH}")
    if isinstance(data, dict):
        return {key: _whole_numbers(value, room - 1) for key, value in data.items()}
    if isinstance(data, list):
        return [_whole_numbers(value, room - 1) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data
