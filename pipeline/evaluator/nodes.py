"""What is free on each node, in whole units.

Invariant: `free` never falls below zero, and `put_back` restores exactly what `take` took.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from pipeline.evaluator.spec import (
    CPU_UNIT,
    CUSTOM_UNIT,
    GPU_UNIT,
    MEMORY_UNIT,
    NodeSpec,
    PlacementToken,
    Resource,
    Units,
    custom_units,
)

UNBOUNDED = sys.maxsize
"""Capacity for samples that ask for nothing."""


class Need(NamedTuple):
    """What one sample takes, in whole units."""

    gpu: int
    cpu: int
    memory: int
    custom: tuple[tuple[str, int], ...] = ()


class Node:
    """Free units of one node."""

    __slots__ = ("spec", "order", "gpus", "gpu", "cpu", "memory", "custom", "stamp", "up")

    def __init__(self, spec: NodeSpec, order: int) -> None:
        whole = Units.of(0.0, spec.cpu, spec.memory_gb)
        self.spec = spec
        self.order = order
        self.gpus = dict.fromkeys(spec.gpu_ids, GPU_UNIT)
        self.gpu = GPU_UNIT * len(self.gpus)
        self.cpu = whole.cpu
        self.memory = whole.memory
        self.custom = dict(custom_units(spec.custom))
        self.stamp = 0
        self.up = True

    def take(self, need: Need) -> tuple[bool, int | None]:
        """(placed, GPU id): the fullest GPU that still fits, so that large shares stay possible elsewhere."""
        if need.cpu > self.cpu or need.memory > self.memory:
            return False, None
        if need.custom and any(units > self.custom.get(name, 0) for name, units in need.custom):
            return False, None
        chosen: int | None = None
        if need.gpu:
            least = GPU_UNIT + 1
            for gpu_id, free in self.gpus.items():
                if need.gpu <= free < least:
                    chosen, least = gpu_id, free
            if chosen is None:
                return False, None
            self.gpus[chosen] -= need.gpu
            self.gpu -= need.gpu
        self.cpu -= need.cpu
        self.memory -= need.memory
        for name, units in need.custom:
            self.custom[name] -= units
        return True, chosen

    def put_back(self, need: Need, gpu_id: int | None, count: int) -> None:
        if gpu_id is not None:
            self.gpus[gpu_id] += count * need.gpu
            self.gpu += count * need.gpu
        self.cpu += count * need.cpu
        self.memory += count * need.memory
        for name, units in need.custom:
            self.custom[name] += count * units

    def fits(self, need: Need) -> int:
        """How many samples of this need could be placed now."""
        counts = [UNBOUNDED]
        if need.gpu:
            counts.append(sum(free // need.gpu for free in self.gpus.values()))
        if need.cpu:
            counts.append(self.cpu // need.cpu)
        if need.memory:
            counts.append(self.memory // need.memory)
        counts += [self.custom.get(name, 0) // units for name, units in need.custom]
        return min(counts)

    def used(self) -> dict[str, tuple[float, float]]:
        """(taken, whole) of each resource that the node has, in GPUs, CPUs, GB, and units of the custom ones."""
        whole = {"gpu": float(len(self.gpus)), "cpu": self.spec.cpu, "memory_gb": self.spec.memory_gb, **dict(self.spec.custom)}
        free = {"gpu": self.gpu / GPU_UNIT, "cpu": self.cpu / CPU_UNIT, "memory_gb": self.memory / MEMORY_UNIT}
        free |= {name: units / CUSTOM_UNIT for name, units in self.custom.items()}
        return {name: (round(amount - free[name], 3), amount) for name, amount in whole.items() if amount > 0}


def capacity(nodes: Sequence[NodeSpec], per_sample: Resource) -> int:
    """Samples that empty nodes hold at once: the figure the start-up proof promises and the pool keeps.

    All samples of a batch need the same, so nodes do not compete: the greedy placement always reaches this sum.
    """
    need = need_of(per_sample)
    return min(UNBOUNDED, sum(Node(spec, 0).fits(need) for spec in nodes))


def need_of(sample: Resource | PlacementToken) -> Need:
    custom = sample.custom.items() if isinstance(sample, Resource) else sample.custom
    return Need(*Units.of(sample.gpu, sample.cpu, sample.memory_gb), custom_units(custom) if custom else ())


class FreeNodes:
    """All nodes, the one with most free GPU (then most free memory) first, in a heap whose outdated entries are skipped."""

    def __init__(self, specs: Sequence[NodeSpec]) -> None:
        self.by_name = {spec.node: Node(spec, order) for order, spec in enumerate(specs)}
        if len(self.by_name) != len(specs):
            raise ValueError(f"node names repeat: {[spec.node for spec in specs]}")
        self._nodes = list(self.by_name.values())
        self._heap: list[tuple[int, int, int, int]] = []
        self.gpu = self.cpu = self.memory = 0
        self._rebuild()

    def __iter__(self) -> Iterator[Node]:
        return iter(self._nodes)

    def take_all(self, per_sample: Resource, need: Need, count: int) -> list[PlacementToken] | None:
        """`count` tokens, or None with everything rolled back."""
        if need.gpu * count > self.gpu or need.cpu * count > self.cpu or need.memory * count > self.memory:
            return None
        custom = tuple(sorted(per_sample.custom.items()))
        tokens: list[PlacementToken] = []
        full: list[tuple[int, int, int, int]] = []
        while len(tokens) < count and self._heap:
            entry = heapq.heappop(self._heap)
            node = self._nodes[entry[2]]
            if entry[3] != node.stamp or not node.up:
                continue
            placed, gpu_id = node.take(need)
            if not placed:
                full.append(entry)
                continue
            tokens.append(PlacementToken(node.spec.node, gpu_id, per_sample.gpu, per_sample.cpu, per_sample.memory_gb, custom))
            self._changed(node, need, -1)
        for entry in full:
            heapq.heappush(self._heap, entry)
        if len(tokens) == count:
            return tokens
        for token in tokens:
            self.put_back(token, 1)
        return None

    def put_back(self, token: PlacementToken, count: int) -> None:
        """`count` tokens that are equal."""
        node = self.by_name[token.node]
        need = need_of(token)
        node.put_back(need, token.gpu_id, count)
        self._changed(node, need, count)

    def set_up(self, name: str, up: bool) -> None:
        """A node that is down gives no tokens; those that are out can still come back."""
        self.by_name[name].up = up
        self._rebuild()

    def _changed(self, node: Node, need: Need, count: int) -> None:
        """So many samples' needs came back; below 0, they were taken."""
        if not node.up:
            return
        self.gpu += count * need.gpu
        self.cpu += count * need.cpu
        self.memory += count * need.memory
        node.stamp += 1
        heapq.heappush(self._heap, (-node.gpu, -node.memory, node.order, node.stamp))
        if len(self._heap) > 64 + 8 * len(self._nodes):
            self._rebuild()

    def _rebuild(self) -> None:
        up = [node for node in self._nodes if node.up]
        self._heap = [(-node.gpu, -node.memory, node.order, node.stamp) for node in up]
        heapq.heapify(self._heap)
        self.gpu, self.cpu, self.memory = (sum(getattr(node, name) for node in up) for name in ("gpu", "cpu", "memory"))
