"""report.html: one page about a run that needs nothing but itself. Made from the run folder, at any time, whatever is missing.

Invariant: every text that came from a model, a dataset or a configuration is escaped, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, PackageLoader

from pipeline.buffer.reader import read_status
from pipeline.errors import RolloutError, UserError
from pipeline.observe import plots, theme
from pipeline.observe.evaluations import Evaluation, student_evaluations
from pipeline.observe.metrics import read_metrics
from pipeline.observe.plots import Curve
from pipeline.observe.samples import sample_rows
from pipeline.observe.series import series
from pipeline.observe.summary import build_summary, read_summary
from pipeline.observe.tables import duration, percent
from pipeline.observe.timeline import Row, occupancy, read_timeline, run_seconds, thin, timeline_path
from pipeline.paths import RunPaths
from pipeline.records import GROUP_STATES

_STATE_ORDER = ("trained", "consumed", "ready", "written", "running", "pending", "dropped")
_FAILURE_COLOURS = {"solved": "teal", "infra": "rose", "timeout": "rose", "other": "slate"}


def write_report(paths: RunPaths, status: dict[str, Any] | None = None) -> Path:
    """Write and return report.html. status: of `rollout status --json`, when the caller has it; else it is read here."""
    page = render_report(paths, _status(paths) if status is None else status)
    aside = paths.report.with_suffix(".html.tmp")
    aside.write_text(page, encoding="utf-8")
    os.replace(aside, paths.report)
    return paths.report


def render_report(paths: RunPaths, status: dict[str, Any]) -> str:
    summary = build_summary(paths, status)
    evaluations = student_evaluations(paths.details)
    newest = evaluations[-1] if evaluations else None
    config = _config(paths)
    environment = Environment(loader=PackageLoader("pipeline.observe", "."), autoescape=True, trim_blocks=True)
    return environment.get_template("report.html.j2").render(
        run_id=summary["run_id"],
        state=summary["state"] or "unknown",
        error=summary["error"],
        headline=_headline(summary),
        facts=_facts(config, summary),
        cards=_cards(summary),
        by_dataset=[(name, *map(percent, scores.values())) for name, scores in summary["by_dataset"].items()],
        figures=_figures(paths, summary, evaluations),
        empty={"dropped": "none was dropped"} if summary["ordinals"] else {},
        failures_note=_failures_note(newest),
        attempts=list(summary["attempts"].items()),
        groups=[(name, summary["ordinals"][name]) for name in ("fetched", *GROUP_STATES) if name in summary["ordinals"]],
        samples=sample_rows(paths.details, newest.id) if newest else [],
        samples_note=f"Evenly spread over evaluation {newest.id}." if newest else "From the newest evaluation.",
        config=paths.config.read_text() if paths.config.exists() else "no configuration was stored",
        footer=" · ".join(f"{name} {version}" for name, version in summary["versions"]["packages"].items()),
        light=theme.css_variables(theme.LIGHT),
        dark=theme.css_variables(theme.DARK),
    )


def learning_curve_png(paths: RunPaths, out: Path) -> Path:
    """The learning curve as a picture on white, 1600 pixels wide. Raises UserError when there is nothing to draw yet, or the file
    cannot be written."""
    lines, evaluations = read_metrics(paths.metrics), student_evaluations(paths.details)
    teacher = build_summary(paths, {})["accuracy_teacher"]
    figure = plots.learning_curve(_accuracy(evaluations), teacher, Curve(*series(lines, "reward_mean")), theme.LIGHT)
    if figure is None:
        raise UserError(f"run {paths.run_id} has no evaluation and no trained step yet: nothing to draw")
    figure.set_size_inches(8, 3.6)
    try:
        figure.savefig(out, format="png", dpi=200, facecolor="white")
    except OSError as error:
        raise UserError(f"{out} cannot be written: {error.strerror}") from error
    return out


def _figures(paths: RunPaths, summary: dict[str, Any], evaluations: list[Evaluation]) -> dict[str, str]:
    lines, palette = read_metrics(paths.metrics), theme.THEMED
    rows = read_timeline(timeline_path(paths))
    pairs = thin(list(zip(rows, run_seconds(rows), strict=True)))
    rows, seconds = [row for row, _ in pairs], [second for _, second in pairs]

    def curve(name: str) -> Curve:
        return Curve(*series(lines, name))

    training = {
        "loss": curve("loss"),
        "KL to the teacher": curve("teacher_kl"),
        "KL to the sampling policy": curve("kl_behaviour"),
        "entropy": curve("entropy"),
    }
    failures = evaluations[-1].failure_classes if evaluations else {}
    drawn = {
        "learning": plots.learning_curve(_accuracy(evaluations), summary["accuracy_teacher"], curve("reward_mean"), palette),
        "training": plots.panels(training, palette),
        "staleness": plots.staleness(curve("staleness_mean"), curve("staleness_max"), palette),
        "states": plots.states(seconds, _state_counts(rows), palette),
        "occupancy": plots.occupancy(seconds, occupancy(rows), palette),
        "seconds": plots.bars(summary["seconds"], palette, " s"),
        "dropped": plots.bars(summary["dropped_by_reason"], palette, "", dict.fromkeys(summary["dropped_by_reason"], "rose")),
        "failures": plots.bars(failures, palette, "", {name: _FAILURE_COLOURS.get(name, "amber") for name in failures}),
    }
    return {name: theme.svg(figure, name, f"plot: {name}") for name, figure in drawn.items() if figure is not None}


def _accuracy(evaluations: list[Evaluation]) -> Curve:
    """An invalid evaluation is a gap."""
    points = [(item.step or 0, item.overall.accuracy if item.valid else None) for item in evaluations]
    known = [float("nan") if accuracy is None else accuracy for _, accuracy in points]
    return Curve([step for step, _ in points], known)


def _state_counts(rows: list[Row]) -> dict[str, list[float]]:
    return {state: [float(row["states"].get(state, 0)) for row in rows] for state in _STATE_ORDER}


def _failures_note(newest: Evaluation | None) -> str:
    if newest is None:
        return "Held-out samples, by class."
    invalid = "" if newest.valid else f" This evaluation does not count: {'; '.join(newest.why_invalid)}."
    return f"Held-out samples of evaluation {newest.id}, by class.{invalid}"


def _headline(summary: dict[str, Any]) -> str:
    steps = f"Step {summary['steps']} of {summary['steps_planned']}" if summary["steps_planned"] else f"Step {summary['steps']}"
    total = summary["seconds_total"]
    return steps if total is None else f"{steps}, after {duration(total)}"


def _facts(config: dict[str, Any], summary: dict[str, Any]) -> list[tuple[str, str]]:
    rollout, algorithm = config.get("rollout") or {}, config.get("algorithm") or {}
    teachers = ", ".join(f"{name} ({_source(teacher)})" for name, teacher in (config.get("teachers") or {}).items())
    facts = [
        ("Algorithm", algorithm.get("name")),
        ("Student", _source(config.get("student") or {})),
        ("Teachers", teachers or None),
        ("Datasets", ", ".join(config.get("datasets") or {}) or None),
        ("Groups a step × samples", _times(rollout.get("tasks_per_step"), rollout.get("samples_per_task"))),
        ("Weight version, checkpoint", f"{_dash(summary['versions']['weights'])}, {_dash(summary['versions']['checkpoint'])}"),
    ]
    return [(name, str(value)) for name, value in facts if value is not None]


def _source(model: dict[str, Any]) -> str | None:
    """One phrase for a models.ModelSource as it stands in config.yaml."""
    if model.get("path") or model.get("package"):
        return str(model.get("package") or model["path"])
    shape = model.get("architecture")
    if shape:
        return f"Llama architecture, {shape.get('layers')} layers of {shape.get('hidden')}"
    return model.get("engine")


def _cards(summary: dict[str, Any]) -> list[dict[str, str]]:
    before, after, ordinals = summary["accuracy_before"], summary["accuracy_after"], summary["ordinals"]
    change = "accuracy after" if before is None or after is None else f"accuracy after ({100 * (after - before):+.1f} points)"
    trained = ordinals.get("trained", 0) + ordinals.get("consumed", 0) if ordinals else None
    cards = [
        ("", percent(before), "accuracy before"),
        ("main", percent(after), change),
        ("teacher", percent(summary["accuracy_teacher"]), "teacher's accuracy"),
        ("", _dash(trained), f"groups trained, {_dash(ordinals.get('dropped'))} dropped"),
        ("", duration(summary["first_step_s"]), "to the first trained step"),
        ("", duration(summary["seconds_total"]), "whole run"),
    ]
    return [{"kind": kind, "value": value, "label": label} for kind, value, label in cards]


def _config(paths: RunPaths) -> dict[str, Any]:
    if not paths.config.exists():
        return {}
    loaded = yaml.safe_load(paths.config.read_text())
    return loaded if isinstance(loaded, dict) else {}


def _status(paths: RunPaths) -> dict[str, Any]:
    """From the ledger, else what the last summary said, else nothing."""
    try:
        return read_status(paths)
    except RolloutError:
        known = read_summary(paths.summary) or {}
        return {**known, "step": known.get("steps"), "steps": known.get("steps_planned")} if known else {}


def _times(groups: int | None, samples: int | None) -> str | None:
    return None if groups is None or samples is None else f"{groups} × {samples}"


def _dash(value: Any) -> str:
    return "–" if value is None else str(value)
