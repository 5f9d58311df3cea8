"""`rollout doctor`: what this machine lacks for a run, and how to mend it. Exit code 1 when a run could not start."""

from __future__ import annotations

import typer

from pipeline.cli.options import JsonOption, RunsDirOption

_STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def register(app: typer.Typer) -> None:
    app.command("doctor", help="Say what is missing on this machine, and how to mend it.")(doctor)


def doctor(runs_dir: RunsDirOption = None, as_json: JsonOption = False) -> None:
    from dataclasses import asdict

    from pipeline.cli.machine import check_machine
    from pipeline.cli.output import echo_json, show
    from pipeline.cli.runs import run_root

    checks = check_machine(run_root(runs_dir))
    good = all(check.status != "fail" for check in checks)
    if as_json:
        echo_json({"ok": good, "checks": [asdict(check) for check in checks]})
    else:
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for check in checks:
            detail = Text(check.detail)
            if check.mend:
                detail.append(f"\n-> {check.mend}", style="cyan")
            table.add_row(Text(check.status, style=_STYLES[check.status]), check.name, detail)
        show(table)
    if not good:
        raise typer.Exit(1)
