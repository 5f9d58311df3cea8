"""What plays an episode. The whole contract of an agent is on this screen.

An agent is made for one sample and lives for one sample: init -> run -> verify -> cleanup, cleanup always.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from pipeline.config.stages import SandboxPart
from pipeline.engines.base import Completion
from pipeline.errors import ConfigError
from pipeline.records import NOBODY, STUDENT, TEACHER, StepContext, Task
from pipeline.sandboxes.base import Contents, Sandbox


class Generator(Protocol):
    """A student or a teacher, as an agent sees it. Version, seeds and batching are the caller's business."""

    async def generate(self, prompt: np.ndarray, *, turn: int, max_tokens: int | None = None) -> Completion: ...


class Renderer(Protocol):
    """Messages to tokens and back, by the model's own chat template."""

    def render(self, messages: tuple[tuple[str, str], ...]) -> np.ndarray:
        """int32 [P], ending where the assistant's answer begins."""
        ...

    def decode(self, token_ids: np.ndarray) -> str: ...


class MultiTurnRenderer(Renderer, Protocol):
    """What agents with more than one turn, and teachers that speak, need besides."""

    eos_token_id: int

    def encode_text(self, text: str) -> np.ndarray:
        """int32 [N]: the text alone."""
        ...

    def render_reply(self, content: str, answer: np.ndarray) -> np.ndarray:
        """int32 [N]: what follows the answer's tokens in the template: its end where it has none, a user's turn that says
        `content`, and the beginning of the next answer."""
        ...

    def render_history(self, messages: Sequence[tuple[str, str | np.ndarray]]) -> np.ndarray:
        """int32 [P]: as `render`; an answer that is given as its tokens stays as it was sampled."""
        ...


@dataclass(slots=True)
class Trajectory:
    """Tokens as the model saw and made them. Appending is the only way to grow it, and nothing in it is ever rewritten."""

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
        self.token_ids.extend(token_ids.tolist())
        self.loss_mask.extend([0] * count)
        self.logprobs.extend([float("nan")] * count)
        self.executor.extend([NOBODY] * count)
        self.versions.extend([-1] * count)

    def go_back_to(self, prompt: np.ndarray) -> int:
        """Keep what `prompt` begins with. Returns how many tokens that a model made are dropped by that: an answer of which only a
        part is left is context from here on."""
        length = min(len(prompt), len(self.token_ids))
        differing = np.flatnonzero(np.asarray(self.token_ids[:length], np.int32) != prompt[:length])
        kept = int(differing[0]) if len(differing) else length
        start = kept
        if kept < len(self.token_ids) and self.loss_mask[kept]:
            while start and self.loss_mask[start - 1]:
                start -= 1
        dropped, remains = sum(self.loss_mask[start:]), np.asarray(self.token_ids[start:kept], np.int32)
        for column in (self.token_ids, self.loss_mask, self.logprobs, self.executor, self.versions):
            del column[start:]
        self.append_context(remains)
        return dropped

    def append_completion(self, completion: Completion, executor: int = STUDENT) -> None:
        """A teacher's tokens carry no weight version: no model that is trained made them."""
        count = len(completion.token_ids)
        self.token_ids.extend(completion.token_ids.tolist())
        self.loss_mask.extend([1] * count)
        self.logprobs.extend(completion.logprobs.tolist())
        self.executor.extend([executor] * count)
        self.versions.extend([-1 if executor == TEACHER else completion.weight_version] * count)


def student_alone(turn: int) -> int:
    return STUDENT


async def no_sandbox(part: str, contents: Contents) -> Sandbox:
    raise ConfigError("this episode was given no sandboxes")


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
    teacher: Generator | None = None
    executor_of: Callable[[int], int] = student_alone
    """Turn -> STUDENT or TEACHER."""
    open_sandbox: Callable[[str, Contents], Awaitable[Sandbox]] = no_sandbox
    """A sandbox within the sample's token, named for this try and the given part of it. Who opens it closes it."""
    sandbox: SandboxPart = SandboxPart()

    async def act(self, prompt: np.ndarray, *, turn: int, max_tokens: int | None = None) -> tuple[Completion, int]:
        """What is said in a turn, and who says it."""
        executor = self.executor_of(turn)
        speaker = self.student if executor == STUDENT else self.teacher
        if speaker is None:
            raise ConfigError(f"turn {turn} of {self.task.task_id} is the teacher's, and there is none")
        return await speaker.generate(prompt, turn=turn, max_tokens=max_tokens), executor


class Agent(Protocol):
    async def init(self, episode: Episode) -> None: ...

    async def run(self, episode: Episode) -> Trajectory: ...

    async def verify(self, episode: Episode, trajectory: Trajectory) -> float | None:
        """The reward, or None when it cannot be said."""
        ...

    cleanup: Callable[[Episode], Awaitable[None]] | None
    """None: nothing outside of this process is ever opened."""
