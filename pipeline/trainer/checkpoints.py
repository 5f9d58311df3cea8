"""Checkpoints: written aside, fsynced, renamed. A folder is complete when its manifest agrees with its files, and only then.

A checkpoint covers the consumed steps since the one before it; `covers` names their ordinals. Listing them imports no torch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from pipeline.durable import sync
from pipeline.errors import StageFailed
from pipeline.paths import RunPaths

MANIFEST = "manifest.json"
STATE = "trainer_state.pt"
LEAST_KEPT = 2
"""Resume falls back to the last but one when the newest is torn."""
_FORMAT = 1
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    step: int
    path: Path
    covers: dict[int, list[int]]
    """step -> ordinals, for the steps since the checkpoint before."""
    epoch: int
    """Writer epoch under which it was saved."""

    def state(self) -> dict[str, Any]:
        """What `save` was given as `state`."""
        import torch

        return torch.load(self.path / STATE, map_location="cpu", weights_only=True)


def save(
    paths: RunPaths,
    step: int,
    covers: Mapping[int, Sequence[int]],
    *,
    write_model: Callable[[Path], None],
    state: Mapping[str, Any],
    epoch: int,
    fence: Callable[[], None],
) -> Checkpoint:
    """Durable when it returns.

    write_model: fills a folder in Hugging Face format. state: tensors, numbers and containers of them (optimizer, master
    weights). fence: raises when a newer writer owns the run; called last before the rename. A folder that is in the place
    already (torn, or of a run that was replayed) is replaced.
    """
    import torch

    aside = _aside(paths)
    aside.mkdir(parents=True)
    try:
        write_model(aside)
        torch.save(dict(state), aside / STATE)
        record = {
            "format": _FORMAT,
            "step": step,
            "epoch": epoch,
            "covers": {str(covered): [int(ordinal) for ordinal in ordinals] for covered, ordinals in covers.items()},
            "versions": _versions(),
            "files": {file.name: _describe(file) for file in _files(aside)},
        }
        (aside / MANIFEST).write_text(json.dumps(record, indent=1))
        for file in [*_files(aside), aside / MANIFEST, aside]:
            sync(file)
        fence()
        target = paths.checkpoint(step)
        if target.exists():
            _remove(paths, target)
        aside.rename(target)
        sync(paths.checkpoints)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise
    return _read(target)


def complete(paths: RunPaths) -> Iterator[Checkpoint]:
    """Complete checkpoints, newest first; each is verified (sizes and sha256) when its turn comes.

    A torn one is left out, with a warning that names it.
    """
    for path in _newest_first(paths):
        defect = _defect(path, contents=True)
        if defect is None:
            yield _read(path)
        else:
            _log.warning("checkpoint %s is torn (%s) and is skipped", path.name, defect)


def listed(paths: RunPaths) -> list[Path]:
    """Folders of complete checkpoints, newest first. Sizes are compared, contents are not."""
    return [path for path in _newest_first(paths) if _defect(path, contents=False) is None]


def surplus(paths: RunPaths, keep: int) -> list[Path]:
    """Folders of all but the last `keep` complete checkpoints (never fewer than two), and torn ones behind the newest complete.
    Sizes are compared, contents are not."""
    kept = listed(paths)[: max(keep, LEAST_KEPT)]
    return [path for path in _newest_first(paths) if kept and path.name < kept[0].name and path not in kept]


def debris(paths: RunPaths) -> list[Path]:
    """What a crash left half-written, when nobody writes a checkpoint now."""
    return sorted(paths.checkpoints.glob(".tmp-*"))


def prune(paths: RunPaths, keep: int) -> list[str]:
    """Remove `surplus` and `debris`. Returns the names of the checkpoints removed."""
    removed = surplus(paths, keep)
    for path in removed:
        _remove(paths, path)
    for path in debris(paths):
        shutil.rmtree(path, ignore_errors=True)
    return [path.name for path in removed]


def _newest_first(paths: RunPaths) -> list[Path]:
    return sorted(paths.checkpoints.glob("step_*"), key=lambda path: path.name, reverse=True)


def _read(path: Path) -> Checkpoint:
    record = json.loads((path / MANIFEST).read_text())
    covers = {int(step): list(ordinals) for step, ordinals in record["covers"].items()}
    return Checkpoint(step=record["step"], path=path, covers=covers, epoch=record["epoch"])


def _defect(path: Path, *, contents: bool) -> str | None:
    """What is wrong with the folder, or None."""
    try:
        record = json.loads((path / MANIFEST).read_text())
        files = record["files"]
        if record["format"] != _FORMAT:
            raise StageFailed("trainer", f"checkpoint {path.name} has format {record['format']}, this program reads {_FORMAT}")
        for name, described in files.items():
            if (path / name).stat().st_size != described["size"]:
                return f"{name} has another size than its manifest says"
            if contents and _describe(path / name) != described:
                return f"{name} has another sha256 than its manifest says"
    except FileNotFoundError as error:
        return f"{Path(str(error.filename)).name} is missing"
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError):
        return f"{MANIFEST} cannot be read"
    return None


def _describe(file: Path) -> dict[str, Any]:
    with file.open("rb") as stream:
        return {"size": file.stat().st_size, "sha256": hashlib.file_digest(stream, "sha256").hexdigest()}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.is_file() and path.name != MANIFEST)


@cache
def _versions() -> dict[str, str]:
    return {name: version_of(name) for name in ("torch", "transformers")}


def _aside(paths: RunPaths) -> Path:
    return paths.checkpoints / f".tmp-{uuid.uuid4().hex}"


def _remove(paths: RunPaths, path: Path) -> None:
    """By a rename first: a folder that is half removed must not look like a torn checkpoint."""
    aside = _aside(paths)
    path.rename(aside)
    shutil.rmtree(aside, ignore_errors=True)
