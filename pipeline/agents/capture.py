"""What a program that speaks OpenAI's interface asks and is answered, as tokens.

Invariant: the trajectory is what the model saw and made, token by token, up to the last answer. A call whose prompt does not extend
it has rewritten its history: the answers that the history leaves out are dropped, and counted in the turn of that call.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from pipeline.agents.base import Episode, Trajectory
from pipeline.agents.commands import Repeats
from pipeline.errors import RequestRefused
from pipeline.service.completing import Made


@dataclass(frozen=True, slots=True)
class Said:
    """One answer."""

    prompt: list[int]
    made: Made
    weight_version: int


class Capture:
    """Of one sample. `ended` is set once nothing more will be answered, and `reason` says what ended it; `fault` is what a call
    raised, which is the sample's own."""

    def __init__(self, episode: Episode, trajectory: Trajectory) -> None:
        self._episode, self._renderer = episode, episode.renderer
        self.trajectory = trajectory
        self.ended = asyncio.Event()
        self.reason = ""
        self.fault: Exception | None = None
        self._answers: list[tuple[str, np.ndarray]] = []
        """Every one that was made, in order: its text, and its tokens."""
        self._repeats = Repeats()
        self._one_at_a_time = asyncio.Lock()

    async def answer(self, messages: list[tuple[str, str]], max_tokens: int | None) -> Said:
        """The sampling is the task's own; max_tokens can only lower its bound. Raises RequestRefused once the episode has ended."""
        async with self._one_at_a_time:
            try:
                return await self._answer(messages, max_tokens)
            except RequestRefused:
                raise
            except Exception as error:
                self.fault = error
                self.end("fault")
                raise

    def end(self, reason: str) -> None:
        if not self.ended.is_set():
            self.reason = reason
            self.ended.set()

    def check_open(self) -> None:
        if self.ended.is_set():
            raise RequestRefused(403, self.reason, "the episode has ended")

    async def _answer(self, messages: list[tuple[str, str]], max_tokens: int | None) -> Said:
        self.check_open()
        stopping, turn = self._episode.task.stopping, len(self.trajectory.turns)
        prompt = self._renderer.render_history(self._as_sampled(messages))
        room = self._episode.task.sampling.max_tokens
        room = room if max_tokens is None else min(room, max_tokens)
        if stopping.max_context is not None:
            room = min(room, stopping.max_context - len(prompt))
        if turn >= stopping.max_turns or room < 1:
            self.end("max_turns" if turn >= stopping.max_turns else "context_overflow")
            self.check_open()
        dropped = self.trajectory.go_back_to(prompt)
        completion, executor = await self._episode.act(prompt, turn=turn, max_tokens=room)
        self.trajectory.append_context(prompt[len(self.trajectory.token_ids) :])
        self.trajectory.append_completion(completion, executor)
        self.trajectory.turns.append({"action": None} | ({"dropped_tokens": dropped} if dropped else {}))
        text = self._renderer.decode(completion.token_ids)
        self._answers.append((text, completion.token_ids))
        if self._repeats.add(text) >= stopping.max_repeats:
            self.end("repeated_action_loop")
        made = Made(text, completion.token_ids.tolist(), completion.finish_reason, None, None)
        return Said(prompt.tolist(), made, completion.weight_version)

    def _as_sampled(self, messages: list[tuple[str, str]]) -> list[tuple[str, str | np.ndarray]]:
        """With the tokens of those answers that are in the history as they were given; any other text stays a text."""
        found: list[tuple[str, str | np.ndarray]] = []
        place = 0
        for role, text in messages:
            later = [number for number in range(place, len(self._answers)) if self._answers[number][0] == text]
            if role == "assistant" and later:
                place = later[0] + 1
                found.append((role, self._answers[later[0]][1]))
            else:
                found.append((role, text))
        return found
