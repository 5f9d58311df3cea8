"""What one call of rollout(step) did, for the workflow's record and for people."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pipeline.evaluation.summary import classes
from pipeline.evaluator.groups import GroupEnd


@dataclass(slots=True)
class RolloutReport:
    step: int
    committed: int = 0
    already: int = 0
    """Ordinals that were written before."""
    replaced: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    """By reason."""
    attempts: int = 0
    samples: int = 0
    """Of committed groups, aborted ones among them."""
    aborted: int = 0
    tokens: int = 0
    """Generated, in committed groups."""
    failure_classes: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def add(self, end: GroupEnd) -> None:
        self.attempts += end.attempts
        if end.settled == "already":
            self.already += 1
        elif end.settled == "dropped":
            self.dropped[end.reason or "unknown"] += 1
        if end.group is None:
            return
        samples = end.group.samples
        self.committed += 1
        self.samples += len(samples)
        self.aborted += sum(sample.status == "aborted" for sample in samples)
        self.tokens += sum(np.count_nonzero(sample.versions >= 0) for sample in samples)
        self.failure_classes.update(classes(samples))

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        names = ("step", "committed", "already", "replaced", "attempts", "samples", "aborted", "tokens", "seconds")
        plain = {name: getattr(self, name) for name in names}
        return plain | {"dropped": dict(self.dropped), "failure_classes": dict(self.failure_classes)}
