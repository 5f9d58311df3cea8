"""What all configuration models share: unknown keys are refused, and attribute docstrings become the help text."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

T = TypeVar("T")
MAX_DEPTH = 100
"""Of lists and objects in each other, in what comes over a network."""
TOO_DEEP = f"lists and objects are nested deeper than {MAX_DEPTH}"
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


class NotAsSent(ValueError):
    """key: of the body, below which the fault is; None: everywhere."""

    def __init__(self, text: str, key: str | None) -> None:
        super().__init__(text if key is None else f"{key}: {text}")
        self.key = key


def as_sent(data: Any) -> Any:
    """What comes over a network, before it is read: half a surrogate pair is no text, and nothing could write it down.

    JSON has one kind of number: 2.0 is the integer 2, also where types are strict. Raises NotAsSent.
    """
    if not isinstance(data, dict):
        return _part_as_sent(data, None)
    for key in data:
        _part_as_sent(key, None)
    return {key: _part_as_sent(value, key) for key, value in data.items()}


def _part_as_sent(part: Any, key: str | None) -> Any:
    try:
        part = _whole_numbers(part, MAX_DEPTH - 1)
        json.dumps(part, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise NotAsSent("a text holds half a surrogate pair, which is not Unicode", key) from error
    except RecursionError:
        raise NotAsSent(TOO_DEEP, key) from None
    return part


def _whole_numbers(data: Any, room: int) -> Any:
    if not room:
        raise RecursionError
    if isinstance(data, dict):
        return {key: _whole_numbers(value, room - 1) for key, value in data.items()}
    if isinstance(data, list):
        return [_whole_numbers(value, room - 1) for value in data]
    return int(data) if isinstance(data, float) and data.is_integer() else data
