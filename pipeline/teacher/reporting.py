"""What a scoring stage says of itself: counters of groups, and beside them one watched part for each scorer."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.buffer.api import BacklogItem, StageReport
from pipeline.teacher.books import Books
from pipeline.teacher.lane import Lane


def stage_report(
    field: str, actor: str, books: Books, lanes: Mapping[str, Lane], held: Mapping[str, Sequence[BacklogItem]], now: float
) -> StageReport:
    """`detail`: heartbeat, marks (how groups were settled), scorers (LaneMetrics by name), parts (see watchdog).

    held: what waits or is in a call, by scorer. now: by the buffer's clock.
    """
    parts = {name: _part(name, lane, held[name], now) for name, lane in lanes.items()}
    oldest = max(parts.values(), key=lambda part: part["oldest_s"], default={"oldest_s": 0.0})
    return StageReport(
        stage=field,
        actor=actor,
        pid=os.getpid(),
        node=platform.node(),
        started=books.taken,
        finished=books.settled,
        backlog=len(books.held()),
        oldest_s=oldest["oldest_s"],
        busy_s=sum(lane.busy_s() for lane in lanes.values()),
        detail={
            **{key: oldest[key] for key in ("oldest", "holder") if key in oldest},
            "heartbeat": sum(lane.metrics.calls for lane in lanes.values()),
            "marks": dict(books.marks),
            "scorers": {name: lane.report() for name, lane in lanes.items()},
            "parts": parts,
        },
    )


def _part(name: str, lane: Lane, held: Sequence[BacklogItem], now: float) -> dict[str, Any]:
    part: dict[str, Any] = {
        "finished": lane.metrics.groups + lane.metrics.drops,
        "heartbeat": lane.metrics.calls,
        "backlog": len(held),
        "oldest_s": 0.0,
    }
    if held:
        oldest = min(held, key=lambda item: (item.written_at, item.ordinal))
        part["oldest_s"] = max(0.0, now - oldest.written_at)
        part["oldest"] = f"group {oldest.ordinal} (step {oldest.step}, scorer {name})"
    if busy := lane.busy():
        part["holder"] = f"{name}, replica {', '.join(map(str, busy))}"
    return part
