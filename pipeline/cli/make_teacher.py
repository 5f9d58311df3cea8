"""`rollout make-teacher CONFIG`: make the teachers of a configuration before a run, or find them in the cache."""

from __future__ import annotations

from typing import Annotated

import typer

from pipeline.cli.options import ConfigArgument, JsonOption, OverridesArgument, RunsDirOption


def register(app: typer.Typer) -> None:
    app.command("make-teacher", help="Make the teachers of a configuration; they are cached beside the runs.")(make_teacher)


def make_teacher(
    config: ConfigArgument,
    overrides: OverridesArgument = None,
    alias: Annotated[str | None, typer.Option(help="Only this teacher.", show_default=False)] = None,
    runs_dir: RunsDirOption = None,
    as_json: JsonOption = False,
) -> None:
    from pipeline.config.loading import open_config

    settings = open_config(config, overrides or ()).config
    aliases = _aliases(list(settings.teachers), alias)
    del aliases, runs_dir, as_json
    raise NotImplementedError


def _aliases(known: list[str], alias: str | None) -> list[str]:
    import difflib

    from pipeline.errors import ConfigError

    if not known:
        raise ConfigError("teachers: the configuration has none")
    if alias is None:
        return known
    if alias not in known:
        close = difflib.get_close_matches(alias, known, 1)
        raise ConfigError(f"--alias {alias!r}: teachers are {known}" + (f"; did you mean {close[0]!r}?" if close else ""))
    return [alias]
