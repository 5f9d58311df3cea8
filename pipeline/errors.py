"""Every exception of the pipeline, and the one table exception -> abort reason -> failure class.

Invariant: a fault is classified from exception types along the cause chain, never from the text of a message.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Literal

AbortReason = Literal["agent_timeout", "infra_conn", "infra_sandbox", "infra_other", "data"]
FailureClass = Literal["solved", "finish_unresolved", "loop", "ctx_overflow", "budget", "timeout", "infra", "other"]
FAILURE_CLASSES: tuple[FailureClass, ...] = (
    "solved", "finish_unresolved", "loop", "ctx_overflow", "budget", "timeout", "infra", "other",
)  # fmt: skip


class RolloutError(Exception):
    """Base of all errors that the pipeline raises on purpose. The message names value, bound and key."""


class RemoteTraceback(Exception):
    """The traceback of another process, as text: the cause of an error that came from there."""


class UserError(RolloutError):
    """The user's input cannot be used as it is: one clear line, exit code 2, no traceback."""


class ConfigError(UserError):
    """A configuration that cannot run."""


class AdmissionError(UserError):
    """The demand can never be placed; the message holds the arithmetic."""


class RequestRefused(UserError):
    """A request to the service that it does not serve. status: of HTTP; code: for programs; param: the key that is at fault."""

    def __init__(self, status: int, code: str, message: str, param: str | None = None, retry_after_s: float | None = None) -> None:
        super().__init__(status, code, message, param, retry_after_s)  # all of them, so that it pickles
        self.status, self.code, self.message, self.param, self.retry_after_s = status, code, message, param, retry_after_s

    def __str__(self) -> str:
        return self.message if self.param is None else f"{self.param}: {self.message}"


class Locked(RolloutError):
    """Another process owns the run: exit code 4."""


class StageFailed(RolloutError):
    """A stage died; the cause is its own traceback."""

    def __init__(self, stage: str, message: str) -> None:
        super().__init__(f"stage {stage}: {message}")
        self.stage = stage

    def __reduce__(self):  # pickles across processes with its cause's text
        return (_rebuild_stage_failed, (self.stage, str(self)))


def _rebuild_stage_failed(stage: str, text: str) -> StageFailed:
    error = StageFailed.__new__(StageFailed)
    Exception.__init__(error, text)
    error.stage = stage
    return error


class Stalled(StageFailed):
    """No progress within the bound: names the stage and the oldest item in it."""


class BreakerTripped(StageFailed):
    """Too many failures in a row."""


class FencedOut(RolloutError):
    """A newer writer owns the run folder; this process must end and nothing of it is merged."""


class AttemptRefused(RolloutError):
    """start_attempt on an ordinal that is written or later."""


class LateCommit(RolloutError):
    """A commit of an attempt that is no longer current."""


class CapacityFull(RolloutError):
    """The buffer has no room for that many groups now."""


class NotSelectable(RolloutError):
    """A training step's groups are not all there yet."""


class StoreError(RolloutError):
    """The run folder cannot be read or written; the message names the path."""


class DiskFull(StoreError):
    """No space left: nothing of the call was stored; what was acknowledged stands; calls work again once there is space."""


class StoreCorrupt(StoreError):
    """Stored bytes are not those that were written."""


class DataError(RolloutError):
    """The item itself is bad; trying again does not help."""


class AgentTimeout(RolloutError):
    """A phase of an episode passed its deadline."""


class EngineError(RolloutError):
    """The engine could not answer; another try may."""


class EngineUnavailable(EngineError):
    """The engine cannot be reached."""


class SwapTimeout(EngineError):
    """The wanted weight version was not served in time."""


class RowRefused(EngineError):
    """The teacher refuses a row for what it holds (too long, a foreign token id): not an infrastructure fault."""


class BadReply(EngineError):
    """The engine answered something that cannot be the answer (rows, lengths, values): not an infrastructure fault."""


class SandboxError(RolloutError):
    """The sandbox failed, not what ran in it."""


class PatchError(RolloutError):
    """What an agent has left cannot be taken as a patch: it solves nothing."""


class VerifierError(RolloutError):
    """The verifier raised; the sample's reward is None."""


ABORT_REASONS: tuple[tuple[type[BaseException], AbortReason], ...] = (
    (AgentTimeout, "agent_timeout"),
    (SandboxError, "infra_sandbox"),
    (DataError, "data"),
    (RowRefused, "data"),
    (BadReply, "data"),
    (EngineUnavailable, "infra_conn"),
    (EngineError, "infra_other"),
    (ConnectionError, "infra_conn"),
    (TimeoutError, "infra_conn"),
    (asyncio.CancelledError, "infra_other"),
    (OSError, "infra_other"),
)
"""First match along the cause chain wins; an exception of any other type is the item's or the agent's own: `data`."""

_FINISH_CLASSES: dict[str, FailureClass] = {
    "finish": "finish_unresolved",
    "repeated_action_loop": "loop",
    "context_overflow": "ctx_overflow",
    "action_budget": "budget",
    "max_turns": "budget",
    "length": "budget",
    "agent_timeout": "timeout",
}


def cause_chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then its causes (explicit before implicit), each once; Ray wrappers are followed through `.cause`."""
    seen: set[int] = set()
    current: BaseException | None = error
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        wrapped = getattr(current, "cause", None)
        current = current.__cause__ or (wrapped if isinstance(wrapped, BaseException) else None) or current.__context__


def abort_reason(error: BaseException) -> AbortReason:
    """Classify by type along the cause chain; unknown types are `data` (not retried as infrastructure)."""
    for link in cause_chain(error):
        for kind, reason in ABORT_REASONS:
            if isinstance(link, kind):
                return reason
    return "data"


def is_infrastructure(reason: str) -> bool:
    return reason.startswith("infra_") or reason == "agent_timeout"


def failure_class(reward: float | None, reason: str, *, solved_at: float = 0.999) -> FailureClass:
    """The class of a finished or aborted sample; `solved` wins over the reason."""
    if reward is not None and reward >= solved_at:
        return "solved"
    if reason.startswith("infra_"):
        return "infra"
    return _FINISH_CLASSES.get(reason, "other")


def root_cause(error: BaseException) -> str:
    """One line: type and message of the last link of the chain. A CancelledError is how a deadline ended a call, never why, and a
    remote traceback tells where."""
    links = list(cause_chain(error))
    last = [link for link in links if link is error or not isinstance(link, (asyncio.CancelledError, RemoteTraceback))][-1]
    return f"{type(last).__name__}: {last}".splitlines()[0]
