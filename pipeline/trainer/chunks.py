"""One forward pass as tensors: padded tokens, and one entry for each trained token of the chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from pipeline.trainer.packing import Row


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    tokens_bt: Tensor
    """int64, padded on the right: a causal model needs no attention mask then."""
    columns_c: Tensor
    """Positions whose logits any row needs (the position before each trained token), ascending."""
    row_n: Tensor
    column_n: Tensor
    """Index into columns_c."""
    target_n: Tensor
    behaviour_n: Tensor
    temperature_n: Tensor
    advantage_n: Tensor
    """0 where the sample has none; `policy_weight_n` is 0 there."""
    policy_weight_n: Tensor
    """Weight of the token in the policy-gradient loss of the whole optimizer step."""
    teacher_weight_n: Tensor
    """Weight of the token in the distillation loss of the whole optimizer step; 0 where not covered."""
    imitation_weight_n: Tensor
    """Weight of the token in the cross-entropy of the whole optimizer step; 0 where it is not imitated."""
    anchor_weight_n: Tensor
    """Weight of the student's own token in a mean over all of them; 0 on a teacher's."""
    teacher_n: Tensor
    """0 where not covered."""
    topk_ids_nk: Tensor | None
    topk_logprobs_nk: Tensor | None
    full_nv: Tensor | None


@dataclass(frozen=True, slots=True)
class Normaliser:
    """Sums over all rows of an optimizer step, known before its first backward: so chunks need not know of each other.

    Tokens that are masked later for their ratio stay in it: masking one does not make the others heavier.
    """

    teacher_tokens: int
    policy_tokens: int
    policy_rows: int
    by_sequence: bool
    imitated_tokens: int = 0
    student_tokens: int = 0

    @classmethod
    def of(cls, rows: Sequence[Row], by_sequence: bool) -> Normaliser:
        scored = [row for row in rows if row.advantage is not None]
        return cls(
            teacher_tokens=sum(int(row.covered.sum()) for row in rows),
            policy_tokens=sum(len(row.positions) for row in scored),
            policy_rows=len(scored),
            by_sequence=by_sequence,
            imitated_tokens=sum(int(imitated(row).sum()) for row in rows),
            student_tokens=sum(int(by_student(row).sum()) for row in rows),
        )

    def policy_weight(self, row: Row) -> float:
        """`token`: a mean over all tokens (DAPO); `sequence`: a mean over rows of their token means (GRPO)."""
        if row.advantage is None:
            return 0.0
        return 1.0 / (self.policy_rows * len(row.positions)) if self.by_sequence else 1.0 / self.policy_tokens


def imitated(row: Row) -> np.ndarray:
    """bool [N]."""
    return np.zeros(len(row.positions), bool) if row.imitated is None else row.imitated


def by_student(row: Row) -> np.ndarray:
    """bool [N]."""
    return np.ones(len(row.positions), bool) if row.by_teacher is None else ~row.by_teacher


def build_chunk(rows: Sequence[Row], normaliser: Normaliser, dtype: torch.dtype, device: torch.device) -> Chunk:
    counts = [len(row.positions) for row in rows]
    tokens = np.zeros((len(rows), max(row.length for row in rows)), np.int64)
    for index, row in enumerate(rows):
        tokens[index, : row.length] = row.token_ids
    row_n = np.repeat(np.arange(len(rows)), counts)
    target_at = np.concatenate([row.positions for row in rows])
    columns, column_n = np.unique(target_at - 1, return_inverse=True)
    covered = np.concatenate([row.covered for row in rows])
    per_teacher = 1.0 / normaliser.teacher_tokens if normaliser.teacher_tokens else 0.0

    def share(chosen: np.ndarray, of: int) -> Tensor:
        return real(np.where(chosen, 1.0 / max(1, of), 0.0))

    def whole(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(device)

    def real(array: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(device, dtype)

    def by_row(values: Sequence[float]) -> Tensor:
        return real(np.repeat(np.asarray(values, np.float64), counts))

    topk = _topk(rows, covered)
    full = _stack(rows, "full_logprobs")
    return Chunk(
        tokens_bt=whole(tokens),
        columns_c=whole(columns),
        row_n=whole(row_n),
        column_n=whole(column_n),
        target_n=whole(tokens[row_n, target_at]),
        behaviour_n=real(np.concatenate([row.behaviour for row in rows])),
        temperature_n=by_row([row.temperature for row in rows]),
        advantage_n=by_row([row.advantage or 0.0 for row in rows]),
        policy_weight_n=by_row([normaliser.policy_weight(row) for row in rows]),
        teacher_weight_n=real(np.where(covered, per_teacher, 0.0)),
        imitation_weight_n=share(np.concatenate([imitated(row) for row in rows]), normaliser.imitated_tokens),
        anchor_weight_n=share(np.concatenate([by_student(row) for row in rows]), normaliser.student_tokens),
        teacher_n=real(np.where(covered, np.concatenate([row.teacher for row in rows]), 0.0)),
        topk_ids_nk=None if topk is None else whole(topk[0]),
        topk_logprobs_nk=None if topk is None else real(topk[1]),
        full_nv=None if full is None else real(np.where(covered[:, None], full, 0.0)),
    )


def _topk(rows: Sequence[Row], covered: np.ndarray) -> tuple[np.ndarray, np.ndarray] | None:
    """Ids [n, k] and logprobs [n, k]; tokens without them get harmless entries, their weight is 0."""
    ids, logprobs = _stack(rows, "topk_ids"), _stack(rows, "topk_logprobs")
    if ids is None or logprobs is None:
        return None
    spread = np.arange(ids.shape[1])[None, :]
    return np.where(covered[:, None], ids, spread), np.where(covered[:, None], logprobs, -np.log(2.0 * ids.shape[1]))


def _stack(rows: Sequence[Row], name: str) -> np.ndarray | None:
    """The rows' arrays one under the other, [n, width]; NaN for a row without; teachers of other widths share the least."""
    widths = [getattr(row, name).shape[1] for row in rows if getattr(row, name) is not None]
    if not widths:
        return None
    blank = np.nan if name != "topk_ids" else 0
    parts = [
        np.full((len(row.positions), min(widths)), blank) if getattr(row, name) is None else getattr(row, name)[:, : min(widths)]
        for row in rows
    ]
    return np.concatenate(parts)
