"""A plan as tables: sections of values with their origins, data sets, schedules, and the proof of resources."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

_STYLES = {"default": "dim", "file": "", "override": "bold cyan"}


def render(plan: dict[str, Any]) -> Iterator[RenderableType]:
    yield Text(f"{plan['path']}: valid", style="bold green")
    yield _values(plan["values"])
    for name, dataset in plan["datasets"].items():
        yield _dataset(name, dataset)
    yield _stream(plan["stream"])
    yield _schedules(plan["schedules"])
    yield from _resources(plan["resources"])
    for line in plan["pretended_gpus"]:
        yield Text(line, style="yellow")


def _values(values: dict[str, dict[str, Any]]) -> Table:
    table = _table("", "value", "from")
    for _, keys in groupby(values, key=lambda key: key.partition(".")[0]):
        for key in keys:
            entry = values[key]
            table.add_row(key, _text(entry["value"]), entry["origin"], style=_STYLES[entry["origin"]])
        table.add_section()
    return table


def _dataset(name: str, dataset: dict[str, Any]) -> Table:
    table = _table(f"data set {name}", "value", "from")
    facts = ("train", "held_out", "share", "spec", "agent", "verifiers", "teacher")
    for key in facts:
        table.add_row(key, _text(dataset[key]), "")
    for cascade in ("sampling", "eval_sampling", "stopping"):
        table.add_section()
        for field, entry in dataset[cascade].items():
            style = "dim" if entry["origin"] == "built-in" else ""
            table.add_row(f"{cascade}.{field}", _text(entry["value"]), entry["origin"], style=style)
    return table


def _stream(stream: dict[str, Any]) -> Text:
    line = f"{stream['groups']} groups of {stream['samples_per_group']} samples; the buffer holds {stream['capacity']} groups"
    if stream["ends_at_step"] is not None:
        line += f"; the data ends in step {stream['ends_at_step']}: {stream['limit']} groups in all"
    return Text(line, style="yellow" if stream["ends_at_step"] is not None else "")


def _schedules(steps: list[dict[str, float]]) -> Table:
    """A row for every step; neighbours that have the same values share one."""
    table = _table(*steps[0])
    for shown, rows in groupby(steps, key=lambda row: [f"{value:.6g}" for name, value in row.items() if name != "step"]):
        same = [row["step"] for row in rows]
        table.add_row(f"{same[0]}" if len(same) == 1 else f"{same[0]} to {same[-1]}", *shown)
    return table


def _resources(proof: dict[str, Any] | None) -> Iterator[RenderableType]:
    if proof is None:
        yield Text("resources: proved when the run starts, by what the cluster at run.ray.address reports")
        return
    table = _table("asked of Ray", "count", "cpu", "gpu", "memory GB")
    for line in (*proof["lines"], proof["total"], proof["machine"], proof["remaining"]):
        count = line["count"]
        amounts = (f"{line[key] * count:.6g}" for key in ("cpu", "gpu", "memory_gb"))
        table.add_row(line["who"], str(count), *amounts, end_section=line is proof["lines"][-1])
    yield table
    for name, tokens in proof["tokens"].items():
        held = "any number" if tokens["held"] is None else tokens["held"]
        yield Text(f"spec {name}: a batch asks for {tokens['asked']} tokens, the empty pool holds {held}: admitted", style="green")


def _table(*columns: str) -> Table:
    return Table(*columns, box=None, header_style="bold", padding=(0, 2, 0, 0))


def _text(value: Any) -> Text:
    return Text("-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value))
