"""The order of the stream: which data set an ordinal is of, and which item of it.

Invariant: a pure function of (weights, sizes, epochs, seed, ordinal). As long as it lasts a data set
has its share of every prefix to within a few items, and each of its epochs holds every item once.
"""

from __future__ import annotations

import heapq
import zlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

_KEPT_ORDERS = 8


def shuffled(count: int, *key: int | str) -> np.ndarray:
    """int64 [count]: a permutation that depends on the key alone, on every machine and with every version of numpy."""
    words = [part if isinstance(part, int) else zlib.crc32(part.encode()) for part in key]
    return np.argsort(np.random.PCG64(np.random.SeedSequence(words)).random_raw(count), kind="stable")


class Mix:
    """Interleaves by weight: the j-th item (from 0) of a data set of weight w is due at (j + 1/2) / w; the earliest is next.

    limits: items that a data set gives in all (None: no end); an exhausted one leaves, and the others share its place.
    """

    def __init__(self, weights: Sequence[float], limits: Sequence[int | None]) -> None:
        self._weights = list(weights)
        self._limits = list(limits)
        self._due = [(0.5 / weight, index) for index, weight in enumerate(self._weights)]
        heapq.heapify(self._due)
        self._given = [0] * len(self._weights)
        # What ordinals were found to be, as a memo: it only ever grows by what the rule above says.
        self._streams = array("H")
        self._positions = array("Q")

    @property
    def total(self) -> int | None:
        """Ordinals in all; None: no end."""
        return None if None in self._limits else sum(limit for limit in self._limits if limit is not None)

    def at(self, ordinal: int) -> tuple[int, int]:
        """(data set, position in its own stream). Raises IndexError past the end."""
        while ordinal >= len(self._streams):
            self._next()
        return self._streams[ordinal], self._positions[ordinal]

    def _next(self) -> None:
        if not self._due:
            raise IndexError(f"the stream ends after {len(self._streams)} ordinals")
        _, index = self._due[0]
        position = self._given[index]
        self._given[index] += 1
        limit = self._limits[index]
        if limit is not None and position + 1 >= limit:
            heapq.heappop(self._due)
        else:
            heapq.heapreplace(self._due, ((position + 1.5) / self._weights[index], index))
        self._streams.append(index)
        self._positions.append(position)


class Epochs:
    """Position in a data set's stream -> item: every epoch is a permutation of its own."""

    def __init__(self, count: int, seed: int, name: str) -> None:
        self._count = count
        self._seed = seed
        self._name = name
        self._orders: OrderedDict[int, list[int]] = OrderedDict()

    def item(self, position: int) -> int:
        epoch, place = divmod(position, self._count)
        if epoch not in self._orders:
            self._orders[epoch] = shuffled(self._count, self._seed, self._name, epoch).tolist()
            if len(self._orders) > _KEPT_ORDERS:
                self._orders.popitem(last=False)
        return self._orders[epoch][place]
