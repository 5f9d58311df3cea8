"""Groups to rows, and rows to padded chunks.

Invariant: what belongs to a sample (teacher column, advantage) is joined to it by its id, never by its position, and the
split into chunks depends on the rows alone, not on their order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.errors import StageFailed
from pipeline.records import TEACHER, Column, Group, Sample
from pipeline.trainer.advantages import group_advantages

TEACHER_FIELD = "teacher"


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One sample as it is trained on. Entry t of an array describes token t."""

    sample_id: str
    ordinal: int
    token_ids: np.ndarray
    """int32 [T]."""
    positions: np.ndarray
    """int64 [N]: indices of the trained tokens, all >= 1. The arrays below are of these tokens alone."""
    behaviour: np.ndarray
    """float32 [N]: logprobs at sampling temperature."""
    temperature: float
    advantage: float | None
    """GRPO; None: the sample is in no baseline and in no policy-gradient loss."""
    covered: np.ndarray
    """bool [N]: the teacher's column reaches this token."""
    teacher: np.ndarray
    """float32 [N]: teacher's logprob at temperature 1, NaN where not covered."""
    topk_ids: np.ndarray | None = None
    """int32 [N, K]."""
    topk_logprobs: np.ndarray | None = None
    """float32 [N, K]."""
    full_logprobs: np.ndarray | None = None
    """float32 [N, V]."""
    imitated: np.ndarray | None = None
    """bool [N]: tokens of the cross-entropy; None: none."""
    by_teacher: np.ndarray | None = None
    """bool [N]: tokens that a teacher made; None: none. They are in no ratio to the behaviour policy, which did not make them."""

    @property
    def length(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Packed:
    rows: tuple[Row, ...]
    rejected: dict[str, int]
    """Reason -> samples that cannot be trained on."""


@dataclass(frozen=True, slots=True)
class RowRules:
    """What the configuration says about rows."""

    max_tokens: int
    """A longer sample is rejected as `too_long`."""
    std: bool = True
    """GRPO: divide by the group's deviation."""
    signal: str | None = None
    """What the teacher's column must hold for a token to be covered: sampled, topk or full; None: no teacher is asked."""
    scored_only: bool = False
    """Reject samples without a reward: without a teacher there is nothing else to learn from."""
    imitate: Literal["nothing", "teacher", "all"] = "nothing"
    """Whose tokens are in the cross-entropy."""
    imitated_only: bool = False
    """Reject samples in which nothing is imitated."""


def make_rows(groups: Sequence[Group], kept: Collection[str], rules: RowRules) -> Packed:
    """One row a kept sample, in order. Rejected samples are out of their group's baseline, like filtered ones.

    Reasons: `too_long`, `unscored`, `not_imitated`, and `malformed` (arrays of unequal length, a trained first token, or a trained
    token without a behaviour logprob). Raises StageFailed when a teacher column does not fit its group.
    """
    rows: list[Row] = []
    rejected: Counter[str] = Counter()
    for group in groups:
        column = group.columns.get(TEACHER_FIELD)
        if column is not None and column.ordinal != group.ordinal:
            raise StageFailed("trainer", f"column {column.name!r} of ordinal {column.ordinal} came with group {group.ordinal}")
        reasons = {sample.sample_id: _defect(sample, rules) for sample in group.samples if sample.sample_id in kept}
        rejected.update(reason for reason in reasons.values() if reason is not None)
        samples = [sample for sample in group.samples if reasons.get(sample.sample_id, "filtered") is None]
        advantages = group_advantages([sample.reward for sample in samples], std=rules.std)
        rows += [_row(group, sample, advantage, column, rules) for sample, advantage in zip(samples, advantages, strict=True)]
    return Packed(tuple(rows), dict(rejected))


def split_minibatches(rows: Sequence[Row], count: int, seed: Sequence[int]) -> list[list[Row]]:
    """Rows by optimizer step: groups are shuffled by the seed, split evenly, and never torn apart."""
    by_group: dict[int, list[Row]] = {}
    for row in rows:
        by_group.setdefault(row.ordinal, []).append(row)
    ordinals = list(by_group)
    order = np.random.default_rng(np.random.SeedSequence(list(seed))).permutation(len(ordinals))
    parts = np.array_split(order, min(count, len(ordinals)))
    return [[row for index in part for row in by_group[ordinals[index]]] for part in parts]


def split_chunks(rows: Sequence[Row], max_tokens: int) -> list[list[Row]]:
    """Rows by forward pass: sorted by (length, id), and as many in a chunk as keep rows * longest <= max_tokens.

    A row that is longer than `max_tokens` has a chunk of its own; `make_rows` rejects it before.
    """
    chunks: list[list[Row]] = []
    for row in sorted(rows, key=lambda row: (row.length, row.sample_id)):
        if chunks and (len(chunks[-1]) + 1) * row.length <= max_tokens:
            chunks[-1].append(row)
        else:
            chunks.append([row])
    return chunks


def _defect(sample: Sample, rules: RowRules) -> str | None:
    length = len(sample.token_ids)
    arrays = (sample.loss_mask, sample.logprobs, sample.executor, sample.versions)
    if any(len(array) != length for array in arrays):
        return "malformed"
    trained = sample.loss_mask.astype(bool)
    if not trained.any() or trained[0] or not np.isfinite(sample.logprobs[trained]).all():
        return "malformed"
    if length > rules.max_tokens:
        return "too_long"
    if rules.scored_only and sample.reward is None:
        return "unscored"
    if rules.imitated_only and not (sample.executor[trained] == TEACHER).any():
        return "not_imitated"
    return None


def _row(group: Group, sample: Sample, advantage: float | None, column: Column | None, rules: RowRules) -> Row:
    positions, signal = np.flatnonzero(sample.loss_mask), rules.signal
    by_teacher = sample.executor[positions] == TEACHER
    arrays = column.samples.get(sample.sample_id) if column is not None and signal is not None else None
    picked = {name: _pick(group, sample, name, array, positions) for name, array in (arrays or {}).items()}
    teacher = picked.get("logprobs", np.full(len(positions), np.nan, np.float32))
    covered = np.isfinite(teacher)
    extra: dict[str, np.ndarray] = {}
    if signal == "topk":
        covered &= _finite(picked.get("topk_logprobs"), len(positions))
        extra = {name: picked[name] for name in ("topk_ids", "topk_logprobs") if name in picked}
    elif signal == "full":
        covered &= _finite(picked.get("full_logprobs"), len(positions))
        extra = {name: picked[name] for name in ("full_logprobs",) if name in picked}
    return Row(
        sample_id=sample.sample_id,
        ordinal=group.ordinal,
        token_ids=sample.token_ids,
        positions=positions,
        behaviour=sample.logprobs[positions],
        temperature=group.task.sampling.temperature,
        advantage=advantage,
        covered=covered,
        teacher=teacher,
        imitated={"nothing": None, "teacher": by_teacher, "all": np.ones(len(positions), bool)}[rules.imitate],
        by_teacher=by_teacher if by_teacher.any() else None,
        **extra,
    )


def _pick(group: Group, sample: Sample, name: str, array: np.ndarray, positions: np.ndarray) -> np.ndarray:
    if len(array) != len(sample.token_ids):
        raise StageFailed(
            "trainer",
            f"column {TEACHER_FIELD!r}, group {group.ordinal}: {name} of sample {sample.sample_id} has {len(array)} entries for"
            f" {len(sample.token_ids)} tokens",
        )
    return array[positions]


def _finite(array: np.ndarray | None, count: int) -> np.ndarray:
    """bool [N]: all entries of the token are known. -inf is known (a token that the teacher rules out), NaN is not."""
    return np.zeros(count, bool) if array is None else ~np.isnan(array).any(axis=1)
