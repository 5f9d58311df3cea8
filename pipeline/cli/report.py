"""`rollout report RUN`: writes report.html from the run folder, or its learning curve alone, while the run goes on or after it."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated, Literal

import typer

from pipeline.cli.options import RunsDirOption
from pipeline.cli.runs import find_run, run_root


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run id, or the path of a run folder.", show_default=False)],
    picture: Annotated[
        Path | None,
        typer.Option("--picture", metavar="FILE", help="The learning curve alone, as a PNG file; no report is written."),
    ] = None,
    open_: Annotated[Literal["yes", "no"], typer.Option("--open", help="Show it in a browser.")] = "no",
    runs_dir: RunsDirOption = None,
) -> None:
    """Write a run's report.html and print its path."""
    from pipeline.observe.report import learning_curve_png, write_report  # matplotlib

    paths = find_run(run_root(runs_dir), run)
    path = write_report(paths) if picture is None else learning_curve_png(paths, picture)
    typer.echo(str(path))
    if open_ == "yes":
        webbrowser.open(path.resolve().as_uri())
