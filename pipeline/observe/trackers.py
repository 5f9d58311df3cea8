"""Where a run's scalars go beside metrics.jsonl, which stays the truth: to any of the trackers that `observe.trackers` names.

Invariant: a tracker is told each (group, step) once, over all processes of a run, as far as it can know: what a kill interrupted
may be there twice, and is never missing. Each package is imported only when its tracker is named.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.observe.jsonlines import JsonLines, jsonable, read_jsonlines
from pipeline.paths import RunPaths

EXTRAS = ("wandb", "trackio")
"""Trackers whose package is an extra of the same name."""


class Tracker(Protocol):
    def add(self, group: str, step: int, scalars: dict[str, Any], at: float) -> bool:
        """Keep `<group>/<name>` for every number at a step, at wall-clock time `at` (seconds). False: it has this step already."""
        ...

    def flush(self) -> None: ...
    def close(self) -> None: ...


def open_tracker(name: str, paths: RunPaths, config: RunConfig) -> Tracker:
    if name == "wandb":
        from pipeline.observe.wandb_tracker import WandbTracker

        return WandbTracker(paths, config)
    if name == "trackio":
        from pipeline.observe.trackio_tracker import TrackioTracker

        return TrackioTracker(paths, config)
    from pipeline.observe.tensorboard import TensorboardWriter

    return TensorboardWriter(paths.tensorboard)


def missing(name: str) -> str | None:
    """How to install what a tracker lacks; None: it can be used."""
    if name not in EXTRAS or find_spec(name) is not None:
        return None
    return f"pip install -e '.[{name}]' -c constraints.txt"


def check_trackers(names: Iterable[str]) -> None:
    """Raises ConfigError for a tracker whose package is not installed."""
    for name in names:
        if (mend := missing(name)) is not None:
            raise ConfigError(f"observe.trackers: {name!r} needs the package {name}, which is not installed: {mend}")


def flat_numbers(values: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """(name, number) of a nested mapping, names joined by `/`; texts, lists, None and NaN are left out."""
    for name, value in jsonable(values).items():
        if isinstance(value, dict):
            yield from flat_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            yield f"{prefix}{name}", float(value)


class Handed:
    """Which (group, step) a tracker that cannot be asked was handed, in a file."""

    def __init__(self, path: Path) -> None:
        self._file = JsonLines(path)
        self._known = {(record["group"], record["step"]) for record in read_jsonlines(path)}

    def __contains__(self, key: tuple[str, int]) -> bool:
        return key in self._known

    def add(self, keys: Sequence[tuple[str, int]]) -> None:
        self._file.append({"group": group, "step": step} for group, step in keys)
        self._known.update(keys)
