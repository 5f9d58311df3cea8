"""From a group to the rows that a teacher scores, and from its checked replies to the group's column.

Invariant: a column is joined by sample id and depends on the group's tokens and the teacher alone, never on what shared the
call. What was not scored is NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.engines.base import ScoredRow, ScoreRow, Signal
from pipeline.errors import BadReply, DataError
from pipeline.records import Column, Group, Sample

LOGPROB_SLACK = 1e-6
"""A logprob may exceed 0 by this much: rounding of a sum of exponentials."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What is asked of a teacher for every token."""

    signal: Signal
    top_k: int
    vocab_size: int
    """Output rows of the teacher."""


def score_rows(group: Group, prompt: np.ndarray | None = None) -> list[ScoreRow]:
    """One row a sample that has something to score; row ids are sample ids.

    prompt: int32 [P], the teacher's own prompt in place of the student's; None: the tokens as the student saw them.
    Raises DataError for a sample that this teacher cannot be asked about.
    """
    return [_row(sample, prompt) for sample in group.samples if _scorable(sample)]


def _scorable(sample: Sample) -> bool:
    return sample.status == "ok" and bool(sample.loss_mask.any())


def _row(sample: Sample, prompt: np.ndarray | None) -> ScoreRow:
    positions = np.flatnonzero(sample.loss_mask)
    first, last = int(positions[0]), int(positions[-1])
    if prompt is not None:
        if last != len(sample.token_ids) - 1 or len(positions) != last - first + 1:
            raise DataError(
                f"sample {sample.sample_id}: a teacher with its own prompt (teachers.*.shots > 0) can score single-turn samples "
                f"only; here {len(positions)} loss tokens lie between {first} and {last} of {len(sample.token_ids)}"
            )
        response = sample.token_ids[first:]
        return ScoreRow(sample.sample_id, np.concatenate([prompt, response]).astype(np.int32, copy=False), len(prompt))
    if first == 0:
        raise DataError(f"sample {sample.sample_id}: a loss token at position 0 has no context to be scored in")
    return ScoreRow(sample.sample_id, sample.token_ids[: last + 1], first)


def match_replies(rows: Sequence[ScoreRow], replies: Sequence[ScoredRow]) -> dict[str, ScoredRow]:
    """Replies by row id. Raises BadReply unless there is exactly one for each row and none besides."""
    by_id = {reply.row_id: reply for reply in replies}
    asked = {row.row_id for row in rows}
    if len(by_id) != len(replies) or by_id.keys() != asked:
        missing, foreign = sorted(asked - by_id.keys())[:3], sorted(by_id.keys() - asked)[:3]
        raise BadReply(f"{len(replies)} replies to {len(rows)} rows; missing {missing}, not asked for {foreign}")
    return by_id


def check_reply(row: ScoreRow, reply: ScoredRow, ask: Ask) -> None:
    """Raises BadReply naming the row unless lengths, ids and values are what logprobs can be."""
    count = len(row.token_ids) - row.start
    _check_logprobs(row, "logprobs", reply.logprobs, (count,))
    if ask.signal == "topk":
        shape = (count, min(ask.top_k, ask.vocab_size))
        _check_logprobs(row, "topk_logprobs", reply.topk_logprobs, shape)
        ids = reply.topk_ids
        if ids is None or ids.shape != shape or (ids.size and not (0 <= ids.min() and ids.max() < ask.vocab_size)):
            found = None if ids is None else ids.shape
            raise BadReply(f"row {row.row_id}: topk_ids must be {shape} ids below {ask.vocab_size}, got {found}")
    if ask.signal == "full":
        _check_logprobs(row, "full_logprobs", reply.full_logprobs, (count, ask.vocab_size))


def _check_logprobs(row: ScoreRow, name: str, values: np.ndarray | None, shape: tuple[int, ...]) -> None:
    if values is None or values.shape != shape:
        raise BadReply(f"row {row.row_id}: {name} must be {shape}, got {None if values is None else values.shape}")
    ruled_out = np.isneginf(values) if name == "full_logprobs" else False  # padding of a vocabulary may be ruled out
    if not (np.isfinite(values) | ruled_out).all():
        raise BadReply(f"row {row.row_id}: {name} holds values that are not finite")
    if values.size and values.max() > LOGPROB_SLACK:
        raise BadReply(f"row {row.row_id}: {name} holds {values.max():g}; a logprob is at most 0")


def build_column(
    group: Group, rows: Sequence[ScoreRow], replies: Mapping[str, ScoredRow], ask: Ask, *, name: str, producer: str, digest: str
) -> Column:
    """The group's column; checks each reply. Arrays have the length of their sample; NaN (and id 0) where nothing was scored.

    A row's own tokens may differ from its sample's (another prompt); its scored tokens are the sample's from the first loss
    token on, so value i belongs to position first + i.
    """
    by_id = {row.row_id: row for row in rows}
    samples = {}
    for sample in group.samples:
        arrays = _blank(len(sample.token_ids), ask)
        row = by_id.get(sample.sample_id)
        if row is not None:
            reply = replies[row.row_id]
            check_reply(row, reply, ask)
            _place(arrays, sample.loss_mask, reply)
        samples[sample.sample_id] = arrays
    return Column(name=name, ordinal=group.ordinal, producer=producer, digest=digest, samples=samples)


def _blank(length: int, ask: Ask) -> dict[str, np.ndarray]:
    arrays = {"logprobs": np.full(length, np.nan, np.float32)}
    if ask.signal == "topk":
        width = min(ask.top_k, ask.vocab_size)
        arrays["topk_ids"] = np.zeros((length, width), np.int32)
        arrays["topk_logprobs"] = np.full((length, width), np.nan, np.float32)
    if ask.signal == "full":
        arrays["full_logprobs"] = np.full((length, ask.vocab_size), np.nan, np.float32)
    return arrays


def _place(arrays: dict[str, np.ndarray], loss_mask: np.ndarray, reply: ScoredRow) -> None:
    positions = np.flatnonzero(loss_mask)
    for name, array in arrays.items():
        array[positions] = getattr(reply, name)[positions - positions[0]]
