"""log/stages.jsonl: what every stage held, second by second; the plots of occupancy and of groups by state come from it.

Invariant: the file grows like the logarithm of the run's length, because a snapshot is due after 1/3600 of the time so far
(and at least a second). Counters of a stage start again at 0 when its process does; readers follow them by pid.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline.observe.jsonlines import JsonLines, read_jsonlines
from pipeline.paths import RunPaths

Row = dict[str, Any]
STAGE_KEYS = ("pid", "in", "out", "backlog", "oldest_s", "busy_s")
_FLOW = ("fetcher", "batcher", "evaluator_pool", "teacher_scorer", "replay_buffer", "trainer")
DOWNTIME_S = 30.0
"""Longer silence between two rows is time in which the run did not run."""


def timeline_path(paths: RunPaths) -> Path:
    return paths.log / "stages.jsonl"


class TimelineWriter:
    def __init__(self, path: Path, started_at: float) -> None:
        """started_at: seconds since the epoch at which this process was asked to run; the first row of a new file."""
        self._file = JsonLines(path)
        last = self._file.last
        self._start = started_at
        self._written_at = -math.inf
        if last is None:
            self._file.append([{"t": started_at, "step": 0, "version": 0, "states": {}, "stages": {}, "capacity": {}}])

    def append(self, status: dict[str, Any], t: float, force: bool = False) -> bool:
        """Write a snapshot if one is due (or `force`)."""
        if not force and t - self._written_at < max(0.9, (t - self._start) / 3600):
            return False
        self._file.append([snapshot(status, t)])
        self._written_at = t
        return True


def snapshot(status: dict[str, Any], t: float) -> Row:
    """The row of one status at time `t` (seconds since the epoch)."""
    states = {name: count for name, count in (status.get("ordinals") or {}).items() if name != "fetched"}
    stages = {
        name: {key: stage[key] for key in STAGE_KEYS if stage.get(key) is not None}
        for name, stage in (status.get("stages") or {}).items()
    }
    return {
        "t": round(t, 2),
        "step": status.get("step") or 0,
        "version": status.get("weight_version") or 0,
        "states": states,
        "stages": stages,
        "capacity": status.get("capacity") or {},
    }


def read_timeline(path: Path) -> list[Row]:
    return sorted((row for row in read_jsonlines(path) if "t" in row), key=lambda row: row["t"])


def thin(items: list[Any], points: int = 400) -> list[Any]:
    """At most `points` items, evenly spread, the first and the last among them."""
    if len(items) <= points:
        return items
    stride = (len(items) - 1) / (points - 1)
    return [items[round(index * stride)] for index in range(points)]


def run_seconds(rows: list[Row]) -> list[float]:
    """Seconds that the run had been running at each row: silence above DOWNTIME_S (the run was stopped) does not count.

    The time from the first row, written at the run's start, to the second is start-up, however long.
    """
    seconds = [0.0] if rows else []
    for index in range(1, len(rows)):
        gap = rows[index]["t"] - rows[index - 1]["t"]
        counts = index == 1 or gap <= max(DOWNTIME_S, 3 * seconds[-1] / 3600)
        seconds.append(seconds[-1] + (gap if counts else 0.0))
    return seconds


def in_flow_order(names: Iterable[str]) -> list[str]:
    """Stage names in the order in which a group passes them; unknown ones last, by name."""
    return sorted(names, key=lambda name: (_FLOW.index(name) if name in _FLOW else len(_FLOW), name))


def busy_seconds(rows: list[Row]) -> dict[str, float]:
    """Seconds of work by stage, over all processes that the stage had."""
    totals: dict[str, float] = {}
    last: dict[str, Row] = {}
    for row in rows:
        for name, stage in row.get("stages", {}).items():
            if stage.get("busy_s") is not None:
                totals[name] = totals.get(name, 0.0) + _growth(last.get(name), stage)
                last[name] = stage
    return totals


def occupancy(rows: list[Row]) -> dict[str, list[float]]:
    """Busy seconds a second by stage between each row and the one before it; NaN where a stage or the whole run was away."""
    names = in_flow_order({name for row in rows for name in row.get("stages", {})})
    return {
        name: [math.nan, *(_share(name, before, after) for before, after in zip(rows, rows[1:], strict=False))] for name in names
    }


def picture(rows: list[Row], points: int = 400) -> list[Row]:
    """At most `points` rows, by the seconds that the run ran: groups by state, and by stage backlog, age and occupancy since
    the row before (None where it is not known)."""
    chosen = thin(list(zip(run_seconds(rows), rows, strict=True)), points)
    shares = occupancy([row for _, row in chosen])
    return [
        {
            "seconds": round(seconds, 2),
            "step": row["step"],
            "states": row["states"],
            "capacity": row.get("capacity") or {},
            "stages": {name: _standing(row["stages"][name], shares[name][place]) for name in shares if name in row["stages"]},
        }
        for place, (seconds, row) in enumerate(chosen)
    ]


def first_step_seconds(rows: list[Row]) -> float | None:
    """Seconds from the run's start to its first trained step; None before that."""
    for row, seconds in zip(rows, run_seconds(rows), strict=True):
        if row["step"] >= 1:
            return seconds
    return None


def _standing(stage: Row, share: float) -> Row:
    known = None if math.isnan(share) else round(share, 3)
    return {"backlog": stage.get("backlog"), "oldest_s": stage.get("oldest_s"), "busy": known}


def _growth(before: Row | None, after: Row) -> float:
    """Busy seconds added since `before`; a new process starts from 0."""
    same = before is not None and before.get("pid") == after.get("pid") and after["busy_s"] >= before["busy_s"]
    return after["busy_s"] - before["busy_s"] if same else after["busy_s"]


def _share(name: str, before: Row, after: Row) -> float:
    first, second = before.get("stages", {}).get(name), after.get("stages", {}).get(name)
    seconds = after["t"] - before["t"]
    if first is None or second is None or first.get("busy_s") is None or second.get("busy_s") is None or seconds <= 0:
        return math.nan
    if first.get("pid") != second.get("pid") or second["busy_s"] < first["busy_s"]:
        return math.nan
    return (second["busy_s"] - first["busy_s"]) / seconds
