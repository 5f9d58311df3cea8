"""No option without a reader: what a configuration may say is looked at by something that is no configuration."""

from __future__ import annotations

import re
import typing
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from pipeline.config.schema import RunConfig

ROOT = Path(__file__).parents[3]


def models(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    if model in seen:
        return
    seen.add(model)
    yield model
    for field in model.model_fields.values():
        for option in options(field.annotation):
            if isinstance(option, type) and issubclass(option, BaseModel):
                yield from models(option, seen)


def options(annotation) -> list:
    arguments = typing.get_args(annotation)
    return [option for argument in arguments for option in options(argument)] if arguments else [annotation]


@pytest.mark.fault(24)
def test_every_option_is_read_somewhere():
    folders = [ROOT / name for name in ("pipeline", "deployments", "workflows")]
    files = [path for folder in folders for path in folder.rglob("*.py") if path.parent.name != "config"]
    helpers = [ROOT / "pipeline" / "config" / name for name in ("schema.py", "provenance.py")]
    read = set(re.findall(r"\.(\w+)\b", "\n".join(path.read_text() for path in (*files, *helpers))))
    named = {f"{model.__name__}.{name}": name for model in models(RunConfig, set()) for name in model.model_fields}
    unread = [key for key, name in named.items() if name not in read]
    assert unread == []
