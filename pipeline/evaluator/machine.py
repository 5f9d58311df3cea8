"""What a run may ask Ray for: logical CPUs, GPUs and memory, by node."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import psutil

from pipeline.config.schema import RunConfig
from pipeline.config.training import Ray
from pipeline.evaluator.spec import NodeSpec, specs_from_config

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
    """What a private Ray here will report, as near as can be said before it runs: what `run.ray` says, else what there is."""
    free_gb = psutil.virtual_memory().available / 2**30
    memory_gb = max(0.0, (free_gb - settings.object_store_mb / 1024) * MEMORY_SHARE)
    gpus = count_gpus() if settings.num_gpus is None else settings.num_gpus
    return Machine(float(settings.num_cpus or os.cpu_count() or 1), gpus, round(memory_gb, 2))


def pretended_gpus(config: RunConfig, there: int) -> list[str]:
    """What will look for a GPU and find none, a sentence for each. Ray hands out as many as `run.ray.num_gpus` says, whatever the
    machine has; without that key it counts them itself, and on a cluster elsewhere the nodes do.

    there: GPUs of this machine."""
    said = config.run.ray.num_gpus
    if config.run.ray.address is not None or said is None or said <= there:
        return []
    servers = {"engine": config.engine} | {f"teachers.{alias}": teacher for alias, teacher in config.teachers.items()}
    wanted = {f"{key}.launch.gpus": server.launch.gpus for key, server in servers.items() if server.launch is not None}
    wanted |= {f"specs.{name}.resource.gpu": spec.sample_resource.gpu for name, spec in specs_from_config(config).items()}
    pretence = f"run.ray.num_gpus {said} is only said: the NVIDIA driver of this machine lists {there or 'no'} GPUs"
    return [f"{key} {gpus:g}: {pretence}" for key, gpus in wanted.items() if gpus]


def count_gpus(driver: Path = Path("/proc/driver/nvidia/gpus")) -> int:
    """GPUs that the NVIDIA driver of this machine lists; 0 without a driver."""
    return len(list(driver.iterdir())) if driver.is_dir() else 0
