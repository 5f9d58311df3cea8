"""One question, one answer: render, generate once, decode, verify."""

from __future__ import annotations

from collections.abc import Callable

from pipeline.agents.base import Episode, Trajectory
from pipeline.fetcher.verifiers import Verifier, load_verifier


class SingleTurn:
    """verifier_of: name -> verifier. Verifiers keep what they made, so the samples of a process share them."""

    def __init__(self, verifier_of: Callable[[str], Verifier] = load_verifier) -> None:
        self._verifier_of = verifier_of
        self._verifier: Verifier | None = None

    async def init(self, episode: Episode) -> None:
        """A verifier that cannot be loaded fails the sample before any token is spent on it."""
        self._verifier = self._verifier_of(episode.task.verifier)

    async def run(self, episode: Episode) -> Trajectory:
        trajectory = Trajectory()
        prompt = episode.renderer.render(episode.task.messages)
        trajectory.append_context(prompt)
        room = episode.task.sampling.max_tokens
        if episode.task.stopping.max_context is not None:
            room = min(room, episode.task.stopping.max_context - len(prompt))
        if room < 1:
            trajectory.finish_reason = "context_overflow"
            return trajectory
        completion, executor = await episode.act(prompt, turn=0, max_tokens=room)
        trajectory.append_completion(completion, executor)
        trajectory.text = episode.renderer.decode(completion.token_ids)
        trajectory.finish_reason = "finish" if completion.finish_reason == "stop" else "length"
        return trajectory

    async def verify(self, episode: Episode, trajectory: Trajectory) -> float | None:
        if self._verifier is None:
            raise RuntimeError("verify before init")
        return await episode.offload(self._verifier, episode.task, trajectory.text)

    cleanup = None
