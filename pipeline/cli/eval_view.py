"""What `rollout eval` shows to people."""

from __future__ import annotations

from typing import Any

from rich.table import Table
from rich.text import Text


def render(found: dict[str, Any]) -> list[Any]:
    sizes = [f"pass@{size}" for size in found["overall"]["pass@k"]]
    table = Table("data set", "accuracy", *sizes, "solved", "scored", "samples", box=None, header_style="bold")
    rows = [*found["results"].items()]
    if len(rows) > 1:
        rows.append(("all", found["overall"]))
    for name, figures in rows:
        shares = [_percent(figures["accuracy"]), *(_percent(value) for value in figures["pass@k"].values())]
        table.add_row(name, *shares, *(str(figures[key]) for key in ("solved", "scored", "total")))
    head = f"{found['model']}, weight version {found['weight_version']}"
    said = [Text(_imitation(found["imitation"]))] if found["imitation"] else []
    tail = f"{found['seconds']:.1f} s, {found['samples_per_s']:.0f} samples/s; samples in {found['artefacts']}"
    return [Text(head), table, *said, *(Text(why, style="bold red") for why in found["why_invalid"]), Text(tail, style="dim")]


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.1%}"


def _imitation(found: dict[str, Any]) -> str:
    change = f"{found['before']:.3f} nats a token before any training, {found['after']:.3f} after"
    return f"loss on the teacher's {found['tokens']} tokens: {change}"
