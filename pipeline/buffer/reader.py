"""What others read of a run, from one read transaction over a read-only connection: while it goes on, and after it was killed."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

from pipeline.buffer import progress
from pipeline.buffer.ledger import used_capacity
from pipeline.buffer.lock import is_held
from pipeline.buffer.schema import get_meta, open_reader
from pipeline.errors import FencedOut, StoreError
from pipeline.paths import RunPaths
from pipeline.records import GROUP_STATES


def read_status(paths: RunPaths) -> dict[str, Any]:
    """`rollout status RUN --json`. Raises UserError when there is no run, or it is of another program or version."""
    with _snapshot(paths) as db:
        return status(db)


def read_live_status(paths: RunPaths) -> dict[str, Any]:
    """`read_status`, except that a run which no process drives any more does not run."""
    found = read_status(paths)
    if found["state"] in ("starting", "running") and not is_held(paths):
        return found | {"state": "stopped", "error": "its driver is gone and left no word; `rollout resume` goes on"}
    return found


def read_steps(paths: RunPaths, after: int = 0) -> dict[int, dict[str, Any]]:
    """step -> the metrics that training recorded, of the steps after `after`."""
    with _snapshot(paths) as db:
        return progress.results(db, after)


def read_selections(paths: RunPaths) -> dict[int, list[int]]:
    """step -> the ordinals that it was trained on, in their order."""
    with _snapshot(paths) as db:
        return {row["step"]: json.loads(row["ordinals"]) for row in db.execute("SELECT * FROM selections ORDER BY step")}


def read_facts(paths: RunPaths) -> dict[str, Any]:
    """What create_run and set_run recorded (`steps`, `workflow_id`, ...)."""
    with _snapshot(paths) as db:
        return facts(db)


def read_checkpoint_steps(paths: RunPaths) -> list[int]:
    """Steps of the checkpoints that retention counts on, newest first."""
    with _snapshot(paths) as db:
        return [row["step"] for row in db.execute("SELECT step FROM checkpoints ORDER BY step DESC")]


def read_evictable(paths: RunPaths, keep_groups: int | None) -> tuple[int, int, set[int]]:
    """What retention would remove: groups, bytes of their rows in the database, and the segments that would still be needed."""
    with _snapshot(paths) as db:
        going = set(progress.evictable(db, keep_groups))
        rows = db.execute("SELECT ordinal, segment, length FROM payloads").fetchall()
    inline = sum(row["length"] for row in rows if row["ordinal"] in going and row["segment"] is None)
    return len(going), inline, {row["segment"] for row in rows if row["segment"] is not None and row["ordinal"] not in going}


def read_run_epoch(paths: RunPaths) -> int:
    """Raised by every run and resume: what belongs to an older one is refused."""
    with _snapshot(paths) as db:
        return get_meta(db, "run_epoch")


def run_fence(paths: RunPaths, epoch: int, role: str, claim: int) -> Callable[[], None]:
    """For whoever writes to the run folder itself: a check that raises FencedOut once a newer run epoch than `epoch` has begun, or
    another process has claimed the role."""
    db = open_reader(paths.database)

    def check() -> None:
        try:
            newest, claimed = get_meta(db, "run_epoch"), get_meta(db, progress.claim_key(role))
        except sqlite3.Error as error:
            raise StoreError(f"{paths.database} cannot be read: {error}") from error
        if newest != epoch:
            raise FencedOut(
                f"run {paths.run_id} is in run epoch {newest}, this process belongs to {epoch}: nothing more of it counts"
            )
        if claimed != claim:
            raise FencedOut(f"{role} {claimed} of run {paths.run_id} has begun, this is {claim}: nothing more of it counts")

    return check


def facts(db: sqlite3.Connection) -> dict[str, Any]:
    rows = db.execute("SELECT substr(key, 6) AS key, value FROM meta WHERE key LIKE 'fact:%'")
    return {row["key"]: json.loads(row["value"]) for row in rows}


def status(db: sqlite3.Connection) -> dict[str, Any]:
    """The caller holds a read transaction, or the counts might not add up."""
    known = facts(db)
    trained_step = progress.trained_step(db)
    checkpoint = db.execute("SELECT coalesce(max(step), 0) FROM checkpoints").fetchone()[0]
    return {
        "run_id": get_meta(db, "run_id"),
        "state": get_meta(db, "state"),
        "error": get_meta(db, "error"),
        "step": trained_step,
        "steps": known.get("steps"),
        "weight_version": trained_step,
        "checkpoint_step": checkpoint,
        "ordinals": _counts(db),
        "dropped_by_reason": _dropped(db),
        **_replaced(db),
        "attempts": _attempts(db),
        "capacity": {"total": get_meta(db, "capacity"), "used": used_capacity(db)},
        "stages": _stages(db),
        "workflow": {
            "id": known.get("workflow_id"),
            "nodes_done": known.get("nodes_done", 0),
            "nodes_rerun": known.get("nodes_rerun", 0),
        },
    }


@contextmanager
def _snapshot(paths: RunPaths) -> Iterator[sqlite3.Connection]:
    with closing(open_reader(paths.database)) as db:
        try:
            db.execute("BEGIN")
            yield db
        except sqlite3.Error as error:
            raise StoreError(f"{paths.database} cannot be read: {error}") from error


def _counts(db: sqlite3.Connection) -> dict[str, int]:
    by_state = {row[0]: row[1] for row in db.execute("SELECT state, count(*) FROM ordinals GROUP BY state")}
    fetched = db.execute("SELECT count(*) FROM ordinals").fetchone()[0]
    return {"fetched": fetched, **{state: by_state.get(state, 0) for state in GROUP_STATES}}


def _dropped(db: sqlite3.Connection) -> dict[str, int]:
    rows = db.execute("SELECT reason, count(*) FROM ordinals WHERE state = 'dropped' GROUP BY reason ORDER BY reason")
    return {row[0]: row[1] for row in rows}


def _replaced(db: sqlite3.Connection) -> dict[str, int]:
    """Of the dropped groups: how many others took the place of, and how many left their step short: its rollout has ended, so that
    nothing takes their place any more. Trained groups are those of all slots but these."""
    row = db.execute(
        "SELECT count(replaced_by) AS replaced, coalesce(sum(replaced_by IS NULL AND closed = 1), 0) AS short_late"
        " FROM ordinals JOIN steps USING (step) WHERE state = 'dropped'"
    ).fetchone()
    return dict(row)


def _attempts(db: sqlite3.Connection) -> dict[str, int]:
    """Attempts are numbered 1, 2, ...: those numbered above the committed one were started after its commit."""
    row = db.execute(
        "SELECT coalesce(sum(attempt), 0) AS started, coalesce(sum(lost), 0) AS lost, coalesce(sum(late), 0) AS late,"
        " coalesce(sum(attempt - committed), 0) AS regenerated FROM ordinals"
    ).fetchone()
    return dict(row)


def _stages(db: sqlite3.Connection) -> dict[str, dict[str, Any]]:
    stages = {}
    for row in db.execute("SELECT report, at FROM stages ORDER BY stage"):
        report = json.loads(row["report"])
        stages[report.pop("stage")] = {"in": report.pop("started"), "out": report.pop("finished"), **report, "at": row["at"]}
    return stages
