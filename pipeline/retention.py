"""What lies in a run folder and is wanted by nobody any more.

Invariant: nothing is surplus that a resume, an evaluation or a report may still read. `surplus` only looks; `remove` is called by
whoever holds the run's lock.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.buffer.offline import compact, offline
from pipeline.buffer.reader import read_checkpoint_steps, read_evictable, read_facts
from pipeline.buffer.settings import BufferSettings
from pipeline.config.schema import RunConfig
from pipeline.engines.weights import WeightStore
from pipeline.paths import RunPaths
from pipeline.trainer import checkpoints

ASIDE = ("weights/.new-*", "weights/.LATEST-*", "eval_details/.*.new", ".config.yaml.new")
"""Half-written files and folders, beside those that belong to checkpoints and workflows."""


@dataclass(frozen=True, slots=True)
class Surplus:
    what: str
    """For people."""
    size: int
    """Bytes."""
    paths: tuple[Path, ...] = ()
    """To be deleted; none for rows, which the ledger removes itself."""


def surplus(paths: RunPaths, config: RunConfig, *, rows: bool = False) -> list[Surplus]:
    """rows: also those that `buffer.keep_groups` keeps, down to what a resume needs.

    Raises UserError when the run's ledger cannot be read.
    """
    return [
        *_rows(paths, _settings(config, rows)),
        *(_folder("checkpoint", path) for path in checkpoints.surplus(paths, config.trainer.keep_checkpoints)),
        *(_folder("weights of an old version", path) for path in _weights(paths)),
        *(_folder("finished workflow", path) for path in _workflows(paths)),
        *(_folder("left over", path) for path in _asides(paths)),
    ]


async def remove(paths: RunPaths, config: RunConfig, found: Sequence[Surplus], *, rows: bool = False) -> None:
    for path in (path for item in found for path in item.paths):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    if any(not item.paths for item in found):
        async with offline(paths, _settings(config, rows)) as service:
            await service.gc()
        compact(paths)


def _settings(config: RunConfig, rows: bool) -> BufferSettings:
    settings = BufferSettings.from_config(config)
    return replace(settings, keep_groups=0) if rows else settings


def _rows(paths: RunPaths, settings: BufferSettings) -> Iterator[Surplus]:
    """Only while the last but one checkpoint, on which the ledger relies, is there and whole."""
    marked = read_checkpoint_steps(paths)
    whole = {path.name for path in checkpoints.listed(paths)}
    safe = len(marked) >= 2 and paths.checkpoint(marked[1]).name in whole
    groups, inline, needed = read_evictable(paths, settings.keep_groups if safe else None)
    free = [path for path in paths.groups.glob("*.seg") if int(path.stem) not in needed]
    size = inline + sum(path.stat().st_size for path in free)
    if groups or free:
        yield Surplus(f"rows of {groups} trained groups", size)


def _weights(paths: RunPaths) -> list[Path]:
    """All but the newest: engines load that one, and a trainer publishes whatever else is asked for."""
    newest = WeightStore(paths.weights).latest()
    if newest is None:
        return []
    return sorted(path for path in paths.weights.glob("v*") if path.is_dir() and path != newest.path)


def _workflows(paths: RunPaths) -> list[Path]:
    """Of windows before the one that a resume would go on with."""
    current = read_facts(paths).get("workflow_id")
    return sorted(
        path
        for path in (paths.workflow / "workflows").glob("*")
        if path.is_dir() and path.name != current and not path.name.startswith("__")
    )


def _asides(paths: RunPaths) -> list[Path]:
    found = {path for pattern in ASIDE for path in paths.root.glob(pattern)}
    current = read_facts(paths).get("workflow_id")
    if current is not None:
        found |= set((paths.workflow / "workflows" / current).rglob(".aside-*"))
    return sorted(found) + checkpoints.debris(paths)


def _folder(what: str, path: Path) -> Surplus:
    size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) if path.is_dir() else path.stat().st_size
    return Surplus(f"{what} {path.name}", size, (path,))
