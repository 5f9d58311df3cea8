"""What others saw of a run, kept outside the ledger, and the promises that are checked against it.

Invariant: nothing here is read from the ledger; it is what callers were told, what workers played and what the learner was given.
"""

from __future__ import annotations

import itertools
import sqlite3
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

from pipeline.buffer import codec
from pipeline.buffer.api import Attempt
from pipeline.paths import RunPaths
from pipeline.records import Group, Task
from pipeline.trainer import checkpoints
from pipeline.trainer.checkpoints import Checkpoint
from tests.simulation.scenario import CPU_A_NODE, Scenario

LIVE = ("pending", "running", "written", "ready")
MUTATING = frozenset(
    ("assign", "replace", "discard", "close_rollout", "start_attempt", "end_attempt", "commit", "store_sample", "mark_produced",
     "select", "record_step", "mark_trained", "forget_checkpoint", "claim", "set_run")
)  # fmt: skip


class Violation(AssertionError):
    """A promise was broken; the message says which."""


class Witness:
    """tell: hears of a violation at once, also where the core would turn it into a failure of its own."""

    def __init__(self, scenario: Scenario, paths: RunPaths, tell: Callable[[Violation], None]) -> None:
        self._tell = tell
        self._scenario = scenario
        self._paths = paths
        self._events = itertools.count(1)
        self.epoch = 0
        """Run epoch of the newest driver."""
        self.torn: set[int] = set()
        """Checkpoints that the simulation damaged."""
        self.commits: dict[int, tuple[int, str, int]] = {}
        self.attempts: dict[int, dict[int, int]] = defaultdict(dict)
        self.slots: dict[int, dict[int, int]] = {}
        self.produced: set[int] = set()
        self.selected: dict[int, tuple[int, ...]] = {}
        self.stored: dict[tuple[int, int], int] = {}
        self.learned: dict[int, tuple[list[int], str]] = {}
        self.saved: set[int] = set()
        self.recorded = 0
        self._playing: dict[tuple[str, str], int] = defaultdict(int)
        """(worker, pool): incarnations. A pool that restarts does not know what its predecessor left on the workers."""
        self.regenerated = 0

    def _violation(self, text: str) -> Violation:
        broken = Violation(text)
        self._tell(broken)
        return broken

    def event(self) -> int:
        return next(self._events)

    # what callers of the ledger were told

    def heard(self, method: str, args: Sequence[Any], result: Any, issued: int) -> None:
        """A caller that lives has the answer to what it asked at event `issued`."""
        check = getattr(self, f"_{method}", None)
        if check is not None:
            check(*args, result=result, issued=issued)

    def _assign(self, step: int, count: int, limit: int | None, *, result: Any, issued: int) -> None:
        slots = {slot.slot: slot.ordinal for slot in result}
        before = self.slots.setdefault(step, slots)
        if slots.keys() != before.keys():
            raise self._violation(f"step {step} had slots {sorted(before)}, now {sorted(slots)}")
        taken = {ordinal for other, held in self.slots.items() if other != step for ordinal in held.values()}
        if taken & set(slots.values()):
            raise self._violation(f"step {step} was given ordinals {sorted(slots.values())} of other steps")
        if not self._scenario.bad | self._scenario.filtered and slots != before:
            raise self._violation(f"step {step} held {before}, now {slots}")

    def _start_attempt(self, ordinal: int, version: int, worker: str, *, result: Attempt, issued: int) -> None:
        if ordinal in self.commits and self.commits[ordinal][2] < issued:
            self.regenerated += 1
            raise self._violation(f"ordinal {ordinal} was committed, and attempt {result.number} was started after that")
        if result.number in self.attempts[ordinal]:
            raise self._violation(f"attempt {result.number} of ordinal {ordinal} was given to two callers")
        self.attempts[ordinal][result.number] = self.event()

    def _commit(self, attempt: Attempt, group: Group, *, result: bool, issued: int) -> None:
        ordinal, number = attempt.ordinal, attempt.number
        newer = [other for other, at in self.attempts[ordinal].items() if other > number and at < issued]
        if newer:
            raise self._violation(f"attempt {number} of ordinal {ordinal} was committed while attempt {max(newer)} was current")
        known = self.commits.get(ordinal)
        if known is not None and known[0] != number:
            raise self._violation(f"attempts {known[0]} and {number} of ordinal {ordinal} were both told that they are committed")
        if known is None:
            self.commits[ordinal] = (number, codec.digest(codec.encode_group(group)), self.event())

    def _mark_produced(self, columns: Any, *, result: dict[int, str], issued: int) -> None:
        self.produced.update(ordinal for ordinal, mark in result.items() if mark in ("produced", "repeated"))

    def _store_sample(self, attempt: Attempt, sample: Any, *, result: None, issued: int) -> None:
        self.stored.setdefault((attempt.ordinal, sample.index), self.event())

    def _select(self, step: int, *, result: Any, issued: int) -> None:
        before = self.selected.setdefault(step, result.ordinals)
        if before != result.ordinals:
            raise self._violation(f"step {step} was told to take {before}, now {result.ordinals}")

    def _wait_selection(self, step: int, wait_s: float, *, result: Any, issued: int) -> None:
        if result is not None:
            self._select(step, result=result, issued=issued)

    def _record_step(self, step: int, metrics: Any, *, result: None, issued: int) -> None:
        self.recorded = max(self.recorded, step)

    def fenced(self, method: str, result: Any, newest: bool) -> None:
        selected = method == "wait_selection" and result is not None
        if (method in MUTATING or selected) and not newest:
            raise self._violation(f"an old writer of the ledger carried out {method} after a newer one had opened it")

    # what workers and the trainer did

    @contextmanager
    def played(self, worker: str, pool: str, task: Task, indices: Sequence[int], attempt: Attempt) -> Iterator[None]:
        """Around the playing of samples by a worker that lives."""
        place = (worker, pool)
        started = self.attempts[task.ordinal].get(attempt.number)
        for index in indices:
            kept = self.stored.get((task.ordinal, index))
            if self._scenario.durable and kept is not None and started is not None and kept < started:
                self.regenerated += 1
                raise self._violation(f"sample {task.ordinal}.{index} was kept, and attempt {attempt.number} played it again")
        self._playing[place] += len(indices)
        if self._playing[place] > CPU_A_NODE:
            raise self._violation(f"{self._playing[place]} samples of {pool} play on {worker}, whose node holds {CPU_A_NODE}")
        try:
            yield
        finally:
            self._playing[place] -= len(indices)

    def learnt(self, step: int, ordinals: list[int], weights: str, trained: list[int], steps: list[int]) -> None:
        if steps != list(range(1, step + 1)):
            raise self._violation(f"the parameters went through steps {steps} and are said to be version {step}")
        if len(set(trained)) != len(trained):
            raise self._violation(f"trained twice at step {step}: {sorted(o for o in set(trained) if trained.count(o) > 1)}")
        before = self.learned.setdefault(step, (ordinals, weights))
        if before != (ordinals, weights):
            raise self._violation(f"step {step} was {before} and is now {(ordinals, weights)}: a replay is not bit-equal")

    def wrote(self, epoch: int, what: str) -> None:
        """The trainer of a run epoch put something into the run folder."""
        if epoch != self.epoch:
            raise self._violation(f"a trainer of run epoch {epoch} wrote {what} in run epoch {self.epoch}")

    def published(self, epoch: int, version: int) -> None:
        self.wrote(epoch, f"version {version}")
        with closing(self._ledger()) as db:
            recorded = db.execute("SELECT coalesce(max(step), 0) FROM results").fetchone()[0]
        if version > recorded:
            raise self._violation(f"version {version} is published, and step {recorded} is the newest that is recorded")

    def has_saved(self, saved: Checkpoint) -> None:
        self.saved.add(saved.step)
        self.torn.discard(saved.step)

    # what the ledger says, against all that

    def check(self) -> None:
        """At any moment. Raises Violation."""
        with closing(self._ledger()) as db:
            rows = {row["ordinal"]: row for row in db.execute("SELECT * FROM ordinals ORDER BY ordinal")}
            self._check_counts(rows, db)
            self._check_commits(rows)
            self._check_steps(rows, db)
            self._check_retention(rows, db)

    def _ledger(self) -> sqlite3.Connection:
        db = sqlite3.connect(f"file:{self._paths.database}?mode=ro", uri=True)
        db.row_factory = sqlite3.Row
        return db

    def _check_counts(self, rows: dict[int, sqlite3.Row], db: sqlite3.Connection) -> None:
        if list(rows) != list(range(len(rows))):
            raise self._violation(f"ordinals {list(rows)} are not 0, 1, 2, ...")
        live = sum(row["state"] in LIVE for row in rows.values())
        if live > self._scenario.config.capacity:
            raise self._violation(f"{live} groups are held, the capacity is {self._scenario.config.capacity}")
        occupied = [(row["step"], row["slot"]) for row in rows.values() if row["state"] != "dropped"]
        if len(set(occupied)) != len(occupied):
            raise self._violation(f"a slot has two groups: {occupied}")
        for row in db.execute("SELECT ordinal, count(*) AS running FROM attempts WHERE state = 'running' GROUP BY ordinal"):
            if row["running"] > 1 or rows[row["ordinal"]]["state"] != "running":
                raise self._violation(
                    f"ordinal {row['ordinal']}: {row['running']} attempts run, its state is {rows[row['ordinal']]['state']}"
                )

    def _check_commits(self, rows: dict[int, sqlite3.Row]) -> None:
        for ordinal, (number, sha256, _) in self.commits.items():
            row = rows.get(ordinal)
            if row is None or row["committed"] != number or row["state"] in ("pending", "running"):
                raise self._violation(f"attempt {number} of ordinal {ordinal} was acknowledged and is lost: {_say(row)}")
            if row["rows_sha256"] != sha256:
                raise self._violation(f"ordinal {ordinal} holds other rows than were acknowledged")
        for row in rows.values():
            if row["committed"] is not None and row["attempt"] != row["committed"]:
                raise self._violation(f"ordinal {row['ordinal']} was rolled out again after its commit: {_say(row)}")
            if row["state"] == "dropped" and row["reason"] not in ("data", "stale", "zero_advantage"):
                raise self._violation(
                    f"ordinal {row['ordinal']} was dropped for {row['reason']}, which nothing in its data explains"
                )

    def _check_steps(self, rows: dict[int, sqlite3.Row], db: sqlite3.Connection) -> None:
        for step, (ordinals, _) in self.learned.items():
            for ordinal in ordinals:
                if rows[ordinal]["state"] not in ("consumed", "trained") or rows[ordinal]["consumed_step"] != step:
                    raise self._violation(f"step {step} was trained on ordinal {ordinal}: {_say(rows[ordinal])}")
        selections = {row["step"] for row in db.execute("SELECT step FROM selections")}
        if missing := sorted(self.selected.keys() - selections):
            raise self._violation(f"selections {missing} were acknowledged and are lost")
        recorded = db.execute("SELECT coalesce(max(step), 0) FROM results").fetchone()[0]
        if recorded < self.recorded:
            raise self._violation(f"the result of step {self.recorded} was acknowledged and is lost")
        fields = {row["ordinal"] for row in db.execute("SELECT ordinal FROM fields")}
        for ordinal in self.produced - fields:
            if rows[ordinal]["state"] != "dropped":
                raise self._violation(f"the column of ordinal {ordinal} was acknowledged and is lost: {_say(rows[ordinal])}")

    def _check_retention(self, rows: dict[int, sqlite3.Row], db: sqlite3.Connection) -> None:
        marked = [row["step"] for row in db.execute("SELECT step FROM checkpoints ORDER BY step DESC")]
        if marked and marked[0] not in self.torn and not (self._paths.checkpoint(marked[0]) / checkpoints.MANIFEST).exists():
            raise self._violation(f"checkpoint {marked[0]} is marked and is not there")
        newest = max(self.saved, default=0)
        for row in rows.values():
            if row["state"] == "trained" and row["consumed_step"] > newest:
                raise self._violation(f"no checkpoint covers ordinal {row['ordinal']}: {_say(row)}")
        there = sorted((path.name for path in self._paths.checkpoints.glob("step_*")), reverse=True)
        safe = int(there[1][5:]) if len(there) > 1 else 0  # a torn one was whole when retention last looked
        kept = {row["ordinal"] for row in db.execute("SELECT ordinal FROM payloads WHERE name = 'rows'")}
        for ordinal, row in rows.items():
            needed = row["state"] in ("written", "ready", "consumed") or (row["state"] == "trained" and row["consumed_step"] > safe)
            if needed and ordinal not in kept:
                raise self._violation(f"the rows of ordinal {ordinal} are gone; checkpoints are {there}: {_say(row)}")


def _say(row: sqlite3.Row | None) -> str:
    if row is None:
        return "it is not in the ledger"
    return ", ".join(f"{key} {row[key]}" for key in ("state", "reason", "attempt", "committed", "consumed_step"))
