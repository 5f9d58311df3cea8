"""Too many failures in a row end the run, with the last one as the cause."""

from __future__ import annotations

from pipeline.errors import BreakerTripped


class Breaker:
    def __init__(self, stage: str, limit: int) -> None:
        self._stage = stage
        self._limit = limit
        self.in_a_row = 0

    def success(self) -> None:
        self.in_a_row = 0

    def failure(self, what: str) -> None:
        """Raises BreakerTripped at the limit, and starts to count anew: who goes on after that has decided to."""
        self.in_a_row += 1
        if self.in_a_row >= self._limit:
            self.in_a_row = 0
            limit = f"rollout.max_consecutive_failures {self._limit}"
            raise BreakerTripped(self._stage, f"{self._limit} groups failed in a row ({limit}); the last one: {what}")
