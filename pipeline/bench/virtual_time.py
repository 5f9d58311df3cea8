"""An event loop whose clock jumps to the next timer: hours of waiting take milliseconds. For benchmarks without processes.

Invariant: time passes only while nothing can run. Threads and sockets do not exist in such a loop.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

from pipeline.errors import RolloutError

Result = TypeVar("Result")


class _JumpingSelector(selectors.DefaultSelector):
    """Instead of waiting it moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise RolloutError("everything waits for something that can never happen: no timer is left")
        self.now += max(timeout, 0.0)
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._jumping.now


def run_on_virtual_time(main: Coroutine[Any, Any, Result]) -> Result:
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
