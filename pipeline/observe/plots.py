"""Draws the figures of a report. A gap in the data (NaN) is a gap in the line; without any data there is no figure (None).

Only matplotlib's object interface: no process-wide figure state, no display.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from pipeline.observe.tables import percent
from pipeline.observe.theme import RC, Palette

WIDE, HALF = (10.6, 3.3), (5.2, 2.5)
NO_DATA = "no data yet"


@dataclass(frozen=True, slots=True)
class Curve:
    """Values by step; NaN where nothing was measured."""

    x: Sequence[float]
    y: Sequence[float]


@matplotlib.rc_context(RC)
def learning_curve(accuracy: Curve, teacher: float | None, reward: Curve, palette: Palette) -> Figure | None:
    """Held-out accuracy (0..1) by training step, the teacher's as a line, the mean training reward behind them."""
    if not len(accuracy.x) and not len(reward.x):
        return None
    figure, axes = _figure(WIDE, palette)
    if len(reward.x):
        axes.plot(reward.x, reward.y, color=palette.slate, linewidth=0.8, alpha=0.45)
        axes.plot(reward.x, smoothed(reward.y), color=palette.slate, linewidth=1.4, label="training reward (mean of a step)")
    if teacher is not None:
        label = f"teacher, held-out ({percent(teacher)})"
        axes.axhline(teacher, color=palette.teal, linestyle=(0, (4, 3)), linewidth=1.3, label=label)
    if len(accuracy.x):
        axes.plot(accuracy.x, accuracy.y, color=palette.accent, linewidth=2.2, marker="o", markersize=5, label="student, held-out")
        _label_ends(axes, accuracy, palette)
    rewards = [value for value in reward.y if math.isfinite(value)]
    axes.set_ylim(min(0.0, *rewards, 0.0) - 0.02, max(1.0, *rewards, 1.0) + 0.06)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
    _steps(axes, palette)
    _legend(axes, palette, loc="lower right")
    return figure


@matplotlib.rc_context(RC)
def panels(curves: dict[str, Curve], palette: Palette) -> Figure | None:
    """One small panel a curve, side by side; each is titled by its name."""
    if not any(len(curve.x) for curve in curves.values()):
        return None
    figure = Figure(figsize=(WIDE[0], 2.4), layout="constrained")
    for index, (name, curve) in enumerate(curves.items()):
        axes = figure.add_subplot(1, len(curves), index + 1)
        _style(axes, palette)
        axes.set_title(name, color=palette.ink)
        if len(curve.x):
            colour = palette.series(index)
            axes.plot(curve.x, curve.y, color=colour, linewidth=0.8, alpha=0.35)
            axes.plot(curve.x, smoothed(curve.y), color=colour)
            _steps(axes, palette)
        else:
            _say_empty(axes, palette)
    return figure


@matplotlib.rc_context(RC)
def staleness(mean: Curve, largest: Curve, palette: Palette) -> Figure | None:
    """Versions between a group's dispatch and its training, by step."""
    if not len(mean.x) and not len(largest.x):
        return None
    figure, axes = _figure(HALF, palette)
    if len(largest.x):
        axes.plot(largest.x, largest.y, color=palette.amber, linewidth=1.2, drawstyle="steps-mid", label="max")
    if len(mean.x):
        axes.plot(mean.x, mean.y, color=palette.accent, label="mean")
    highest = [value for value in (*mean.y, *largest.y) if math.isfinite(value)]
    axes.set_ylim(0, max(1.0, *highest) * 1.3)
    axes.set_ylabel("versions", color=palette.muted)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    _steps(axes, palette)
    _legend(axes, palette, loc="upper right", ncols=2)
    return figure


@matplotlib.rc_context(RC)
def occupancy(seconds: Sequence[float], shares: dict[str, Sequence[float]], palette: Palette) -> Figure | None:
    """Busy share of each stage over the run's seconds, a strip a stage."""
    if not shares:
        return None
    figure = Figure(figsize=(10.6, 0.6 + 0.42 * len(shares)), layout="constrained")
    grid = figure.add_gridspec(len(shares), 1, hspace=0.25)
    shared: Axes | None = None
    for index, (name, values) in enumerate(shares.items()):
        axes = figure.add_subplot(grid[index], sharex=shared)
        shared = shared or axes
        colour = palette.series(index)
        _style(axes, palette)
        axes.grid(False)
        y = np.asarray(values, float)
        axes.fill_between(seconds, 0, y, color=colour, alpha=0.3, linewidth=0, step="pre")
        axes.step(seconds, y, color=colour, linewidth=0.9, where="pre")
        axes.set_ylim(0, max(1.0, float(np.nanmax(y)) if np.isfinite(y).any() else 1.0))
        axes.set_yticks([])
        axes.set_ylabel(name, rotation=0, ha="right", va="center", color=palette.ink)
        mean = f"{100 * np.nanmean(y):.0f} %" if np.isfinite(y).any() else "–"
        axes.text(1.008, 0.5, mean, transform=axes.transAxes, va="center", color=palette.muted)
        axes.tick_params(labelbottom=index == len(shares) - 1)
    axes.set_xlim(0, max(1.0, seconds[-1]))
    axes.set_xlabel("seconds of running", color=palette.muted)
    return figure


