"""`rollout schema`: the JSON Schema of the configuration, with every key's help text."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    app.command("schema", help="Print the JSON Schema of the configuration.")(schema)


def schema() -> None:
    from pipeline.cli.output import echo_json
    from pipeline.config.schema import RunConfig

    echo_json(RunConfig.model_json_schema())
