"""What changed between two configurations of one run, and which changes a resume may take up.

Allowed: more training steps, where engines are and how they are launched, the layout, time-outs, retention and what is shown.
Anything else would make the rest of the run another experiment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.loading import flatten
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError

_FREE = ("layout", "observe", "run.ray", "engine.url", "engine.launch")
_FREE_OF_TEACHERS = ("url", "launch")
_RETENTION = ("trainer.keep_checkpoints", "buffer.keep_groups")
_TIME_OUTS = (
    "run.stop_grace_s",
    "run.start_timeout_s",
    "rollout.admission_patience_s",
    "eval.hold_s",
)


@dataclass(frozen=True, slots=True)
class Difference:
    key: str
    old: Any
    new: Any
    """None on either side also stands for a key that is not there."""
    allowed: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.old!r} -> {self.new!r}"


def changed(old: RunConfig, new: RunConfig) -> list[Difference]:
    """Leaf keys whose values differ, in the order of the models."""
    before, after = flatten(old), flatten(new)
    keys = list(before) + [key for key in after if key not in before]
    pairs = [(key, before.get(key), after.get(key)) for key in keys]
    return [Difference(key, was, now, _allowed(key, was, now)) for key, was, now in pairs if was != now]


def refuse(differences: Sequence[Difference], run_id: str) -> None:
    """Raise ConfigError with one line for every change that a resume may not take up."""
    wrong = [difference for difference in differences if not difference.allowed]
    if wrong:
        lines = [f"run {run_id}: cannot change {difference} on resume" for difference in wrong]
        raise ConfigError("\n".join([*lines, f"run {run_id}: start a new run, or `rollout fork {run_id}`"]))


def _allowed(key: str, old: Any, new: Any) -> bool:
    if key == "trainer.steps":
        return new is not None and new > old
    if any(key == free or key.startswith(f"{free}.") for free in _FREE):
        return True
    parts = key.split(".")
    if parts[0] == "teachers" and len(parts) > 2 and parts[2] in _FREE_OF_TEACHERS:
        return True
    return key in _RETENTION or key in _TIME_OUTS or key.endswith("_timeout_s")
