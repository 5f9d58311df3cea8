"""What the buffer decides by: one frozen record, made from the run's configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BufferSettings:
    tasks_per_step: int
    max_staleness: int
    capacity: int
    """Groups pending, running, written and ready at the same time."""
    sampler: Literal["in_order", "ready_first", "windowed"] = "in_order"
    on_dropped: Literal["replace", "shrink"] = "replace"
    infra_attempts: int = 3
    """Attempts that an ordinal may lose to infrastructure; the last one drops it."""
    data_attempts: int = 1
    backoff_s: float = 0.5
    """Wait before the second attempt; doubles with each further failure."""
    poison_after: int = 20
    """Lost attempts that drop an ordinal as `poison`."""
    keep_groups: int | None = None
    """Trained groups whose rows stay behind what resume needs; None: all."""
    allow_network_fs: bool = False
    inline_bytes: int = 64 * 1024
    """Encoded rows above this go to a segment, others into the database."""
    segment_bytes: int = 64 * 1024 * 1024
    """A segment that has grown to this is closed and a new one begun."""

    def __post_init__(self) -> None:
        needed = self.tasks_per_step * (self.max_staleness + 1)
        if self.capacity < needed:
            raise ConfigError(
                f"buffer.capacity {self.capacity} is below {needed} = rollout.tasks_per_step {self.tasks_per_step}"
                f" * (rollout.max_staleness {self.max_staleness} + 1): step {self.max_staleness + 1} could never be assigned"
            )

    @classmethod
    def from_config(cls, config: RunConfig) -> BufferSettings:
        rollout, buffer = config.rollout, config.buffer
        return cls(
            tasks_per_step=rollout.tasks_per_step,
            max_staleness=rollout.max_staleness,
            capacity=config.capacity,
            sampler=buffer.sampler,
            on_dropped=rollout.on_dropped,
            infra_attempts=rollout.retries.infra,
            data_attempts=rollout.retries.data,
            backoff_s=rollout.retries.backoff_s,
            keep_groups=buffer.keep_groups,
            allow_network_fs=buffer.allow_network_fs,
        )
