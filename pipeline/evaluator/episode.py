"""One sample from init to cleanup.

Invariant: the episode ends in a sample, finished or aborted, and cleanup has run (or passed its deadline) by then. Only a
cancellation from outside leaves without a sample, and it, too, waits for cleanup. A CancelledError that the agent raised by
itself is an ordinary fault: nobody has asked this task to stop (`Task.cancelling` is 0).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pipeline.agents.base import Agent, Episode, Trajectory
from pipeline.errors import AgentTimeout, VerifierError, abort_reason, root_cause
from pipeline.evaluator.deadlines import Deadlines
from pipeline.evaluator.spec import PhaseTimeouts, PlacementToken
from pipeline.records import Sample, aborted_sample

T = TypeVar("T")
log = logging.getLogger("evaluator")


@dataclass(slots=True)
class _Progress:
    phase: str = "init"
    agent: Agent | None = None
    trajectory: Trajectory | None = None
    reward: float | None = None
    unverified: VerifierError | None = None


async def play(
    make_agent: Callable[[], Agent],
    episode: Episode,
    timeouts: PhaseTimeouts,
    *,
    token: PlacementToken,
    turns: list[dict[str, Any]],
    deadlines: Deadlines,
) -> Sample:
    """turns: filled by the sample's generator while it runs; what is there when the episode ends is recorded."""
    clock = asyncio.get_running_loop().time
    started = clock()
    progress = _Progress()
    fault: BaseException | None = None
    try:
        await _phases(make_agent, episode, timeouts, progress, deadlines)
    except (Exception, asyncio.CancelledError) as error:
        fault = error
        if not _cancelled():
            log.warning("sample %d.%d aborted in %s", episode.task.ordinal, episode.index, progress.phase, exc_info=error)
    unclean = await _cleanup(progress.agent, episode, timeouts.cleanup_s, deadlines)
    if _cancelled():
        raise asyncio.CancelledError from fault
    sample = _aborted(episode, progress, fault) if fault is not None else _finished(episode, progress)
    if unclean is not None and sample.error is None:
        sample.error, sample.phase = root_cause(unclean), "cleanup"
    sample.node = token.node
    sample.turns = _turns(turns, progress.trajectory, token)
    sample.seconds = clock() - started
    return sample


def _turns(made: list[dict[str, Any]], trajectory: Trajectory | None, token: PlacementToken) -> tuple[dict[str, Any], ...]:
    """What was generated, turn by turn, and beside it what the agent says of the turn."""
    said = trajectory.turns if trajectory is not None else []
    count = max(len(made), len(said))
    both = [{**(made[turn] if turn < len(made) else {}), **(said[turn] if turn < len(said) else {})} for turn in range(count)]
    return tuple({**turn, "node": token.node, "gpu": token.gpu_id} for turn in both)


async def _phases(
    make_agent: Callable[[], Agent], episode: Episode, timeouts: PhaseTimeouts, progress: _Progress, deadlines: Deadlines
) -> None:
    agent = progress.agent = make_agent()
    await _within(deadlines, "init", timeouts.init_s, agent.init(episode))
    progress.phase = "run"
    trajectory = progress.trajectory = await _within(deadlines, "run", timeouts.run_s, agent.run(episode))
    progress.phase = "verify"
    try:
        progress.reward = await _within(deadlines, "verify", timeouts.verify_s, agent.verify(episode, trajectory))
    except VerifierError as error:
        log.warning("sample %d.%d is not scored", episode.task.ordinal, episode.index, exc_info=error)
        progress.unverified = error
    else:
        progress.phase = "done"


async def _within(deadlines: Deadlines, phase: str, seconds: float, work: Awaitable[T]) -> T:
    """Whatever the agent makes of the deadline's cancellation, the fault is AgentTimeout."""
    try:
        with deadlines.within(seconds) as deadline:
            return await work
    except Exception as error:
        if not deadline.expired:
            raise
        if not isinstance(error, TimeoutError):
            log.warning("at the deadline of %s the agent raised", phase, exc_info=error)
    raise AgentTimeout(f"{phase} passed {phase}_timeout_s {seconds:g} s")


async def _cleanup(agent: Agent | None, episode: Episode, seconds: float, deadlines: Deadlines) -> BaseException | None:
    """Runs to its end or deadline in a task of its own; a cancellation that arrives meanwhile stays on record in the caller's."""
    if agent is None or agent.cleanup is None:
        return None
    task = asyncio.create_task(_within(deadlines, "cleanup", seconds, agent.cleanup(episode)), name="cleanup")
    while not task.done():
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            continue  # `_cancelled` stays true, and play raises it once cleanup has ended
    fault = asyncio.CancelledError("cleanup cancelled itself") if task.cancelled() else task.exception()
    if fault is not None:
        log.warning("cleanup of sample %d.%d failed", episode.task.ordinal, episode.index, exc_info=fault)
    return fault


def _cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


def _finished(episode: Episode, progress: _Progress) -> Sample:
    trajectory = progress.trajectory
    if trajectory is None:
        raise AssertionError("a finished episode has a trajectory")
    return Sample(
        sample_id=f"{episode.task.ordinal}.{episode.index}",
        index=episode.index,
        status="ok",
        reward=None if progress.reward is None else float(progress.reward),
        token_ids=np.asarray(trajectory.token_ids, np.int32),
        loss_mask=np.asarray(trajectory.loss_mask, np.uint8),
        logprobs=np.asarray(trajectory.logprobs, np.float32),
        executor=np.asarray(trajectory.executor, np.uint8),
        versions=np.asarray(trajectory.versions, np.int32),
        finish_reason=trajectory.finish_reason,
        text=trajectory.text,
        agent_reason=trajectory.finish_reason,
        error=None if progress.unverified is None else root_cause(progress.unverified),
        phase=progress.phase,
    )


def _aborted(episode: Episode, progress: _Progress, fault: BaseException) -> Sample:
    sample = _abort(episode, fault, progress.phase)
    if progress.trajectory is not None:
        sample.agent_reason, sample.text = progress.trajectory.finish_reason, progress.trajectory.text
    return sample


def cut_off(episode: Episode, fault: BaseException, token: PlacementToken, turns: list[dict[str, Any]], seconds: float) -> Sample:
    """The sample of an episode that came to no end of its own: what is known of it from outside."""
    sample = _abort(episode, fault, "run")
    sample.node, sample.turns, sample.seconds = token.node, _turns(turns, None, token), seconds
    return sample


def _abort(episode: Episode, fault: BaseException, phase: str) -> Sample:
    """The aborted sample of an episode: fully masked, its prompt kept where it can be rendered."""
    try:
        prompt = [int(token) for token in episode.renderer.render(episode.task.messages)]
    except Exception as error:
        log.warning("the prompt of %s cannot be rendered", episode.task.task_id, exc_info=error)
        prompt = []
    ordinal, index = episode.task.ordinal, episode.index
    return aborted_sample(ordinal, index, prompt, abort_reason=abort_reason(fault), error=root_cause(fault), phase=phase)
