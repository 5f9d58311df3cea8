"""Scalars for TensorBoard, each (tag group, step) once: what earlier processes of the run wrote is read first.

One event holds all scalars of a step, so a step is in the files whole or not at all. Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from pipeline.observe.trackers import flat_numbers


class TensorboardWriter:
    """Event files in `folder`; a new one for each process, opened at the first scalar."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._writer: EventFileWriter | None = None
        self._seen = _written(folder)

    def add(self, group: str, step: int, scalars: dict[str, Any], at: float) -> bool:
        """Write `<group>/<name>` for every number at a step, at wall-clock time `at` (seconds); None is left out.

        False: this group already has the step.
        """
        if (group, step) in self._seen:
            return False
        values = [Summary.Value(tag=f"{group}/{name}", simple_value=value) for name, value in flat_numbers(scalars)]
        if values:
            if self._writer is None:
                self._writer = EventFileWriter(str(self._folder))
            self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        self._seen.add((group, step))
        return True

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def read_scalars(folder: Path) -> Iterator[tuple[str, int, float]]:
    """(tag, step, value) of every event file in the folder, in the order written; a torn tail ends its file."""
    for path in sorted(folder.glob("events.out.tfevents.*"), key=_age):
        for data in RawEventFileLoader(str(path)).Load():
            event = Event.FromString(data)
            for value in event.summary.value:
                yield value.tag, event.step, value.simple_value


def _age(path: Path) -> list[int]:
    """The second in which a file was begun, and, within a process, its number: these are numbers in the name, of any width."""
    return [int(number) for number in re.findall(r"\d+", path.name)]


def _written(folder: Path) -> set[tuple[str, int]]:
    return {(tag.split("/", 1)[0], step) for tag, step, _ in read_scalars(folder)}
