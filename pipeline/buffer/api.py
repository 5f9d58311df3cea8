"""What the other stages may ask of the replay buffer. Every mutating call takes an id and can be repeated.

Invariant: every ordinal that `assign` ever returned is at every moment in exactly one state of `records.GROUP_STATES`.
The buffer knows fields, not stages: a group is ready when its task's `needs` are a subset of its produced fields.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pipeline.pickling import by_fields
from pipeline.records import Column, Group, Sample

if TYPE_CHECKING:
    from pipeline.buffer.contents import EncodedGroup

NO_RESULTS = sys.maxsize
"""For `steps`: only where the run stands. Results of all steps are megabytes in the end."""
Outcome = Literal["lost", "infra", "data"]
"""How an attempt ended without a commit. `lost`: its worker, cluster or driver died; not a retry."""


@dataclass(frozen=True, slots=True)
class Assignment:
    step: int
    slot: int
    ordinal: int
    state: str
    """Current state of the ordinal: a repeated `assign` shows what is already there."""


@by_fields
@dataclass(frozen=True, slots=True)
class Attempt:
    """Permission to roll out an ordinal once; only the newest one may commit."""

    ordinal: int
    number: int
    """1, 2, ... by start."""
    failures: int
    """Attempts that failed (not lost) before: input of `records.sample_seed`."""
    epoch: int


@dataclass(frozen=True, slots=True)
class AttemptEnd:
    """What follows from a failed attempt."""

    again: bool
    """Start another attempt after `wait_s`."""
    wait_s: float
    dropped: str | None
    """The reason under which the ordinal was dropped, when the budget is spent."""


@dataclass(frozen=True, slots=True)
class BacklogItem:
    ordinal: int
    step: int
    dataset: str
    teacher: str | None
    rows: int
    tokens: int
    written_at: float
    """Seconds since the epoch (the buffer's own clock)."""
    awaited: bool
    """Its step is being trained, or was: it is late already, and does not wait for company."""
    stale: bool
    """No training step to come may take it (`windowed`): to be dropped before it costs anything."""


@dataclass(frozen=True, slots=True)
class Selection:
    """What training step `step` trains on, in this order. Repeating the call returns the same."""

    step: int
    ordinals: tuple[int, ...]
    dropped: dict[str, int] = field(default_factory=dict)
    """Reason -> groups of this step that were dropped."""
    ended: bool = False
    """Nothing is taken because the data had ended: the step was assigned no group at all."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """What a stage says of itself, about once a second."""

    stage: str
    actor: str
    pid: int
    node: str
    started: int
    """Items taken in."""
    finished: int
    backlog: int
    oldest_s: float
    """Age of the oldest item in the stage."""
    busy_s: float = 0.0
    """Seconds of work since the process started: its rate of change is the occupancy."""
    detail: dict[str, Any] = field(default_factory=dict)


class BufferClient(Protocol):
    """The asynchronous face: `BufferService` in one process, a proxy of the actor across processes."""

    async def assign(self, step: int, count: int, limit: int | None) -> list[Assignment]:
        """Write `count` slots for a step, or return those that are there. Ordinals are 0, 1, 2, ... in order of assignment.

        limit: ordinals there are in all (None: no end). Fewer slots than `count`, or none, mean the end of the data.
        Steps are assigned one after the other. Raises CapacityFull, and writes nothing, when there is no room for all.
        """
        ...

    async def wait_capacity(self, count: int, wait_s: float) -> bool:
        """True when `assign` of `count` groups has room; False after `wait_s` seconds. Raises CapacityFull if it never can."""
        ...

    async def replace(self, ordinal: int, limit: int | None) -> Assignment | None:
        """A new ordinal for a dropped one's slot (the same one when repeated).

        None: the step's rollout is closed, or the data ended.
        """
        ...

    async def start_attempt(self, ordinal: int, weight_version: int, worker: str) -> Attempt:
        """Raises AttemptRefused once the ordinal is written or later. An attempt that still runs becomes `lost`;
        20 lost ones drop the ordinal as `poison` (AttemptRefused says so)."""
        ...

    async def end_attempt(self, attempt: Attempt, outcome: Outcome, reason: str) -> AttemptEnd: ...

    async def commit(self, attempt: Attempt, group: Group | EncodedGroup) -> bool:
        """Durable when it returns. True: written now; False: this attempt had been committed before. Raises LateCommit.

        A caller in another process hands in what `contents.encode` made of the group.
        """
        ...

    async def store_sample(self, attempt: Attempt, sample: Sample) -> None:
        """Keep a finished sample of an unfinished group (`buffer.durable_samples`). Raises LateCommit when the attempt is over."""
        ...

    async def stored_samples(self, ordinal: int) -> list[Sample]:
        """Kept samples of an unfinished group, by index, whichever attempt made them; a commit or a drop removes them."""
        ...

    async def backlog(self, field_name: str, limit: int) -> list[BacklogItem]:
        """Written groups that need the field and lack it, by (step, age)."""
        ...

    async def read(self, ordinals: list[int], columns: bool) -> list[Group]:
        """Rows of groups whose rows are still stored, in the order asked; unknown or dropped ordinals are left out."""
        ...

    async def mark_produced(self, columns: list[Column]) -> dict[int, str]:
        """ordinal -> `produced`, `repeated`, `late` (dropped or past ready) or `unknown`. Durable when it returns."""
        ...

    async def discard(self, ordinal: int, reason: str) -> bool:
        """Drop an ordinal that is not yet consumed: rows cleared, capacity returned. False when it was dropped before."""
        ...

    async def close_rollout(self, step: int) -> None:
        """rollout[step] has ended: a group dropped from now on is not replaced (`short_late`)."""
        ...

    async def wait_scored(self, step: int, wait_s: float) -> bool:
        """True when no group of the step is pending, running or written; False after `wait_s` seconds."""
        ...

    async def wait_selection(self, step: int, wait_s: float) -> Selection | None:
        """`select(step)` as soon as it can be; None when that is not within `wait_s` seconds."""
        ...

    async def select(self, step: int) -> Selection:
        """Take the groups of a training step (ready -> consumed) in one transaction; what was taken is recorded for ever.

        Steps are selected one after the other. Raises NotSelectable while groups of it are still to come.
        """
        ...

    async def record_step(self, step: int, metrics: dict[str, Any]) -> None:
        """The result of train(step); repeating it with the same step changes nothing."""
        ...

    async def mark_trained(self, checkpoint_step: int, path: str) -> None:
        """A complete checkpoint covers all consumed steps <= checkpoint_step: consumed -> trained."""
        ...

    async def forget_checkpoint(self, checkpoint_step: int) -> None:
        """That checkpoint was found torn: retention no longer counts on it. Its groups stay trained."""
        ...

    async def steps(self, after: int = 0) -> dict[str, Any]:
        """`{trained_step, first_open, checkpoint_step, checkpoint_path, results: {step: metrics}, selections: {step: [ordinals]}}`
        where trained_step is the newest recorded step, first_open the first that is not trained or whose rollout has not ended
        (a workflow that has lost its storage begins there), results holds the steps after `after` (who asks at every step asks
        for the new ones only), and selections those after the last but one checkpoint."""
        ...

    async def status(self) -> dict[str, Any]:
        """What `rollout status RUN --json` says, from one read transaction."""
        ...

    async def claim(self, role: str) -> int:
        """The role is the caller's from now on: a number above all earlier claims of it. See `reader.run_fence`."""
        ...

    async def report_stage(self, report: StageReport) -> None: ...
    async def set_run(self, state: str, error: str | None = None, **facts: Any) -> None:
        """Run state and facts (`workflow_id`, `window_first`, ...) that resume and status read."""
        ...
