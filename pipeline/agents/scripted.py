"""An agent that does what its task's script says: delays, token streams, and every fault, by phase, ordinal, sample and attempt.

The script is `task.metadata["script"]`: the fields of `Script`, and optionally `by_ordinal` and `by_index` with fields that
replace them for one ordinal or one sample. Without a script it answers at once and is solved.
"""

from __future__ import annotations

import asyncio
import builtins
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from pipeline import errors
from pipeline.agents.base import Episode, Trajectory
from pipeline.engines.base import Completion
from pipeline.records import Task


@dataclass(frozen=True, slots=True)
class Script:
    init_s: float = 0.0
    run_s: float = 0.0
    """Seconds a turn."""
    verify_s: float = 0.0
    cleanup_s: float = 0.0
    turns: int = 1
    """As far as the task's stopping allows: `max_turns`, `max_context`, and `max_repeats` of the same action in a row."""
    repeats: bool = False
    """Every turn is the same action as the one before."""
    tokens: int = 4
    """Tokens a turn; 0 is an empty response."""
    engine: bool = False
    """Ask the engine for the tokens of each turn instead of making them up."""
    reward: float | None = 1.0
    finish_reason: str = "finish"
    fail_phase: str | None = None
    """`init`, `run`, `verify` or `cleanup`."""
    fail: str = "DataError"
    """What happens in `fail_phase`: the name of an exception of pipeline.errors or of Python, `hang`, or `cancel`
    (CancelledError raised by the agent itself)."""
    fail_attempts: int | None = None
    """Only while fewer attempts than this have failed; None: always."""


FIELDS = frozenset(entry.name for entry in fields(Script))


def script_of(task: Task, index: int) -> Script:
    """Raises DataError for an unknown field."""
    given: dict[str, Any] = dict(task.metadata.get("script", {}))
    by_ordinal, by_index = given.pop("by_ordinal", {}), given.pop("by_index", {})
    given |= _entry(by_ordinal, task.ordinal)
    given |= _entry(by_index, index)
    unknown = given.keys() - FIELDS
    if unknown:
        raise errors.DataError(f"{task.task_id}: metadata.script has no field {sorted(unknown)[0]!r}")
    return Script(**given)


class Scripted:
    def __init__(self) -> None:
        self._script = Script()

    async def init(self, episode: Episode) -> None:
        self._script = script_of(episode.task, episode.index)
        await self._play("init", self._script.init_s, episode)

    async def run(self, episode: Episode) -> Trajectory:
        script = self._script
        trajectory = Trajectory(finish_reason=script.finish_reason)
        trajectory.append_context(episode.renderer.render(episode.task.messages))
        for turn in range(script.turns):
            if reason := self._stopped(episode, trajectory, turn):
                trajectory.finish_reason = reason
                break
            await self._play("run", script.run_s, episode)
            if turn:
                trajectory.append_context(np.asarray([turn], np.int32))
            trajectory.append_completion(*await self._turn(episode, trajectory, turn))
        return trajectory

    def _stopped(self, episode: Episode, trajectory: Trajectory, turn: int) -> str | None:
        """The finish reason if stopping ends the episode before this turn."""
        stopping = episode.task.stopping
        if self._script.repeats and turn >= stopping.max_repeats:
            return "repeated_action_loop"
        if turn >= stopping.max_turns:
            return "max_turns"
        room = self._script.tokens if stopping.max_context is None else stopping.max_context - len(trajectory.token_ids)
        return "context_overflow" if room < self._script.tokens else None

    async def verify(self, episode: Episode, trajectory: Trajectory) -> float | None:
        await self._play("verify", self._script.verify_s, episode)
        return self._script.reward

    async def cleanup(self, episode: Episode) -> None:
        await self._play("cleanup", self._script.cleanup_s, episode)

    async def _turn(self, episode: Episode, trajectory: Trajectory, turn: int) -> tuple[Completion, int]:
        if self._script.engine:
            prompt = np.asarray(trajectory.token_ids, np.int32)
            return await episode.act(prompt, turn=turn, max_tokens=max(1, self._script.tokens))
        count = self._script.tokens
        version = episode.context.exact_version
        completion = Completion(
            request_id=f"{episode.task.ordinal}.{episode.index}.{turn}",
            token_ids=np.arange(1, count + 1, dtype=np.int32),
            logprobs=np.full(count, -1.0, np.float32),
            finish_reason="stop",
            weight_version=episode.context.min_version if version is None else version,
        )
        return completion, episode.executor_of(turn)

    async def _play(self, phase: str, seconds: float, episode: Episode) -> None:
        if seconds:
            await asyncio.sleep(seconds)
        script = self._script
        if script.fail_phase != phase or (script.fail_attempts is not None and episode.attempt >= script.fail_attempts):
            return
        if script.fail == "hang":
            await asyncio.Event().wait()
        raise _fault(script.fail, f"scripted fault in {phase} of {episode.task.ordinal}.{episode.index}")


def _entry(table: Mapping[Any, Any], number: int) -> dict[str, Any]:
    """JSON turns the keys of a mapping into strings."""
    return table.get(number, table.get(str(number), {}))


def _fault(name: str, message: str) -> BaseException:
    if name == "cancel":
        return asyncio.CancelledError(message)
    kind = getattr(errors, name, None) or getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        return kind(message)
    return errors.DataError(f"metadata.script.fail {name!r} is no exception of pipeline.errors or of Python, `hang` or `cancel`")
