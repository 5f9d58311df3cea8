"""`rollout run CONFIG` and `rollout resume RUN`. Everything that needs Ray is behind workflows.run, imported in the command."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.exits import FINISHED, STOPPED, explain
from pipeline.cli.options import ConfigArgument, OverridesArgument, RunIdOption, RunsDirOption

if TYPE_CHECKING:
    from pipeline.config.schema import RunConfig
    from pipeline.paths import RunPaths

DONE = ("finished", "cancelled")
"""States that `resume --all` passes over."""


def register(app: typer.Typer) -> None:
    app.command("run", help="Run a configuration; kill it whenever you like, `rollout resume` goes on.")(run)
    app.command("resume", help="Go on with a run that was stopped, killed, or failed.")(resume)


def run(
    config: ConfigArgument, overrides: OverridesArgument = None, run_id: RunIdOption = None, runs_dir: RunsDirOption = None
) -> int:
    started = time.time()
    from pipeline.cli.checks import check_names
    from pipeline.cli.runs import create_run_folder, run_root
    from pipeline.config.loading import read_config
    from pipeline.evaluator.admission import prove
    from pipeline.evaluator.machine import this_machine
    from pipeline.evaluator.saved import locate

    loaded = read_config(config, overrides)
    if loaded.config.run.ray.address is None:  # what an existing cluster has left is asked there
        prove(loaded.config, this_machine(loaded.config.run.ray))
    check_names(loaded.config)
    locate(loaded.config.rollout.reuse, run_root(runs_dir))
    paths = create_run_folder(run_root(runs_dir), loaded, run_id, datetime.now())
    typer.echo(f"run {paths.run_id} {paths.root}")
    return drive(paths, started)


def resume(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="Id or folder of a run.", show_default=False)] = None,
    overrides: OverridesArgument = None,
    every: Annotated[bool, typer.Option("--all", help="Every run that was interrupted, one after the other.")] = False,
    runs_dir: RunsDirOption = None,
) -> int:
    started = time.time()
    from pipeline.cli.runs import find_run, list_runs, run_root
    from pipeline.errors import UserError

    root = run_root(runs_dir)
    if every == (run is not None):
        raise UserError("give one RUN to resume, or --all")
    if run is not None:
        return _resume(find_run(root, run), overrides or [], started)
    return _resume_all(list(reversed(list_runs(root))), overrides or [])


def _resume_all(runs: list[RunPaths], overrides: list[str]) -> int:
    """One run that cannot go on does not keep the others from it; a person who stops one means all. Returns the worst exit code."""
    from pipeline.errors import RolloutError

    worst = FINISHED
    for paths in runs:
        try:
            code = _resume(paths, overrides, time.time()) if _is_interrupted(paths) else FINISHED
        except RolloutError as error:
            code = explain(error)
        if code == STOPPED:
            return code
        worst = max(worst, code)
    return worst


def _resume(paths: RunPaths, overrides: list[str], started: float) -> int:
    typer.echo(f"run {paths.run_id} {paths.root}")
    if _state(paths) == "finished" and not overrides:
        typer.echo("it is finished; trainer.steps=N with more steps goes on", err=True)
        return 0
    return drive(paths, started, overrides)


def changed_config(paths: RunPaths, config: RunConfig, overrides: list[str]) -> RunConfig:
    """The run's configuration with what may be changed on resume. Raises ConfigError, showing the difference, for anything else."""
    if not overrides:
        return config
    from pipeline.cli.runs import write_config
    from pipeline.config.differences import changed, refuse
    from pipeline.config.loading import read_config

    wanted = read_config(paths.config, overrides).config
    refuse(changed(config, wanted), paths.run_id)
    write_config(paths, wanted)
    return wanted


def drive(paths: RunPaths, started: float, overrides: Sequence[str] = ()) -> int:
    """Run what is left of a run whose folder exists. Nothing of the folder is touched before the run's lock is held; what an
    earlier command was killed in the middle of making is made good."""
    from pipeline.buffer.lock import RunLock
    from pipeline.buffer.schema import create_run
    from pipeline.cli.output import show
    from pipeline.config.loading import read_config
    from pipeline.observe.tables import render_table
    from pipeline.observe.trackers import check_trackers
    from workflows.run import Driver

    with RunLock(paths) as lock:
        config = changed_config(paths, read_config(paths.config).config, list(overrides))
        check_trackers(config.observe.trackers)
        create_run(paths, {"steps": config.trainer.steps, "started_at": started}, exist_ok=True)
        outcome = Driver(paths, config, lock, started).run()
    if outcome.reason:
        show(outcome.reason)
    if outcome.summary:
        show(render_table(outcome.summary, paths))
    return outcome.exit_code


def _is_interrupted(paths: RunPaths) -> bool:
    from pipeline.buffer.lock import is_held

    return not is_held(paths) and _state(paths) not in DONE


def _state(paths: RunPaths) -> str | None:
    """None: its making was interrupted."""
    from pipeline.buffer.reader import read_status
    from pipeline.buffer.schema import is_created

    return read_status(paths)["state"] if is_created(paths) else None
