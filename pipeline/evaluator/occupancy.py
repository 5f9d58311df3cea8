"""How long the pool has had work, and which item is the oldest."""

from __future__ import annotations

from collections.abc import Callable


class Occupancy:
    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[tuple[int, int], float] = {}
        self._busy_s = 0.0
        self._working_since = 0.0
        self.started = 0
        self.finished = 0

    def begin(self, step: int, ordinal: int) -> None:
        if not self._since:
            self._working_since = self._clock()
        self._since[step, ordinal] = self._clock()
        self.started += 1

    def end(self, step: int, ordinal: int) -> None:
        """An item that is not there any more is no fault: a batch that fails ends all of its items."""
        if self._since.pop((step, ordinal), None) is None:
            return
        self.finished += 1
        if not self._since:
            self._busy_s += self._clock() - self._working_since

    @property
    def backlog(self) -> int:
        return len(self._since)

    def busy_s(self) -> float:
        """Seconds with anything in work; its rate of change is the occupancy."""
        return self._busy_s + (self._clock() - self._working_since if self._since else 0.0)

    def oldest(self) -> tuple[float, str | None]:
        """Age in seconds, and a name for people."""
        if not self._since:
            return 0.0, None
        step, ordinal = min(self._since, key=lambda key: self._since[key])
        return self._clock() - self._since[step, ordinal], f"ordinal {ordinal} of step {step}"
