"""Where runs lie, what they are called, and how the folder of one begins.

Invariant: a run folder is claimed by exactly one caller, and once `config.yaml` is in it, it holds every input file and module
that the run needs: it can be moved.
"""

from __future__ import annotations

import difflib
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path

import yaml

from pipeline.config.loading import Loaded, dump
from pipeline.config.schema import RunConfig
from pipeline.config.stages import Rollout
from pipeline.durable import sync, write_whole
from pipeline.errors import UserError
from pipeline.importing import is_reference
from pipeline.paths import RunPaths

RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def run_root(runs_dir: Path | None, environment: Mapping[str, str] = os.environ) -> Path:
    """`--runs-dir`, else ROLLOUT_RUNS, else ./runs; absolute."""
    return (runs_dir or Path(environment.get("ROLLOUT_RUNS") or "runs")).expanduser().resolve()


def new_run_id(name: str, now: datetime) -> str:
    """`<name>-<yyyymmdd>-<hhmmss>-<4 hex>`; characters that an id may not have become dashes."""
    stem = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-._")[:40] or "run"
    return f"{stem}-{now:%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def check_run_id(run_id: str) -> str:
    if not RUN_ID.fullmatch(run_id):
        raise UserError(f"run id {run_id!r} is not valid: 1 to 64 of A-Z a-z 0-9 . _ -, beginning with a letter or digit")
    return run_id


def create_run_folder(root: Path, loaded: Loaded, run_id: str | None, now: datetime, *, hold_student: bool = False) -> RunPaths:
    """Claim `<root>/<id>` and fill it. The id: `run_id`, else `run.id`, else generated. Raises UserError if it exists.

    hold_student: `student.path` is a checkpoint, of which the run gets a copy of its own.
    """
    config = loaded.config
    run_id = check_run_id(run_id or config.run.id or new_run_id(config.run.name, now))
    paths = RunPaths(root / run_id)
    try:
        root.mkdir(parents=True, exist_ok=True)
        paths.root.mkdir()
    except FileExistsError:
        raise UserError(
            f"run {run_id!r} exists already in {root}: choose another --run-id, or go on with `rollout resume {run_id}`"
        ) from None
    except OSError as error:
        raise UserError(f"{paths.root} cannot be made: {error.strerror}; choose another --runs-dir") from error
    _copy_modules(config, _modules_folder(loaded), paths)
    held = _copy_inputs(config, paths)
    if hold_student:
        held = _copy_student(held, paths)
    write_config(paths, held.model_copy(update={"run": held.run.model_copy(update={"id": run_id})}))
    return paths


def write_config(paths: RunPaths, config: RunConfig) -> None:
    """Replace `config.yaml` as a whole, and durably. Paths inside the run folder become relative to it, so that it can be moved."""
    data = yaml.safe_load(dump(config))
    for name, dataset in config.datasets.items():
        if dataset.path is not None and dataset.path.is_relative_to(paths.root):
            data["datasets"][name]["path"] = dataset.path.relative_to(paths.root).as_posix()
    student = config.student.path
    if student is not None and student.is_relative_to(paths.root):
        data["student"]["path"] = student.relative_to(paths.root).as_posix()
    kind, _, reused = config.rollout.reuse.partition(":")
    if kind == "file" and Path(reused).is_relative_to(paths.root):
        data["rollout"]["reuse"] = f"file:{Path(reused).relative_to(paths.root).as_posix()}"
    write_whole(paths.config, yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=120))
    sync(paths.root)


