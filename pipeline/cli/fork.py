"""`rollout fork RUN`: a new run whose student is a checkpoint of another.

A fork is a new experiment that begins with trained weights: its steps, ordinals, schedules and optimizer start anew, with the
configuration of the old run and whatever is overridden. It draws the same data in the same order; `run.seed=...` draws another.
The checkpoint is copied, so that both runs can be moved or removed.
"""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import OverridesArgument, RunIdOption, RunsDirOption

if TYPE_CHECKING:
    from pathlib import Path

    from pipeline.config.loading import Loaded
    from pipeline.paths import RunPaths

SOURCE = ("path", "package", "architecture", "supervised")
"""Of a student: where it comes from."""


def register(app: typer.Typer) -> None:
    app.command("fork", help="Start a new run from a checkpoint of another, with its configuration and your overrides.")(fork)


def fork(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id or folder of the run to start from.", show_default=False)],
    overrides: OverridesArgument = None,
    step: Annotated[int | None, typer.Option("--step", help="Of the checkpoint; the newest when left out.")] = None,
    run_id: RunIdOption = None,
    runs_dir: RunsDirOption = None,
) -> int:
    started = time.time()
    from pipeline.buffer.schema import create_run
    from pipeline.cli.checks import check_names
    from pipeline.cli.run import drive
    from pipeline.cli.runs import create_run_folder, find_run, run_root
    from pipeline.evaluator.admission import prove
    from pipeline.evaluator.machine import this_machine

    root = run_root(runs_dir)
    source = find_run(root, run)
    checkpoint = find_checkpoint(source, step)
    loaded = forked_config(source, checkpoint, overrides or [])
    prove(loaded.config, this_machine(loaded.config.run.ray))
    check_names(loaded.config)
    paths = create_run_folder(root, loaded, run_id, datetime.now(), hold_student=True)
    typer.echo(f"run {paths.run_id} {paths.root}")
    facts = {"steps": loaded.config.trainer.steps, "started_at": started, "forked_from": f"{source.run_id}/{checkpoint.name}"}
    create_run(paths, facts)
    return drive(paths, started)


def find_checkpoint(source: RunPaths, step: int | None) -> Path:
    """Folder of the newest complete checkpoint, or of that step. Raises UserError, naming those that there are."""
    from pipeline.errors import UserError
    from pipeline.trainer import checkpoints

    for found in checkpoints.complete(source):
        if step in (None, found.step):
            return found.path
    there = [int(path.name.removeprefix("step_")) for path in reversed(checkpoints.listed(source))]
    if step is None or not there:
        raise UserError(f"run {source.run_id} has no complete checkpoint to start from")
    raise UserError(f"run {source.run_id} has no complete checkpoint of step {step}; there are those of steps {there}")


def forked_config(source: RunPaths, checkpoint: Path, overrides: list[str]) -> Loaded:
    """The old run's configuration with the overrides, and the checkpoint for a student. Raises UserError for another student."""
    from pipeline.config.loading import read_config
    from pipeline.errors import UserError

    before, loaded = read_config(source.config).config, read_config(source.config, overrides)
    config = loaded.config
    for key in SOURCE:
        if getattr(config.student, key) != getattr(before.student, key):
            raise UserError(f"student.{key} cannot be overridden: the student of a fork is the checkpoint {checkpoint}")
    student = config.student.model_copy(update={**dict.fromkeys(SOURCE), "path": checkpoint})
    run_id = None if config.run.id == source.run_id else config.run.id
    return replace(
        loaded, config=config.model_copy(update={"student": student, "run": config.run.model_copy(update={"id": run_id})})
    )
