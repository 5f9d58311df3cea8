"""What plays an episode. The whole contract of an agent is on this screen.

An agent is made for one sample and lives for one sample: init -> run -> verify -> cleanup, cleanup always.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pipeline.engines.base import Completion
from pipeline.records import NOBODY, STUDENT, StepContext, Task


class Generator(Protocol):
    """The student, as an agent sees it. Version, seeds and batching are the caller's business."""

    async def generate(self, prompt: np.ndarray, *, turn: int, max_tokens: int | None = None) -> Completion: ...


class Renderer(Protocol):
    """Messages to tokens and back, by the model's own chat template."""

    def render(self, messages: tuple[tuple[str, str], ...]) -> np.ndarray:
        """int32 [P], ending where the assistant's answer begins."""
        ...

    def decode(self, token_ids: np.ndarray) -> str: ...


@dataclass(slots=True)
class Trajectory:
    """Tokens as the model saw and made them. Appending is the only way to grow it."""

    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    executor: list[int] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish_reason: str = "finish"
    text: str = ""
    turns: list[dict[str, Any]] = field(default_factory=list)

    def append_context(self, token_ids: np.ndarray) -> None:
        """Prompt or environment output: never trained on."""
        count = len(token_ids)
        self.token_ids.extend(int(token) for token in token_ids)
        self.loss_mask.extend([0] * count)
        self.logprobs.extend([float("nan")] * count)
        self.executor.extend([NOBODY] * count)
        self.versions.extend([-1] * count)

    def append_completion(self, completion: Completion, executor: int = STUDENT) -> None:
        count = len(completion.token_ids)
        self.token_ids.extend(int(token) for token in completion.token_ids)
        self.loss_mask.extend([1] * count)
        self.logprobs.extend(float(value) for value in completion.logprobs)
        self.executor.extend([executor] * count)
        self.versions.extend([completion.weight_version] * count)


@dataclass(frozen=True, slots=True)
class Episode:
    """What an agent is given."""

    task: Task
    index: int
    context: StepContext
    student: Generator
    renderer: Renderer
    attempt: int = 0
    """Failed attempts of the ordinal before this one: part of names that must be new for each try (a sandbox's)."""
    offload: Callable[..., Awaitable[Any]] = asyncio.to_thread
    """Runs blocking work outside the event loop: `await offload(function, *arguments)`."""


class Agent(Protocol):
    async def init(self, episode: Episode) -> None: ...

    async def run(self, episode: Episode) -> Trajectory: ...

    async def verify(self, episode: Episode, trajectory: Trajectory) -> float | None:
        """The reward, or None when it cannot be said."""
        ...

    async def cleanup(self, episode: Episode) -> None: ...
