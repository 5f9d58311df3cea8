"""The records that travel between stages.

Invariant: every per-token array of a sample has one entry per token of `token_ids`; entry t describes token t. Where a value
is not defined (a prompt token has no behaviour logprob) it is NaN, never 0.0.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from pipeline.pickling import by_fields

NOBODY, STUDENT, TEACHER = 0, 1, 2
"""Executor of a token: prompt or environment, the student model, the teacher model."""

SOLVED_AT = 0.999
"""A reward of at least this counts as solved; scorers with partial credit return less for a wrong answer."""

SampleStatus = Literal["ok", "aborted"]
GroupState = Literal["pending", "running", "written", "ready", "consumed", "trained", "dropped"]
GROUP_STATES: tuple[GroupState, ...] = ("pending", "running", "written", "ready", "consumed", "trained", "dropped")


@by_fields
@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn in one call of an engine."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 switches the cut off."""
    max_tokens: int = 16
    """New tokens a call (a turn)."""


@by_fields
@dataclass(frozen=True, slots=True)
class Stopping:
    """When an episode ends, whatever the model says."""

    max_turns: int = 16
    max_context: int | None = None
    """Tokens of prompt and responses together; None: the engine's own bound."""
    max_seconds: float | None = None
    max_repeats: int = 3
    """The same action this many times in a row ends the episode as a loop."""


@by_fields
@dataclass(frozen=True, slots=True)
class Task:
    """One problem at one ordinal of the stream: a pure function of (configuration, seed, ordinal)."""

    ordinal: int
    task_id: str
    """`<dataset>/<item id>`; the same item has the same id in every epoch."""
    dataset: str
    task_type: str
    messages: tuple[tuple[str, str], ...]
    """(role, content) pairs, ending with a user turn."""
    answer: str | None
    verifier: str
    """Short name or `module:attribute`."""
    samples: int
    sampling: Sampling
    stopping: Stopping
    seed: int
    """Sampling seeds derive from it: see `sample_seed`."""
    needs: tuple[str, ...] = ()
    """Fields that must be produced before the group is ready, for example ("teacher",)."""
    teacher: str | None = None
    """Alias of the teacher that scores this task."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """JSON-able; the verifier's own input."""


@by_fields
@dataclass(frozen=True, slots=True)
class StepContext:
    """Per-step values, carried in the call and never in process state."""

    step: int
    min_version: int = 0
    """Engines must serve at least this weight version."""
    exact_version: int | None = None
    """Set for evaluations: engines must serve this version and no other."""
    phase: Literal["train", "eval"] = "train"
    beta: float = 0.0
    """Probability that the teacher acts (DAgger)."""
    t_max: int = 0


@by_fields
@dataclass(slots=True)
class Sample:
    """One episode of a task. Arrays are of length T = len(token_ids)."""

    sample_id: str
    """`<ordinal>.<index>`: unique in a run."""
    index: int
    status: SampleStatus
    reward: float | None
    """None: not scored (aborted, or the verifier could not say). Never read as 0."""
    token_ids: np.ndarray
    """int32 [T]: prompt, responses and environment output in the order the model saw them."""
    loss_mask: np.ndarray
    """uint8 [T]: 1 on tokens that are trained on."""
    logprobs: np.ndarray
    """float32 [T]: behaviour logprob of each sampled token at sampling temperature; NaN elsewhere."""
    executor: np.ndarray
    """uint8 [T]: NOBODY, STUDENT or TEACHER."""
    versions: np.ndarray
    """int32 [T]: weight version that made the token; -1 where no model of ours did."""
    finish_reason: str
    """`finish`, `length`, `max_turns`, `context_overflow`, `repeated_action_loop`, `action_budget`, or the abort reason."""
    text: str = ""
    """The final response, decoded, for people and verifiers."""
    abort_reason: str | None = None
    """`agent_timeout`, `infra_conn`, `infra_sandbox`, `infra_other` or `data`, from the exception's type."""
    agent_reason: str | None = None
    """What the agent itself said, kept beside the transport's reason."""
    error: str | None = None
    """One line of the root cause."""
    phase: str = "done"
    """The phase that ended the sample: init, run, verify or cleanup; `done` when nothing failed."""
    node: str = ""
    turns: tuple[dict[str, Any], ...] = ()
    """Per turn: tokens, seconds, executor, weight_version."""
    seconds: float = 0.0

    def dropped_tokens(self) -> int:
        """Of answers that the agent's own history left out."""
        return sum(turn.get("dropped_tokens", 0) for turn in self.turns)


@dataclass(slots=True)
class Group:
    """All samples of one ordinal for one step: committed, scored, trained and dropped as a whole."""

    ordinal: int
    step: int
    attempt: int
    task: Task
    weight_version: int
    """Version at dispatch; staleness is measured from it."""
    samples: tuple[Sample, ...]
    columns: dict[str, Column] = field(default_factory=dict)
    """Produced fields by name; empty when read without them."""

    def tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples)


@dataclass(slots=True)
class Column:
    """One produced field of one group, joined to its samples by id."""

    name: str
    ordinal: int
    producer: str
    """Teacher (or reward model) alias."""
    digest: str
    """Digest of the producer's weights and settings."""
    samples: dict[str, dict[str, np.ndarray]]
    """sample_id -> arrays. `logprobs` float32 [T]; optional `topk_ids` int32 [T, K] with `topk_logprobs` float32 [T, K];
    optional `full_logprobs` float32 [T, V]. NaN where the token was not scored."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What the placement pool admits as one: tasks of one type under one evaluator."""

    batch_id: str
    evaluator_id: str
    task_type: str
    ordinals: tuple[int, ...]


def sample_seed(task: Task, index: int, attempt: int) -> int:
    """Seed of one sample. `attempt` is the ordinal's count of *failed* attempts, so that a lost attempt is repeated exactly."""
    state = np.random.SeedSequence([task.seed, task.ordinal, index, attempt]).generate_state(1, np.uint64)
    return int(state[0] >> np.uint64(1))


def aborted_sample(
    ordinal: int, index: int, prompt: list[int], *, abort_reason: str, error: str, phase: str, node: str = ""
) -> Sample:
    """An aborted sample: fully masked, reward None, kept in its group so that shapes hold."""
    length = len(prompt)
    return Sample(
        sample_id=f"{ordinal}.{index}",
        index=index,
        status="aborted",
        reward=None,
        token_ids=np.asarray(prompt, np.int32),
        loss_mask=np.zeros(length, np.uint8),
        logprobs=np.full(length, np.nan, np.float32),
        executor=np.zeros(length, np.uint8),
        versions=np.full(length, -1, np.int32),
        finish_reason=abort_reason,
        abort_reason=abort_reason,
        error=error,
        phase=phase,
        node=node,
    )
