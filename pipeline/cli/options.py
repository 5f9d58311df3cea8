"""Arguments and options that several commands share, spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigArgument = Annotated[Path, typer.Argument(metavar="CONFIG", help="A configuration file (YAML).", show_default=False)]
OverridesArgument = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY.PATH=VALUE]...", help="Overrides, for example trainer.steps=20.", show_default=False),
]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, and nothing else there.")]
RunsDirOption = Annotated[
    Path | None,
    typer.Option("--runs-dir", help="Where runs lie; else $ROLLOUT_RUNS, else ./runs.", show_default=False),
]
RunIdOption = Annotated[str | None, typer.Option("--run-id", help="Name of the run; generated when left out.", show_default=False)]
