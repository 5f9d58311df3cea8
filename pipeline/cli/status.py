"""`rollout status [RUN]`: where one run stands, or all of them. Only reads: it works while a run goes on and after a crash."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from pipeline.buffer.reader import read_live_status
from pipeline.cli.options import JsonOption, RunsDirOption
from pipeline.cli.output import echo_json, show
from pipeline.cli.runs import find_run, list_runs, run_root
from pipeline.errors import RolloutError
from pipeline.observe.evaluations import before_and_after, student_evaluations
from pipeline.paths import RunPaths


def register(app: typer.Typer) -> None:
    app.command()(status)


def status(
    run: Annotated[
        str | None, typer.Argument(metavar="[RUN]", help="A run id, or the path of a run folder; all runs when left out.")
    ] = None,
    as_json: JsonOption = False,
    runs_dir: RunsDirOption = None,
) -> None:
    """Show one run's state, groups and stages, or list the runs."""
    root = run_root(runs_dir)
    if run is None:
        _show_all(root, as_json)
        return
    found = read_live_status(find_run(root, run))
    if as_json:
        echo_json(found)
        return
    from pipeline.observe.tables import render_status

    show(render_status(found))


def _show_all(root: Path, as_json: bool) -> None:
    rows = [_row(paths) for paths in list_runs(root)]
    if as_json:
        echo_json({"runs": rows})
    elif not rows:
        typer.echo(f"no runs in {root}")
    else:
        from pipeline.observe.tables import render_runs

        show(render_runs(rows))


def _row(paths: RunPaths) -> dict[str, Any]:
    """One run of the list; a run whose ledger cannot be read is listed with the reason, and does not hide the others."""
    before, after = (item and item.overall.accuracy for item in before_and_after(student_evaluations(paths.details)))
    row = {"run_id": paths.run_id, "path": str(paths.root), "accuracy_before": before, "accuracy_after": after}
    try:
        found = read_live_status(paths)
    except RolloutError as error:
        return row | {"state": "unreadable", "error": str(error)}
    return row | {key: found[key] for key in ("state", "step", "steps", "error")}
