"""Scalars for trackio, in its own local store: `trackio show` compares the runs of one name there.

Invariant: a step counts as handed on once trackio's thread has had the time to write it, so that a kill loses none.
"""

from __future__ import annotations

import contextlib
import contextvars
import io
from typing import Any

import trackio

from pipeline.config.schema import RunConfig
from pipeline.observe.trackers import Handed, flat_numbers
from pipeline.paths import RunPaths


class TrackioTracker:
    def __init__(self, paths: RunPaths, config: RunConfig) -> None:
        self._handed = Handed(paths.log / "trackio.jsonl")
        self._given: list[tuple[str, int]] = []
        """Since the last flush."""
        self._flushed: list[tuple[str, int]] = []
        """By the last flush: a second ago, and trackio writes twice a second."""
        self._context = contextvars.copy_context()
        """trackio's current run is ours in here alone: elsewhere it would be finished again when the program ends."""
        with quiet():
            self._run = self._context.run(
                trackio.init,
                project=config.run.name,
                name=paths.run_id,
                config=config.model_dump(mode="json"),
                resume="allow",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )

    def add(self, group: str, step: int, scalars: dict[str, Any], at: float) -> bool:
        """`at` is not kept: trackio stamps what it is given."""
        key = (group, step)
        if key in self._handed or key in self._given or key in self._flushed:
            return False
        self._run.log({f"{group}/{name}": value for name, value in flat_numbers(scalars)}, step=step)
        self._given.append(key)
        return True

    def flush(self) -> None:
        self._handed.add(self._flushed)
        self._flushed, self._given = self._given, []

    def close(self) -> None:
        with quiet():
            self._context.run(trackio.finish)
        self._handed.add([*self._flushed, *self._given])
        self._flushed, self._given = [], []


def quiet() -> contextlib.AbstractContextManager[Any]:
    """trackio greets on stdout, which is the command's."""
    return contextlib.redirect_stdout(io.StringIO())
