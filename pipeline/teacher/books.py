"""Where every group is that a scoring stage has seen: it waits, is in a call, or is settled; never two of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from pipeline.buffer.api import BacklogItem


class Books:
    def __init__(self) -> None:
        self.waiting: dict[int, BacklogItem] = {}
        """By (step, age), as the buffer said last."""
        self.in_flight: dict[int, BacklogItem] = {}
        self.alone: dict[int, int] = {}
        """Groups whose batch failed -> the replica it failed on. Their next call holds nothing else, and is their last."""
        self.marks: Counter[str] = Counter()
        """How groups were settled: the buffer's answers to mark_produced, and `dropped`."""
        self.taken = self.settled = 0
        self._seen_at: dict[int, float] = {}

    def observe(self, items: Sequence[BacklogItem], now: float) -> None:
        """Replace what waits by the buffer's answer. Who left the backlog without us was dropped or produced elsewhere."""
        self.waiting = {item.ordinal: item for item in items}
        for ordinal in self.waiting:
            if ordinal not in self._seen_at:
                self.taken += 1
                self._seen_at[ordinal] = now
        for ordinal in [known for known in self._seen_at if known not in self.waiting and known not in self.in_flight]:
            self.settle(ordinal)

    def waited_s(self, item: BacklogItem, now: float) -> float:
        return now - self._seen_at[item.ordinal]

    def start(self, items: Sequence[BacklogItem]) -> None:
        for item in items:
            self.in_flight[item.ordinal] = self.waiting.pop(item.ordinal)

    def settle(self, ordinal: int) -> None:
        """Produced, dropped or gone. Repeating it changes nothing."""
        if self._seen_at.pop(ordinal, None) is not None:
            self.settled += 1
        self.waiting.pop(ordinal, None)
        self.alone.pop(ordinal, None)

    def held(self) -> list[BacklogItem]:
        return [*self.waiting.values(), *self.in_flight.values()]
