"""What a run may ask Ray for: logical CPUs, GPUs and memory, by node."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from pipeline.config.training import Ray
from pipeline.evaluator.spec import NodeSpec

MEMORY_SHARE = 0.7
"""Share of the free memory that Ray offers to tasks and actors."""


@dataclass(frozen=True, slots=True)
class Machine:
    """Totals, and the nodes they are spread over; without nodes it is one."""

    cpus: float
    gpus: int = 0
    memory_gb: float = 0.0
    nodes: tuple[NodeSpec, ...] = ()

    def by_node(self) -> tuple[NodeSpec, ...]:
        return self.nodes or (NodeSpec("local", tuple(range(self.gpus)), self.cpus, self.memory_gb),)

    @classmethod
    def of(cls, nodes: tuple[NodeSpec, ...]) -> Machine:
        return cls(
            sum(node.cpu for node in nodes),
            sum(len(node.gpu_ids) for node in nodes),
            sum(node.memory_gb for node in nodes),
            nodes,
        )


def this_machine(settings: Ray) -> Machine:
    """What a private Ray here will report, as near as can be said before it runs: `run.ray.num_cpus` or all logical CPUs."""
    free_gb = psutil.virtual_memory().available / 2**30
    memory_gb = max(0.0, (free_gb - settings.object_store_mb / 1024) * MEMORY_SHARE)
    return Machine(float(settings.num_cpus or os.cpu_count() or 1), 0, round(memory_gb, 2))
