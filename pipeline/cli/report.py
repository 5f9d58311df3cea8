"""`rollout report RUN`: writes report.html from the run folder, while the run goes on or after it."""

from __future__ import annotations

import webbrowser
from typing import Annotated, Literal

import typer

from pipeline.cli.options import RunsDirOption
from pipeline.cli.runs import find_run, run_root


def register(app: typer.Typer) -> None:
    app.command()(report)


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run id, or the path of a run folder.", show_default=False)],
    open_: Annotated[Literal["yes", "no"], typer.Option("--open", help="Show it in a browser.")] = "no",
    runs_dir: RunsDirOption = None,
) -> None:
    """Write a run's report.html and print its path."""
    from pipeline.observe.report import write_report  # matplotlib

    path = write_report(find_run(run_root(runs_dir), run))
    typer.echo(str(path))
    if open_ == "yes":
        webbrowser.open(path.as_uri())
