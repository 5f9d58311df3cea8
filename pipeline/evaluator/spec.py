"""How a task type is played and what one of its samples needs. Immutable, and light to import.

Invariant: resources are compared and summed in whole units only (1/10,000 GPU, 1/1,000 CPU, MiB, 1/1,000 of a custom one), by
`Units.of` and `custom_units`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from pipeline.config.schema import RunConfig
from pipeline.config.stages import ResourcePart, SandboxPart, Spec, StoppingPart
from pipeline.errors import ConfigError
from pipeline.pickling import by_fields

GPU_UNIT, CPU_UNIT, MEMORY_UNIT, CUSTOM_UNIT = 10_000, 1_000, 1_024, 1_000
"""Whole units in one GPU, one CPU, one GB of memory, and one of a custom resource."""


@dataclass(frozen=True, slots=True)
class Resource:
    """What one sample (or, as a budget, a batch) may hold."""

    gpu: float = 0.0
    cpu: float = 0.0
    memory_gb: float = 0.0
    concurrency: int = 64
    """Samples of one evaluator that run at the same time, at most."""
    custom: Mapping[str, float] = field(default_factory=dict)
    """What only the pool counts, by name: licences, devices, seats of a service."""

    def times(self, count: int) -> Resource:
        """The budget of `count` samples."""
        custom = {name: value * count for name, value in self.custom.items()}
        return Resource(self.gpu * count, self.cpu * count, self.memory_gb * count, self.concurrency, custom)

    def maximum(self, other: Resource) -> Resource:
        names = sorted({*self.custom, *other.custom})
        return Resource(
            max(self.gpu, other.gpu),
            max(self.cpu, other.cpu),
            max(self.memory_gb, other.memory_gb),
            max(self.concurrency, other.concurrency),
            {name: max(self.custom.get(name, 0.0), other.custom.get(name, 0.0)) for name in names},
        )


class Units(NamedTuple):
    """A resource in whole units."""

    gpu: int
    cpu: int
    memory: int

    @classmethod
    def of(cls, gpu: float, cpu: float, memory_gb: float) -> Units:
        """Rounded to the nearest unit; what is asked for at all is at least one."""
        return cls(_whole(gpu, GPU_UNIT), _whole(cpu, CPU_UNIT), _whole(memory_gb, MEMORY_UNIT))


def custom_units(custom: Iterable[tuple[str, float]]) -> tuple[tuple[str, int], ...]:
    """By name; what is not asked for is left out."""
    return tuple(sorted((name, _whole(amount, CUSTOM_UNIT)) for name, amount in custom if amount > 0))


def _whole(amount: float, unit: int) -> int:
    return max(1, round(amount * unit)) if amount > 0 else 0


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """A node of the pool: every listed GPU has capacity 1.0."""

    node: str
    gpu_ids: tuple[int, ...] = ()
    cpu: float = 0.0
    memory_gb: float = 0.0
    custom: tuple[tuple[str, float], ...] = ()


@by_fields
@dataclass(frozen=True, slots=True)
class PlacementToken:
    """The right of one sample to run on one node, held from init until its cleanup has ended."""

    node: str
    gpu_id: int | None
    gpu: float
    cpu: float
    memory_gb: float
    custom: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class PhaseTimeouts:
    """Seconds each phase of an episode may take; `turn_s` bounds one call of the engine."""

    init_s: float = 30.0
    turn_s: float = 120.0
    run_s: float = 600.0
    verify_s: float = 60.0
    cleanup_s: float = 30.0

    @property
    def total_s(self) -> float:
        return self.init_s + self.run_s + self.verify_s + self.cleanup_s


@dataclass(frozen=True, slots=True)
class EvaluatorSpec:
    evaluator_id: str
    task_type: str
    agent: str
    """Short name or `module:attribute`."""
    resource: Resource = Resource()
    run_resource: Resource | None = None
    """None: as `resource`."""
    eval_resource: Resource | None = None
    """None: as `resource`."""
    batch_size: int | None = 1
    """Tasks a batch; None: one open batch that is sealed at the end."""
    default_stopping: StoppingPart = StoppingPart()
    timeouts: PhaseTimeouts = PhaseTimeouts()
    sandbox: SandboxPart = SandboxPart()

    @property
    def sample_resource(self) -> Resource:
        """Per-field maximum of run and eval resource: a sample keeps its token through verify."""
        return (self.run_resource or self.resource).maximum(self.eval_resource or self.resource)

    def tokens_for(self, samples: int) -> int:
        """Tokens that a batch of this many samples takes at once."""
        return min(samples, self.resource.concurrency)


def specs_from_config(config: RunConfig) -> dict[str, EvaluatorSpec]:
    """Specs by task type. Raises ConfigError when two specs claim one type."""
    specs: dict[str, EvaluatorSpec] = {}
    for position, part in enumerate(config.specs):
        if part.task_type in specs:
            raise ConfigError(f"specs[{position}].task_type {part.task_type!r} has a spec already; give each task type one")
        specs[part.task_type] = _spec(part)
    return specs


def _spec(part: Spec) -> EvaluatorSpec:
    return EvaluatorSpec(
        evaluator_id=part.evaluator_id or part.task_type,
        task_type=part.task_type,
        agent=part.agent,
        resource=_resource(part.resource),
        run_resource=_resource(part.run_resource) if part.run_resource else None,
        eval_resource=_resource(part.eval_resource) if part.eval_resource else None,
        batch_size=part.batch_size,
        default_stopping=part.default_stopping,
        timeouts=PhaseTimeouts(
            part.init_timeout_s, part.turn_timeout_s, part.run_timeout_s, part.verify_timeout_s, part.cleanup_timeout_s
        ),
        sandbox=part.sandbox,
    )


def _resource(part: ResourcePart) -> Resource:
    return Resource(part.gpu, part.cpu, part.memory_gb, part.concurrency, dict(part.custom))
