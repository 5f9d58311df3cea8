"""Which models there are to serve and to evaluate: the live student, and the checkpoints of its run.

Invariant: a model is a folder and the weight version that it holds. What training may replace or prune is linked before it is
read for long, so that an evaluation is of one version.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from pipeline.engines.weights import WeightStore
from pipeline.errors import RequestRefused, UserError
from pipeline.paths import RunPaths, SharedPaths, below
from pipeline.trainer.checkpoints import MANIFEST, listed

LIVE = "live"
LINK_TRIES = 5


@dataclass(frozen=True, slots=True)
class Model:
    """What an engine can serve. Crosses processes."""

    name: str
    """`live`, or the checkpoint's path below the folder of runs."""
    folder: Path
    version: int


class Models:
    """runs: where runs lie. run: whose weights are live; None: `base` is live, as version 0.

    base: the student as the configuration makes it; needed when there is no run, or the run has published nothing.
    """

    def __init__(self, runs: SharedPaths, run: RunPaths | None, base: Path | None) -> None:
        self._runs, self._run, self.base = runs, run, base
        self.weights = WeightStore(run.weights) if run is not None else None

    def live(self) -> Model:
        """The newest published weights of the run; else its newest complete checkpoint; else the student it begins with."""
        published = self.weights.latest() if self.weights is not None else None
        if published is not None:
            return Model(LIVE, published.path, published.version)
        newest = listed(self._run)[:1] if self._run is not None else []
        if newest:
            return Model(LIVE, newest[0], version_of(newest[0]))
        if self.base is None:
            raise UserError(f"run {self._run.run_id if self._run else None!r} has published no weights and has no checkpoint")
        return Model(LIVE, self.base, 0)

    def has_weights(self) -> bool:
        """Whether the run has something newer than the student that it began with."""
        return self.weights is not None and (self.weights.latest() is not None or bool(self.checkpoints()))

    def checkpoints(self) -> list[Model]:
        """Complete checkpoints of the run, newest first."""
        if self._run is None:
            return []
        return [Model(self._name(path), path, version_of(path)) for path in listed(self._run)]

    def find(self, name: str) -> Model:
        """`live`, or a folder by its path: absolute, or below the folder of runs. Raises RequestRefused.

        Only what lies below the folder of runs is served: a name that comes over the network opens nothing else.
        """
        if name == LIVE:
            return self.live()
        root = self._runs.runs.resolve()
        folder = below(root, name)
        if folder is None:
            raise RequestRefused(404, "model_not_found", f"{name!r} is not below the folder of runs {root}", "model")
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            known = [model.name for model in (self.live(), *self.checkpoints())]
            message = f"{name!r} is no model folder in Hugging Face format below {root}; known are {known}"
            raise RequestRefused(404, "model_not_found", message, "model")
        return Model(self._name(folder), folder, version_of(folder))

    def link(self, name: str, target: Path) -> Model:
        """The model under `target`: its files are linked there (copied across file systems), so that nobody can prune them."""
        for attempt in range(LINK_TRIES):
            model = self.find(name)
            try:
                link_folder(model.folder, target)
            except FileNotFoundError:  # pruned between the look and the link: a newer one is there
                shutil.rmtree(target, ignore_errors=True)
                if attempt + 1 == LINK_TRIES:
                    raise
                time.sleep(0.05)
            else:
                return Model(model.name, target, model.version)
        raise AssertionError("LINK_TRIES is at least 1")

    def _name(self, folder: Path) -> str:
        root = self._runs.runs.resolve()
        folder = folder.resolve()
        return folder.relative_to(root).as_posix() if folder.is_relative_to(root) else str(folder)


def version_of(folder: Path) -> int:
    """The step of a checkpoint; 0 for any other model."""
    try:
        return int(json.loads((folder / MANIFEST).read_text())["step"])
    except (FileNotFoundError, KeyError, TypeError, ValueError):
        return 0


def link_folder(source: Path, target: Path) -> None:
    """Files only; models have no subfolders. The trainer's own state is left out."""
    target.mkdir(parents=True)
    for file in source.iterdir():
        if not file.is_file() or file.suffix == ".pt":
            continue
        try:
            os.link(file, target / file.name)
        except OSError as error:
            if isinstance(error, FileNotFoundError):
                raise
            shutil.copyfile(file, target / file.name)


def weights_key(folder: Path) -> tuple[tuple[int, int, int], ...]:
    """Equal for folders whose weights are the same files (links), whatever the folders are called."""
    stats = [file.stat() for file in sorted(folder.glob("*.safetensors"))]
    return tuple((stat.st_dev, stat.st_ino, stat.st_mtime_ns) for stat in stats)
