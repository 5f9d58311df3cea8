"""The placement group of a run, and what stands in its bundles.

Invariant: bundle i is node i of the pool, so what the pool counts is what Ray has set aside, and it goes with the run.
"""

from __future__ import annotations

from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from pipeline.errors import AdmissionError
from pipeline.evaluator.spec import NodeSpec, PlacementToken

GB = 2**30


def place(run_id: str, nodes: tuple[NodeSpec, ...], timeout_s: float) -> PlacementGroup | None:
    """None when some node of the pool gates on nothing: then no sample asks Ray for anything.

    Raises AdmissionError when Ray does not give the group within `timeout_s` seconds, with what it has.
    """
    bundles = [bundle for node in nodes if (bundle := bundle_of(node))]
    if len(bundles) < len(nodes):
        return None
    group = placement_group(bundles, name=group_name(run_id), lifetime="detached")
    if not group.wait(timeout_s):
        raise AdmissionError(
            f"the placement group {bundles} was not given by Ray within {timeout_s:.0f} s (run.start_timeout_s); "
            f"Ray has {ray.available_resources()}"
        )
    return group


def group_name(run_id: str) -> str:
    return f"{run_id}:pool"


def bundle_of(node: NodeSpec) -> dict[str, float]:
    """Whole numbers of GPUs, the CPUs and the memory (bytes) of a node of the pool."""
    amounts = {"CPU": node.cpu, "GPU": float(len(node.gpu_ids)), "memory": float(int(node.memory_gb * GB))}
    return {name: amount for name, amount in amounts.items() if amount > 0}


def in_bundle(group: PlacementGroup | None, index: int) -> dict[str, Any]:
    """Options that put an actor into a bundle."""
    return {"scheduling_strategy": PlacementGroupSchedulingStrategy(group, index)} if group else {}


def on_this_node() -> dict[str, Any]:
    """Options that keep an actor on the node of the caller, which owns the run folder."""
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)}


def demand(token: PlacementToken) -> dict[str, float]:
    """What the process of one sample asks of its bundle: exactly its token."""
    return {"num_gpus": token.gpu, "num_cpus": token.cpu, "memory": int(token.memory_gb * GB)}
