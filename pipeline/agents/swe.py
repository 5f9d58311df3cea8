"""A software-engineering agent: the model says bash commands, one a turn, and a sandbox runs them until it submits.

Invariant: tokens are only ever appended, and what the model said stays as it was sampled; the reward is that of the patch alone,
judged by the task's tests in a sandbox that the model never touched.
"""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from pipeline.agents.base import Episode, Trajectory
from pipeline.agents.commands import NO_COMMAND, SUBMIT, Repeats, command_in, observation
from pipeline.agents.repair import GIT_S, patch_of, remember, solves
from pipeline.errors import PatchError, SandboxError
from pipeline.fetcher.swe import Repair, repair_of
from pipeline.sandboxes.base import Ran, Sandbox

TIME_SHARE = 0.9
"""Of `max_seconds`: then the agent ends by itself, and what it has done is judged."""
PATCH_SHARE = 0.08
"""Of `max_seconds`: for the patch to be taken."""


class SweAgent:
    def __init__(self) -> None:
        self._repair: Repair | None = None
        self._sandbox: Sandbox | None = None

    async def init(self, episode: Episode) -> None:
        self._repair = repair_of(episode.task)
        self._sandbox = await episode.open_sandbox("run", self._repair.contents)
        await remember(self._sandbox)

    async def run(self, episode: Episode) -> Trajectory:
        trajectory = Trajectory()
        trajectory.finish_reason = await self._turns(episode, trajectory)
        last: dict[str, Any] = trajectory.turns[-1] if trajectory.turns else {}
        limit_s = episode.task.stopping.max_seconds
        try:
            trajectory.text = last["patch"] = await patch_of(self._opened(), GIT_S if limit_s is None else PATCH_SHARE * limit_s)
        except PatchError as error:  # it is what was done since `remember`, and worth as much as no patch
            last |= {"patch": None, "fault": str(error)}
        return trajectory

    async def verify(self, episode: Episode, trajectory: Trajectory) -> float | None:
        assert self._repair is not None
        return float(await solves(episode.open_sandbox, self._repair, trajectory.text, episode.sandbox.command_timeout_s))

    async def cleanup(self, episode: Episode) -> None:
        if self._sandbox is not None:
            await self._sandbox.close()

    async def _turns(self, episode: Episode, trajectory: Trajectory) -> str:
        """Plays until something ends it; returns what."""
        trajectory.append_context(episode.renderer.render(episode.task.messages))
        stopping, repeats = episode.task.stopping, Repeats()
        clock = asyncio.get_running_loop().time
        ends_at = None if stopping.max_seconds is None else clock() + TIME_SHARE * stopping.max_seconds
        for turn in range(stopping.max_turns):
            room = episode.task.sampling.max_tokens
            if stopping.max_context is not None:
                room = min(room, stopping.max_context - len(trajectory.token_ids))
            if room < 1:
                return "context_overflow"
            if ends_at is not None and clock() >= ends_at:
                return "agent_timeout"
            prompt = np.asarray(trajectory.token_ids, np.int32)
            completion, executor = await episode.act(prompt, turn=turn, max_tokens=room)
            trajectory.append_completion(completion, executor)
            command = command_in(episode.renderer.decode(completion.token_ids))
            trajectory.turns.append({"action": command})
            if command == SUBMIT:
                return "finish"
            if repeats.add(command) >= stopping.max_repeats:
                return "repeated_action_loop"
            left_s = None if ends_at is None else ends_at - clock()
            reply = NO_COMMAND
            if command is not None:
                reply = observation(*await self._execute(episode, command, left_s, trajectory.turns[-1]))
            tokens = episode.renderer.render_reply(reply, completion.token_ids)
            if stopping.max_context is not None and len(trajectory.token_ids) + len(tokens) >= stopping.max_context:
                return "context_overflow"
            if turn + 1 < stopping.max_turns:
                trajectory.append_context(tokens)
        return "max_turns"

    async def _execute(self, episode: Episode, command: str, left_s: float | None, record: dict[str, Any]) -> tuple[Ran, float]:
        """What came of it, and the seconds that it was given."""
        bounds = episode.sandbox
        timeout_s = bounds.command_timeout_s if left_s is None else max(0.1, min(bounds.command_timeout_s, left_s))
        ran = await self._opened().run(command, timeout_s, output_bytes=bounds.output_bytes)
        record |= {"exit_code": ran.exit_code, "output": ran.output, "left_out": ran.left_out, "command_s": round(ran.seconds, 6)}
        return ran, timeout_s

    def _opened(self) -> Sandbox:
        if self._sandbox is None:
            raise SandboxError("the sandbox was not opened: run before init")
        return self._sandbox
