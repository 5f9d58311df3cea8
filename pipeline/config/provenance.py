"""The two cascades: each value of a sample's sampling and stopping, with the level that it came from. The finest level wins.

Sampling: built-in -> run (`rollout.sampling`) -> dataset; an evaluation puts `eval` on top.
Stopping: built-in -> spec (`default_stopping`) -> dataset.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from pipeline.config.schema import RunConfig
from pipeline.config.stages import Spec
from pipeline.errors import ConfigError
from pipeline.records import Sampling, Stopping

Value = TypeVar("Value", Sampling, Stopping)


@dataclass(frozen=True, slots=True)
class Resolved(Generic[Value]):
    value: Value
    origins: dict[str, str]
    """Field -> `built-in`, or the configuration key whose value it has."""


def spec_for(config: RunConfig, task_type: str) -> Spec:
    """The spec that plays a task type. Raises ConfigError that lists the specs; never falls back to another one."""
    for spec in config.specs:
        if spec.task_type == task_type:
            return spec
    raise ConfigError(f"task type {task_type!r} has no spec; specs cover {sorted(spec.task_type for spec in config.specs)}")


def resolve_sampling(config: RunConfig, dataset: str) -> Resolved[Sampling]:
    """How training samples of a dataset are drawn."""
    return _cascade(Sampling(), _sampling_levels(config, dataset))


def resolve_eval_sampling(config: RunConfig, dataset: str) -> Resolved[Sampling]:
    """How held-out samples of a dataset are drawn: `eval` decides the temperature always, the length when it says one."""
    on_top = {"temperature": config.eval.temperature, "max_tokens": config.eval.max_tokens}
    return _cascade(Sampling(), [*_sampling_levels(config, dataset), ("eval", on_top)])


def resolve_stopping(config: RunConfig, dataset: str) -> Resolved[Stopping]:
    """When an episode of a dataset ends."""
    task_type = config.datasets[dataset].task_type
    spec = spec_for(config, task_type)
    index = config.specs.index(spec)
    levels = [
        (f"specs.{index}.default_stopping", _said(spec.default_stopping)),
        (f"datasets.{dataset}.stopping", _said(config.datasets[dataset].stopping)),
    ]
    return _cascade(Stopping(), levels)


def _sampling_levels(config: RunConfig, dataset: str) -> list[tuple[str, Mapping[str, Any]]]:
    return [
        ("rollout.sampling", _said(config.rollout.sampling)),
        (f"datasets.{dataset}.sampling", _said(config.datasets[dataset].sampling)),
    ]


def _said(part: BaseModel) -> dict[str, Any]:
    return part.model_dump()


def _cascade(built_in: Value, levels: list[tuple[str, Mapping[str, Any]]]) -> Resolved[Value]:
    names = [field.name for field in fields(built_in)]
    values = {name: getattr(built_in, name) for name in names}
    origins = dict.fromkeys(names, "built-in")
    for level, said in levels:
        for name, value in said.items():
            if value is not None:
                values[name] = value
                origins[name] = f"{level}.{name}"
    return Resolved(type(built_in)(**values), origins)