@matplotlib.rc_context(RC)
def states(seconds: Sequence[float], counts: dict[str, Sequence[float]], palette: Palette) -> Figure | None:
    """Groups by state over the run's seconds, stacked."""
    counts = {name: values for name, values in counts.items() if any(value > 0 for value in values if math.isfinite(value))}
    if not counts:
        return None
    figure, axes = _figure(HALF, palette)
    colours = [_STATE_COLOUR[name] for name in counts]
    axes.stackplot(
        seconds, *counts.values(), labels=list(counts), colors=[getattr(palette, name) for name in colours], alpha=0.75, linewidth=0
    )
    axes.set_xlim(0, max(1.0, seconds[-1]))
    axes.set_xlabel("seconds of running", color=palette.muted)
    _legend(axes, palette, loc="upper left", reverse=True)
    return figure


@matplotlib.rc_context(RC)
def bars(values: dict[str, float], palette: Palette, unit: str, colours: dict[str, str] | None = None) -> Figure | None:
    """Horizontal bars with their values, the largest first; `colours` names palette colours."""
    if not values:
        return None
    ordered = sorted(values.items(), key=lambda item: item[1])
    places = max(5, len(ordered))
    figure, axes = _figure((HALF[0], 0.4 + 0.27 * places), palette)
    names, lengths = [name for name, _ in ordered], [value for _, value in ordered]
    fills = [getattr(palette, (colours or {}).get(name, "accent")) for name in names]
    axes.barh(names, lengths, color=fills, alpha=0.85, height=0.62)
    for index, value in enumerate(lengths):
        text = f"{value:,.0f}" if float(value).is_integer() else f"{value:,.1f}"
        axes.annotate(f"{text}{unit}", (value, index), (6, 0), textcoords="offset points", va="center", color=palette.ink)
    axes.set_xlim(0, max(lengths) * 1.18 or 1)
    axes.set_ylim(len(ordered) - places - 0.5, len(ordered) - 0.5)
    axes.grid(False)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", labelcolor=palette.ink, labelsize=RC["font.size"])
    return figure


def smoothed(values: Sequence[float], share: float = 0.06) -> list[float]:
    """Running mean over a centred window of the measured values; NaN stays NaN."""
    array = np.asarray(values, float)
    reach = max(1, round(len(array) * share / 2))
    windows = (array[max(0, index - reach) : index + reach + 1] for index in range(len(array)))
    return [float(np.nanmean(window)) if math.isfinite(value) else math.nan for value, window in zip(array, windows, strict=True)]


_STATE_COLOUR = {
    "trained": "teal",
    "consumed": "sky",
    "ready": "accent",
    "written": "violet",
    "running": "amber",
    "pending": "slate",
    "dropped": "rose",
}


def _figure(size: tuple[float, float], palette: Palette) -> tuple[Figure, Axes]:
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    _style(axes, palette)
    return figure, axes


def _style(axes: Axes, palette: Palette) -> None:
    axes.patch.set_alpha(0)
    axes.set_axisbelow(True)
    axes.grid(True, axis="y", color=palette.grid, linewidth=0.8)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(palette.grid)
    axes.tick_params(colors=palette.muted, length=0, labelsize=8)
    axes.title.set_color(palette.ink)


def _steps(axes: Axes, palette: Palette) -> None:
    axes.set_xlabel("training step", color=palette.muted)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=8))


def _legend(axes: Axes, palette: Palette, **options: object) -> None:
    axes.legend(labelcolor=palette.muted, **options)


def _label_ends(axes: Axes, accuracy: Curve, palette: Palette) -> None:
    """The first and the last measured value beside their points, away from the line."""
    known = [(x, y) for x, y in zip(accuracy.x, accuracy.y, strict=True) if math.isfinite(y)]
    style = {"textcoords": "offset points", "va": "center", "color": palette.accent, "fontweight": "bold", "fontsize": 9.5}
    if known:
        axes.annotate(percent(known[-1][1]), known[-1], (9, 0), ha="left", **style)
    if len(known) > 1:
        axes.annotate(percent(known[0][1]), known[0], (-9, 0), ha="right", **style)
    axes.margins(x=0.11)


def _say_empty(axes: Axes, palette: Palette) -> None:
    axes.text(0.5, 0.5, NO_DATA, transform=axes.transAxes, ha="center", va="center", color=palette.muted)
    axes.set_xticks([])
    axes.set_yticks([])
