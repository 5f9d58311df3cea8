"""Who may run where: whole batches are admitted by the pool, and samples take their tokens inside an admitted batch.

Invariant: admission is all or nothing, the sum of tokens never exceeds what the nodes have, a release restores exactly what was
taken, and nothing overtakes a batch that has waited longer than the patience. No method that changes the pool awaits while it
does, so the event loop is its lock.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from pipeline.errors import AdmissionError
from pipeline.evaluator.nodes import UNBOUNDED, FreeNodes, Need, capacity, need_of
from pipeline.evaluator.spec import NodeSpec, PlacementToken, Resource, Units


@dataclass(slots=True, eq=False)
class _Waiter:
    number: int
    since: float
    per_sample: Resource
    future: asyncio.Future[list[PlacementToken]]


class PlacementPool:
    """Global pool over the layout's nodes."""

    def __init__(self, nodes: Sequence[NodeSpec], *, patience_s: float = 30.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._free = FreeNodes(nodes)
        self._patience_s = patience_s
        self._clock = clock
        self._held: Counter[PlacementToken] = Counter()
        self._lines: dict[tuple[Need, int], deque[_Waiter]] = {}
        self._arrivals = 0
        self._too_many: dict[Need, int] = {}
        """Smallest count that is known not to fit; forgotten when anything comes back."""
        self._most: dict[Need, int] = {}
        """Capacity of the nodes that are up, by need."""

    def try_acquire_batch(self, budget: Resource, per_sample: Resource, max_tokens: int) -> list[PlacementToken] | None:
        """One token a sample until `budget` is spent or `max_tokens` are held; None when they cannot all be placed now.

        None, too, while a batch that waited longer than the patience is next. Raises AdmissionError for a batch that could
        never be placed.
        """
        need, count = self._demand(budget, per_sample, max_tokens)
        oldest = self._oldest()
        if oldest is not None and self._overdue(oldest):
            return None
        return self._take(per_sample, need, count)

    async def acquire(self, budget: Resource, per_sample: Resource, max_tokens: int) -> list[PlacementToken]:
        """As `try_acquire_batch`, and waits: the widest that fits goes first, until the oldest is overdue and goes next."""
        need, count = self._demand(budget, per_sample, max_tokens)
        future: asyncio.Future[list[PlacementToken]] = asyncio.get_running_loop().create_future()
        self._arrivals += 1
        waiter = _Waiter(self._arrivals, self._clock(), per_sample, future)
        self._lines.setdefault((need, count), deque()).append(waiter)
        self._admit()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled():
                self.release(future.result())
            elif self._leave((need, count), waiter):
                self._admit()
            raise

    def release(self, tokens: Iterable[PlacementToken]) -> None:
        """Give tokens back. Raises ValueError for one that is not out: a double release would invent capacity."""
        for token, count in Counter(tokens).items():
            if self._held[token] < count:
                raise ValueError(f"{token} is not held")
            self._held[token] -= count
            if not self._held[token]:
                del self._held[token]
            self._free.put_back(token, count)
        self._too_many.clear()
        self._admit()

    def set_up(self, node: str, up: bool) -> None:
        """Take a node whose worker is dead out of the pool, or back in.

        Batches that wait for more than the rest can hold get an AdmissionError: they may ask again for less.
        """
        self._free.set_up(node, up)
        self._too_many.clear()
        self._most.clear()
        for key, line in list(self._lines.items()):
            for waiter in list(line):
                if key[1] > self.capacity(waiter.per_sample):
                    self._leave(key, waiter)
                    waiter.future.set_exception(_too_wide(key[1], waiter.per_sample, self.capacity(waiter.per_sample)))
        self._admit()

    def capacity(self, per_sample: Resource) -> int:
        """Samples that the nodes which are up hold at once when nothing else runs."""
        need = need_of(per_sample)
        if need not in self._most:
            self._most[need] = capacity([node.spec for node in self._free if node.up], per_sample)
        return self._most[need]

    @property
    def waiting(self) -> int:
        return sum(len(line) for line in self._lines.values())

    @property
    def held(self) -> int:
        """Tokens that are out."""
        return self._held.total()

    def free(self) -> dict[str, Units]:
        """Free units by node."""
        return {node.spec.node: Units(node.gpu, node.cpu, node.memory) for node in self._free}

    def used(self) -> dict[str, dict[str, tuple[float, float]]]:
        """(taken, whole) of each resource by node, as the layout counts them."""
        return {node.spec.node: node.used() for node in self._free}

    def _demand(self, budget: Resource, per_sample: Resource, max_tokens: int) -> tuple[Need, int]:
        need, purse = need_of(per_sample), need_of(budget)
        purse_of = dict(purse.custom)
        demands = [*zip(purse[:3], need[:3], strict=True), *((purse_of.get(name, 0), each) for name, each in need.custom)]
        count = min([max_tokens, *(have // each for have, each in demands if each)])
        if count < 1:
            raise AdmissionError(f"a batch of {max_tokens} samples of {per_sample} gets no token out of the budget {budget}")
        most = self.capacity(per_sample)
        if count > most:
            raise _too_wide(count, per_sample, most)
        return need, count

    def _take(self, per_sample: Resource, need: Need, count: int) -> list[PlacementToken] | None:
        if count >= self._too_many.get(need, UNBOUNDED):
            return None
        tokens = self._free.take_all(per_sample, need, count)
        if tokens is None:
            self._too_many[need] = count
        else:
            self._held.update(tokens)
        return tokens

    def _admit(self) -> None:
        """Overdue batches first, oldest first, and nobody else while one of them waits; then the widest, which pack best."""
        while (oldest := self._oldest()) is not None and self._overdue(oldest):
            if not self._grant(self._shape_of(oldest)):
                return
        refused: set[tuple[Need, int]] = set()
        while len(refused) < len(self._lines):
            shape = min(self._lines.keys() - refused, key=lambda shape: (-shape[1], self._lines[shape][0].number))
            if not self._grant(shape):
                refused.add(shape)

    def _grant(self, shape: tuple[Need, int]) -> bool:
        """Give the first of a line its tokens, if they are there; one whose task was cancelled just leaves."""
        waiter = self._lines[shape][0]
        if waiter.future.done():
            return self._leave(shape, waiter)
        tokens = self._take(waiter.per_sample, *shape)
        if tokens is None:
            return False
        waiter.future.set_result(tokens)
        return self._leave(shape, waiter)

    def _leave(self, key: tuple[Need, int], waiter: _Waiter) -> bool:
        """False when the waiter had left before."""
        line = self._lines.get(key)
        if line is None or waiter not in line:
            return False
        line.remove(waiter)
        if not line:
            del self._lines[key]
        return True

    def _oldest(self) -> _Waiter | None:
        return min((line[0] for line in self._lines.values()), key=lambda waiter: waiter.number, default=None)

    def _shape_of(self, head: _Waiter) -> tuple[Need, int]:
        return next(shape for shape, line in self._lines.items() if line[0] is head)

    def _overdue(self, waiter: _Waiter) -> bool:
        return self._clock() - waiter.since > self._patience_s


def _too_wide(count: int, per_sample: Resource, most: int) -> AdmissionError:
    return AdmissionError(f"a batch asks for {count} tokens of {per_sample}; the pool holds {most} when it is empty")