def find_run(root: Path, run: str) -> RunPaths:
    """A run by id, or by the path of its folder. Raises UserError, naming the nearest id."""
    paths = RunPaths(root / run)
    if not RUN_ID.fullmatch(run) or not paths.root.is_dir():
        elsewhere = RunPaths(Path(run).expanduser().resolve())
        paths = elsewhere if elsewhere.config.is_file() else paths
    if paths.config.is_file():
        return paths
    if paths.root.is_dir() and RUN_ID.fullmatch(run):
        raise UserError(f"run {run!r} in {root} has no config.yaml: it was stopped before it began; remove {paths.root}")
    known = [found.run_id for found in list_runs(root)]
    close = difflib.get_close_matches(run, known, 1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; there are {len(known)} runs" if known else "; there are no runs"
    raise UserError(f"no run {run!r} in {root}{hint}")


def list_runs(root: Path) -> list[RunPaths]:
    """Runs that have begun, the newest first."""
    if not root.is_dir():
        return []
    found = [RunPaths(entry) for entry in root.iterdir() if not entry.name.startswith(".")]
    begun = [(paths.config.stat().st_mtime, paths) for paths in found if paths.config.is_file()]
    return [paths for _, paths in sorted(begun, key=lambda pair: (-pair[0], pair[1].run_id))]


def _copy_inputs(config: RunConfig, paths: RunPaths) -> RunConfig:
    """Copy every input file to `data`; returns the configuration that reads them there."""
    held = dict(config.datasets)
    for name, dataset in config.datasets.items():
        if dataset.path is None:
            continue
        if not dataset.path.is_file():
            shutil.rmtree(paths.root)
            raise UserError(f"datasets.{name}.path {dataset.path}: no such file")
        paths.data.mkdir(exist_ok=True)
        target = paths.data / (re.sub(r"[^A-Za-z0-9._-]", "_", name) + dataset.path.suffix)
        shutil.copyfile(dataset.path, target)
        held[name] = dataset.model_copy(update={"path": target})
    return config.model_copy(update={"datasets": held, "rollout": _copy_reused(config, paths)})


def _copy_reused(config: RunConfig, paths: RunPaths) -> Rollout:
    """A file of saved trajectories is an input like any other; another run, or a whole directory, is read where it is."""
    kind, _, name = config.rollout.reuse.partition(":")
    if kind != "file":
        return config.rollout
    paths.data.mkdir(exist_ok=True)
    target = paths.data / "reuse.jsonl"
    shutil.copyfile(name, target)
    return config.rollout.model_copy(update={"reuse": f"file:{target}"})


def _copy_student(config: RunConfig, paths: RunPaths) -> RunConfig:
    """The model of a checkpoint, without what only its own trainer reads."""
    from pipeline.trainer.checkpoints import MANIFEST, STATE

    source, target = config.student.path, paths.data / "student"
    assert source is not None
    shutil.copytree(source, target, ignore=shutil.ignore_patterns(MANIFEST, STATE))
    return config.model_copy(update={"student": config.student.model_copy(update={"path": target})})


def _modules_folder(loaded: Loaded) -> Path:
    """Where the configuration's own modules lie: beside it, or in the `code` folder of the run that it is of."""
    beside = loaded.path.resolve().parent
    return beside / "code" if (beside / "code").is_dir() else beside


def _copy_modules(config: RunConfig, folder: Path, paths: RunPaths) -> None:
    """Copy the configuration's own modules, when it names any that lie beside it: all its *.py files and the named packages."""
    tops = {reference.partition(":")[0].partition(".")[0] for reference in _references(config)}
    packages = {top for top in tops if (folder / top / "__init__.py").is_file()}
    if not packages and not any((folder / f"{top}.py").is_file() for top in tops):
        return
    paths.code.mkdir()
    for module in folder.glob("*.py"):
        shutil.copyfile(module, paths.code / module.name)
    for package in packages:
        shutil.copytree(folder / package, paths.code / package, ignore=shutil.ignore_patterns("__pycache__"))


def _references(config: RunConfig) -> list[str]:
    names = [config.rollout.strategy, config.rollout.filters.custom, *(spec.agent for spec in config.specs)]
    for dataset in config.datasets.values():
        names += [dataset.source, dataset.verifier]
    return [name for name in names if name is not None and is_reference(name)]
