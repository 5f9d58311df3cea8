"""How far a model is from what a teacher said in an evaluation: the loss that imitation trains on, over held-out tasks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.engines.base import Engine, ScoreRow
from pipeline.evaluation.summary import Played
from pipeline.records import TEACHER, Sample


def taught(played: Sequence[Played]) -> list[Sample]:
    """Samples that count, in which a teacher said something."""
    return [sample for _, sample in played if sample.status == "ok" and TEACHER in sample.executor]


async def imitation_loss(engine: Engine, samples: Sequence[Sample]) -> float:
    """Cross-entropy, nats a token at temperature 1, over the teacher's tokens of `taught` samples: at least one.

    Raises RowRefused for a sample that is longer than the engine's context.
    """
    starts = [int(np.argmax(sample.executor == TEACHER)) for sample in samples]
    rows = [ScoreRow(sample.sample_id, sample.token_ids, start) for sample, start in zip(samples, starts, strict=True)]
    scored = await engine.score(rows, "sampled", 0)
    parts = zip(samples, starts, scored, strict=True)
    said = [row.logprobs[sample.executor[start:] == TEACHER] for sample, start, row in parts]
    return -float(np.mean(np.concatenate(said), dtype=np.float64))
