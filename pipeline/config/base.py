"""What all configuration models share: unknown keys are refused, and attribute docstrings become the help text."""

from __future__ import annotations

import json
from typing import Any

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True, protected_namespaces=()
    )


def refuse_broken_text(data: Any) -> Any:
    """For what comes over a network, before it is read: half a surrogate pair is no text, and nothing could write it down.

    Raises ValueError.
    """
    try:
        json.dumps(data, ensure_ascii=False, default=str).encode()
    except UnicodeEncodeError as error:
        raise ValueError("a text holds half a surrogate pair, which is not Unicode") from error
    return data
