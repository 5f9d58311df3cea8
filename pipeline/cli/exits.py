"""Exit codes, and what is said with those that are errors: one line each on stderr."""

from __future__ import annotations

import typer

from pipeline.errors import Locked, RolloutError, UserError, root_cause

FINISHED, FAILED, USAGE, STOPPED, LOCKED = 0, 1, 2, 3, 4


def explain(error: RolloutError) -> int:
    """Say what happened; returns the exit code."""
    if isinstance(error, UserError):
        return say(str(error), USAGE)
    if isinstance(error, Locked):
        return say(str(error), LOCKED)
    return say(_with_cause(error), FAILED)


def say(text: str, code: int) -> int:
    for line in text.splitlines():
        typer.echo(f"error: {line}", err=True)
    return code


def _with_cause(error: RolloutError) -> str:
    cause = root_cause(error)
    text = str(error)
    return text if error.__cause__ is None or cause.partition(": ")[2] in text else f"{text} (cause: {cause})"
