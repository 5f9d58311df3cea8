"""`rollout cancel RUN`: the run counts as cancelled; one that is alive is asked to stop first, and saves what it has."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from pipeline.cli.options import RunsDirOption

if TYPE_CHECKING:
    from pipeline.paths import RunPaths

ENDING_S = 90.0
"""For a run to save and to end its processes, beyond run.stop_grace_s."""
POLL_S = 0.2


def register(app: typer.Typer) -> None:
    app.command("cancel", help="Stop a run, if it is running, and mark it as cancelled: `resume --all` passes it over.")(cancel)


def cancel(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id or folder of a run.", show_default=False)],
    runs_dir: RunsDirOption = None,
) -> None:
    import asyncio

    from pipeline.buffer.lock import RunLock, is_held
    from pipeline.buffer.offline import record_state
    from pipeline.buffer.reader import read_status
    from pipeline.buffer.schema import create_run
    from pipeline.buffer.settings import BufferSettings
    from pipeline.cli.runs import find_run, run_root
    from pipeline.config.loading import read_config
    from pipeline.errors import UserError

    paths = find_run(run_root(runs_dir), run)
    config = read_config(paths.config).config
    if is_held(paths):
        _stop(paths, config.run.stop_grace_s + ENDING_S)
    with RunLock(paths):
        create_run(paths, {"steps": config.trainer.steps}, exist_ok=True)
        state = read_status(paths)["state"]
        if state in ("finished", "cancelled"):
            raise UserError(f"run {paths.run_id} is {state} already")
        asyncio.run(record_state(paths, BufferSettings.from_config(config), "cancelled", new_run_epoch=True))
    typer.echo(f"run {paths.run_id} is cancelled; `rollout resume {paths.run_id}` would go on with it")


def _stop(paths: RunPaths, wait_s: float) -> None:
    """SIGTERM to the driver: it dispatches nothing new, saves and ends. Raises Locked when it does not."""
    from pipeline.buffer.lock import is_held, read_lock, signal_owner
    from pipeline.errors import Locked

    pid = read_lock(paths).get("pid")
    deadline, asked = time.monotonic() + wait_s, False
    while is_held(paths):
        if not asked and (asked := signal_owner(paths)):
            typer.echo(f"run {paths.run_id}: process {pid} was asked to stop", err=True)
        if time.monotonic() >= deadline:
            what = f"did not end within {wait_s:.0f} s" if asked else "is not a process of this machine"
            raise Locked(f"run {paths.run_id} is locked by process {pid}, which {what}")
        time.sleep(POLL_S)
