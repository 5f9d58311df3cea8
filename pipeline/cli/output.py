"""What goes to the terminal: one JSON object, or rich text. Nothing else writes to stdout."""

from __future__ import annotations

import json
from typing import Any

import typer


def echo_json(value: dict[str, Any]) -> None:
    """Paths and other values that JSON lacks become text."""
    typer.echo(json.dumps(value, indent=2, default=str))


def show(*renderables: Any) -> None:
    """Print with rich, which is imported only when there is something to show."""
    from rich.console import Console

    console = Console(highlight=False)
    for renderable in renderables:
        console.print(renderable)
