"""What goes to the terminal: one JSON object, or rich text. Nothing else writes to stdout."""

from __future__ import annotations

import json
from typing import Any

import typer

PIPED_WIDTH = 200
"""Columns of what goes to a file or a pipe, where nothing says how wide a line may be."""


def echo_json(value: dict[str, Any]) -> None:
    """Paths and other values that JSON lacks become text."""
    typer.echo(json.dumps(value, indent=2, default=str))


def show(*renderables: Any) -> None:
    """Print with rich, which is imported only when there is something to show. Text is no markup: `[bench]` stays as it is."""
    from rich.console import Console

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        console.width = PIPED_WIDTH
    for renderable in renderables:
        console.print(renderable)
