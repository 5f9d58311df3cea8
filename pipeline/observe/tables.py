"""Tables for a terminal: the summary at a run's end, one run's status, the list of runs."""

from __future__ import annotations

from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from pipeline.observe.timeline import in_flow_order
from pipeline.paths import RunPaths
from pipeline.records import GROUP_STATES

STATE_STYLE = {
    "finished": "bold green",
    "running": "bold cyan",
    "starting": "cyan",
    "stopped": "yellow",
    "failed": "bold red",
    "cancelled": "yellow",
}
_FILES = ("report", "summary", "metrics", "details", "checkpoints", "tensorboard", "log")


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f} %"


def duration(seconds: float | None) -> str:
    """`3.2 s`, `4 min 05 s`, `2 h 07 min`."""
    if seconds is None:
        return "–"
    if round(seconds, 1) < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def render_table(summary: dict[str, Any], paths: RunPaths) -> RenderableType:
    """Accuracy before, after and of the teacher; groups by state; time by stage; where the files are."""
    took = f"{duration(summary.get('seconds_total'))} in all, first trained step after {duration(summary.get('first_step_s'))}"
    tables = (_accuracy(summary), _states(summary), _seconds(summary), _files(paths))
    parts: list[RenderableType] = [Text(took), *(part for table in tables for part in ("", table))]
    if summary.get("error"):
        parts.append(Text(str(summary["error"]), style="red"))
    title = Text.assemble((str(summary["run_id"]), "bold"), " · ", _state(summary.get("state")), f" · step {summary['steps']}")
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim", expand=False)


def render_status(status: dict[str, Any]) -> RenderableType:
    """One run: state, progress, groups by state, and what each stage holds."""
    head = Text.assemble(
        (str(status.get("run_id")), "bold"),
        " · ",
        _state(status.get("state")),
        f" · step {status.get('step') or 0}/{status.get('steps') or '?'} · weights v{status.get('weight_version') or 0}"
        f" · checkpoint {_or_dash(status.get('checkpoint_step'))}",
    )
    parts: list[RenderableType] = [head, _states(status), _stages(status.get("stages") or {})]
    for title in ("attempts", "capacity", "workflow"):
        if status.get(title):
            parts.append(Text(_pairs(title, status[title]), style="dim"))
    if status.get("error"):
        parts.append(Text(str(status["error"]), style="red"))
    return Group(*parts)


def render_runs(rows: list[dict[str, Any]]) -> RenderableType:
    """One line a run: `{run_id, state, step, steps, accuracy_before, accuracy_after, path, error}`."""
    table = _table("run", "state", "step", "accuracy", "folder")
    for row in rows:
        accuracy = f"{percent(row.get('accuracy_before'))} → {percent(row.get('accuracy_after'))}"
        step = f"{_or_dash(row.get('step'))}/{_or_dash(row.get('steps'))}"
        folder = Text.assemble(str(row["path"]), (f"\n{row['error']}" if row.get("error") else "", "red"))
        table.add_row(row["run_id"], _state(row.get("state")), step, accuracy, folder)
    return table


def _accuracy(summary: dict[str, Any]) -> Table:
    table = _table("held-out accuracy", "before", "after", "change", "teacher")
    rows = list((summary.get("by_dataset") or {}).items())
    if len(rows) != 1:
        rows.append(("all datasets", {key: summary.get(f"accuracy_{key}") for key in ("before", "after", "teacher")}))
    for name, scores in rows:
        before, after = scores.get("before"), scores.get("after")
        change = "–" if before is None or after is None else f"{100 * (after - before):+.1f} points"
        table.add_row(name, percent(before), Text(percent(after), style="bold"), change, percent(scores.get("teacher")))
    return table


def _states(source: dict[str, Any]) -> Table:
    ordinals = source.get("ordinals") or {}
    table = _table("groups", "fetched", *GROUP_STATES)
    table.add_row("", *(str(ordinals.get(name, "–")) for name in ("fetched", *GROUP_STATES)))
    reasons = source.get("dropped_by_reason") or {}
    if reasons:
        said = ", ".join(f"{name} {count}" for name, count in sorted(reasons.items()))
        table.caption = f"dropped: {said}; replaced {source.get('replaced', 0)}, short_late {source.get('short_late', 0)}"
        table.caption_justify = "left"
    return table


def _seconds(summary: dict[str, Any]) -> Table:
    stages = summary.get("seconds") or {}
    table = _table("seconds", *stages)
    table.add_row("", *(f"{value:.1f}" for value in stages.values()))
    return table


def _stages(stages: dict[str, dict[str, Any]]) -> Table:
    table = _table("stage", "actor", "pid", "node", "in", "out", "backlog", "oldest")
    for name in in_flow_order(stages):
        stage = stages[name]
        counts = (_or_dash(stage.get(key)) for key in ("in", "out", "backlog"))
        table.add_row(
            name,
            str(stage.get("actor") or "–"),
            _or_dash(stage.get("pid")),
            str(stage.get("node") or "–"),
            *counts,
            duration(stage.get("oldest_s")),
        )
    return table


def _files(paths: RunPaths) -> Table:
    table = _table("files", str(paths.root))
    for name in _FILES:
        path = getattr(paths, name)
        if path.exists():
            table.add_row(name, str(path.relative_to(paths.root)) + ("/" if path.is_dir() else ""))
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim", title_justify="left")
    table.add_column(first, style="bold", no_wrap=True)
    numeric = first not in ("files", "run", "stage")
    for other in others:
        table.add_column(other, justify="right" if numeric else "left", overflow="fold")
    return table


def _state(state: str | None) -> Text:
    return Text(state or "unknown", style=STATE_STYLE.get(state or "", "dim"))


def _pairs(title: str, values: dict[str, Any]) -> str:
    return f"{title}: " + ", ".join(f"{name} {_or_dash(value)}" for name, value in values.items())


def _or_dash(value: Any) -> str:
    return "–" if value is None else str(value)
