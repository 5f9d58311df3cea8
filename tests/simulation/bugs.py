"""Faults planted into the core, one at a time, to see that the simulation finds them. Each is one that somebody might write."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

from pipeline.buffer import contents, ledger, progress, selection
from pipeline.buffer.group_commit import GroupCommit
from pipeline.buffer.ledger import LIVE
from pipeline.buffer.service import BufferService
from pipeline.buffer.store import Job, Store
from pipeline.evaluator.evaluator import LocalPool
from pipeline.evaluator.placement import PlacementPool
from pipeline.teacher.stage import ScoringStage
from pipeline.trainer import checkpoints
from pipeline.trainer.checkpoints import Checkpoint
from pipeline.trainer.service import TrainerService
from tests.simulation import cluster

BUGS: dict[str, Callable[[], list[Any]]] = {}
"""Name -> the patches that plant it."""


def bug(make: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    BUGS[make.__name__] = make
    return make


@contextmanager
def planted(name: str) -> Iterator[None]:
    with ExitStack() as stack:
        for replacement in BUGS[name]():
            stack.enter_context(replacement)
        yield


@bug
def acknowledges_a_commit_before_it_is_durable() -> list[Any]:
    submit = GroupCommit.submit

    async def early(self: GroupCommit, operation: Any, payloads: Any = ()) -> Any:
        if not payloads or payloads[0].name != contents.ROWS:
            return await submit(self, operation, payloads)
        self.check()
        self._pending.append((Job(operation, payloads), self._loop.create_future()))
        self._loop.call_later(0.02, self._flush)
        return True

    return [patch.object(GroupCommit, "submit", early)]


@bug
def marks_before_the_checkpoint_is_there() -> list[Any]:
    save = TrainerService._checkpoint

    async def early(self: TrainerService) -> None:
        if self._saved_step < self._version:
            path = self._paths.checkpoint(self._version)
            await self._mark(Checkpoint(self._version, path, {}, 0))
        await save(self)

    return [patch.object(TrainerService, "_checkpoint", early)]


@bug
def replays_a_step_that_the_checkpoint_covers() -> list[Any]:
    replay = TrainerService._replay

    async def too_much(self: TrainerService, *arguments: Any) -> None:
        self._version = max(0, self._version - 1)
        await replay(self, *arguments)

    return [patch.object(TrainerService, "_replay", too_much)]


@bug
def scores_only_what_it_was_told_of() -> list[Any]:
    """A submit that is lost is work that is lost."""
    sweep, submit = ScoringStage._sweep, ScoringStage.submit

    def told(self: ScoringStage) -> None:
        self._told = True
        submit(self)

    async def when_told(self: ScoringStage) -> float:
        if not getattr(self, "_told", False) and not self._books.held():
            return math.inf
        self._told = False
        return await sweep(self)

    return [patch.object(ScoringStage, "submit", told), patch.object(ScoringStage, "_sweep", when_told)]


@bug
def gives_a_placement_token_back_twice() -> list[Any]:
    def shrink(self: LocalPool, needed: int) -> None:
        surplus = min(len(self._free), self.size - needed)
        if surplus > 0:
            back, self._free = self._free[:surplus], self._free[surplus:]
            self._placement.release(back)  # and again at the end: they are still among the owned

    def release(self: PlacementPool, tokens: Any) -> None:
        for token in tokens:
            self._held[token] -= 1
            self._free.put_back(token)
        self._too_many.clear()
        self._admit()

    return [patch.object(LocalPool, "shrink", shrink), patch.object(PlacementPool, "release", release)]


@bug
def accepts_the_commit_of_a_stale_attempt() -> list[Any]:
    return [patch.object(contents, "_current", lambda led, row, attempt: row["state"] == "running")]


@bug
def forgets_what_it_selected() -> list[Any]:
    select = selection.select

    def unrecorded(led: Any, step: int) -> Any:
        chosen = select(led, step)
        led.db.execute("DELETE FROM selections WHERE step = ?", (step,))
        return chosen

    return [patch.object(selection, "select", unrecorded)]


@bug
def writes_without_looking_at_the_epoch() -> list[Any]:
    def transact(self: Store, jobs: Any) -> Any:
        self._db.execute("BEGIN IMMEDIATE")
        outcomes = [self._apply(job) for job in jobs]
        self._db.execute("COMMIT")
        return outcomes

    return [patch.object(Store, "_transact", transact)]


@bug
def starts_an_attempt_whatever_the_state() -> list[Any]:
    """No compare-and-set: a group that is written is rolled out again."""
    start = ledger.start_attempt

    def anyway(led: Any, ordinal: int, *arguments: Any) -> Any:
        if led.ordinal(ordinal)["state"] in ("written", "ready"):
            led.db.execute("UPDATE ordinals SET state = 'pending' WHERE ordinal = ?", (ordinal,))
        return start(led, ordinal, *arguments)

    return [patch.object(ledger, "start_attempt", anyway)]


@bug
def covers_a_step_too_many() -> list[Any]:
    mark = progress.mark_trained
    return [patch.object(progress, "mark_trained", lambda led, step, path: mark(led, step + 1, path))]


@bug
def keeps_the_room_of_a_dropped_group() -> list[Any]:
    def used(db: Any) -> int:
        states = (*LIVE, "dropped")
        return db.execute(f"SELECT count(*) FROM ordinals WHERE state IN ({', '.join('?' * len(states))})", states).fetchone()[0]

    return [patch.object(ledger, "used_capacity", used)]


@bug
def makes_a_group_ready_again_when_its_column_is_repeated() -> list[Any]:
    mark = contents._mark

    def repeated(led: Any, column: Any) -> str:
        answer = mark(led, column)
        if answer in ("repeated", "late"):
            led.db.execute("UPDATE ordinals SET state = 'ready' WHERE ordinal = ?", (column.ordinal,))
        return answer

    return [patch.object(contents, "_mark", repeated)]


@bug
def trains_a_step_again_when_it_is_asked_again() -> list[Any]:
    train = TrainerService._train

    async def again(self: TrainerService, step: int) -> Any:
        if self._started and 0 < step == self._version:
            self._version -= 1
        return await train(self, step)

    return [patch.object(TrainerService, "_train", again)]


@bug
def keeps_one_checkpoint_only() -> list[Any]:
    prune = checkpoints.prune
    return [
        patch.object(checkpoints, "LEAST_KEPT", 1),
        patch.object(checkpoints, "prune", lambda paths, keep: prune(paths, 1)),
    ]


@bug
def evicts_what_only_the_newest_checkpoint_covers() -> list[Any]:
    def newest(db: Any) -> int:
        return db.execute("SELECT coalesce(max(step), 0) FROM checkpoints").fetchone()[0]

    return [patch.object(progress, "safe_step", newest)]


@bug
def replays_in_another_order() -> list[Any]:
    select = selection.select

    def reversed_(led: Any, step: int) -> Any:
        known = led.one("SELECT 1 FROM selections WHERE step = ?", step)
        chosen = select(led, step)
        return replace(chosen, ordinals=chosen.ordinals[::-1]) if known else chosen

    return [patch.object(selection, "select", reversed_)]


@bug
def replaces_a_dropped_group_twice() -> list[Any]:
    once = ledger.replace

    def again(led: Any, ordinal: int, limit: int | None) -> Any:
        led.db.execute("UPDATE ordinals SET replaced_by = NULL WHERE ordinal = ?", (ordinal,))
        return once(led, ordinal, limit)

    return [patch.object(ledger, "replace", again)]


@bug
def counts_on_a_checkpoint_that_was_found_torn() -> list[Any]:
    async def not_told(self: BufferService, checkpoint_step: int) -> None:
        await asyncio.sleep(0)

    return [patch.object(BufferService, "forget_checkpoint", not_told)]


@bug
def lets_the_trainer_of_an_old_run_epoch_write() -> list[Any]:
    return [patch.object(cluster, "run_fence", lambda *who: lambda: None)]


@bug
def lets_the_buffer_of_an_old_cluster_start_again() -> list[Any]:
    open_ = BufferService.open

    async def any_epoch(self: BufferService, new_run_epoch: bool = False, run_epoch: int | None = None) -> None:
        await open_(self, new_run_epoch)

    return [patch.object(BufferService, "open", any_epoch)]


@bug
def publishes_before_the_step_is_recorded() -> list[Any]:
    settle = TrainerService._settle

    async def early(self: TrainerService) -> None:
        if self._updated is not None:
            await self._publish()
        await settle(self)

    return [patch.object(TrainerService, "_settle", early)]


@bug
def throws_kept_samples_away_with_their_attempt() -> list[Any]:
    lose = ledger.lose

    def and_forget(led: Any, row: Any, reason: str) -> None:
        lose(led, row, reason)
        led.remove_payloads(row["ordinal"])

    return [patch.object(ledger, "lose", and_forget)]


@bug
def begins_a_new_window_behind_an_open_rollout() -> list[Any]:
    return [patch.object(progress, "_first_open", lambda db: progress.trained_step(db) + 1)]
