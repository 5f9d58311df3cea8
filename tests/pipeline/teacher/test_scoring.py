"""Rows out, columns back: the right value at the right token, whatever the replies look like."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.engines.base import ScoredRow
from pipeline.errors import BadReply, DataError
from pipeline.teacher.scoring import Ask, build_column, match_replies, score_rows
from tests.pipeline.teacher.fakes import PROMPT, VOCAB, make_group, make_sample

SAMPLED, TOPK, FULL = Ask("sampled", 3, VOCAB), Ask("topk", 3, VOCAB), Ask("full", 3, VOCAB)


def halves(row) -> ScoredRow:
    """The toy teacher of p = 1/2, 1/4, ... by position of the scored token."""
    count = len(row.token_ids) - row.start
    return ScoredRow(row.row_id, (-np.log(2) * np.arange(1, count + 1)).astype(np.float32))


def column_of(group, rows, replies, ask=SAMPLED):
    return build_column(group, rows, match_replies(rows, replies), ask, name="teacher", producer="ant", digest="d")


def column(group, reply=halves, ask=SAMPLED, prompt=None):
    rows = score_rows(group, prompt)
    return column_of(group, rows, [reply(row) for row in rows], ask)


def values(column, index=0, name="logprobs"):
    return column.samples[f"{column.ordinal}.{index}"][name]


@pytest.mark.fault(21)
def test_exact_values_sit_at_exactly_the_response_tokens():
    found = values(column(make_group(5, samples=[make_sample(5, 0, mask="1111")])))
    expected = [np.nan] * PROMPT + [np.log(p) for p in (1 / 2, 1 / 4, 1 / 8, 1 / 16)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert found.dtype == np.float32


@pytest.mark.fault(21)
def test_with_several_turns_the_environments_tokens_count_as_context_and_stay_unscored():
    group = make_group(5, samples=[make_sample(5, 0, mask="110011")])
    (row,) = score_rows(group)
    assert row.start == PROMPT and len(row.token_ids) == PROMPT + 6
    nan = np.nan
    expected = [nan] * PROMPT + [np.log(1 / 2), np.log(1 / 4), nan, nan, np.log(1 / 32), np.log(1 / 64)]
    np.testing.assert_allclose(values(column(group)), expected, rtol=1e-6)


def test_tokens_after_the_last_trained_one_are_not_sent():
    (row,) = score_rows(make_group(5, samples=[make_sample(5, 0, mask="1100")]))
    assert len(row.token_ids) == PROMPT + 2


@pytest.mark.fault(22)
def test_aborted_and_empty_samples_send_no_row_and_get_no_value():
    group = make_group(5, samples=[make_sample(5, 0, status="aborted"), make_sample(5, 1, mask=""), make_sample(5, 2, mask="11")])
    rows = score_rows(group)
    assert [row.row_id for row in rows] == ["5.2"]
    found = column(group)
    assert set(found.samples) == {"5.0", "5.1", "5.2"}
    for index, length in ((0, PROMPT), (1, PROMPT)):
        assert values(found, index).shape == (length,) and np.isnan(values(found, index)).all()
    assert np.isfinite(values(found, 2)[PROMPT:]).all()


def test_the_teachers_own_prompt_replaces_the_students_and_values_return_to_the_students_positions():
    group = make_group(5, samples=[make_sample(5, 0, mask="111")])
    prompt = np.arange(10, dtype=np.int32)
    (row,) = score_rows(group, prompt)
    assert row.start == 10
    np.testing.assert_array_equal(row.token_ids, [*range(10), *group.samples[0].token_ids[PROMPT:]])
    np.testing.assert_allclose(values(column(group, prompt=prompt))[PROMPT:], np.log([1 / 2, 1 / 4, 1 / 8]), rtol=1e-6)


@pytest.mark.parametrize("mask", ["1101", "110"])
def test_the_teachers_own_prompt_is_refused_for_several_turns(mask):
    with pytest.raises(DataError, match=r"sample 5\.0: .*teachers\.\*\.shots > 0.*single-turn"):
        score_rows(make_group(5, samples=[make_sample(5, 0, mask=mask)]), np.arange(4, dtype=np.int32))


def test_a_trained_token_without_context_is_refused():
    sample = make_sample(5, 0)
    sample.loss_mask[:] = 1
    with pytest.raises(DataError, match="position 0 has no context"):
        score_rows(make_group(5, samples=[sample]))


def test_replies_are_joined_by_id_and_not_by_place():
    group = make_group(5)
    rows = score_rows(group)
    straight = column_of(group, rows, [halves(row) for row in rows])
    shuffled = column_of(group, rows, [halves(row) for row in reversed(rows)])
    for sample_id, arrays in straight.samples.items():
        np.testing.assert_array_equal(arrays["logprobs"], shuffled.samples[sample_id]["logprobs"])


def test_missing_repeated_and_foreign_replies_are_named():
    rows = score_rows(make_group(5))
    replies = [halves(row) for row in rows]
    with pytest.raises(BadReply, match=r"missing \['5.3'\]"):
        match_replies(rows, replies[:3])
    with pytest.raises(BadReply, match="5 replies to 4 rows"):
        match_replies(rows, [*replies, replies[0]])
    with pytest.raises(BadReply, match=r"not asked for \['9.9'\]"):
        match_replies(rows, [*replies, ScoredRow("9.9", replies[0].logprobs)])


def full(row, width=VOCAB, fill=-1.0) -> ScoredRow:
    count = len(row.token_ids) - row.start
    return ScoredRow(row.row_id, np.full(count, -1.0), full_logprobs=np.full((count, width), fill, np.float32))


def topk(row, width=3, token=0, fill=-1.0) -> ScoredRow:
    count = len(row.token_ids) - row.start
    return ScoredRow(
        row.row_id, np.full(count, -1.0), np.full((count, width), token, np.int32), np.full((count, width), fill, np.float32)
    )


def edited(change):
    def reply(row):
        array = np.full(len(row.token_ids) - row.start, -1.0, np.float32)
        return ScoredRow(row.row_id, change(array))

    return reply


def with_first(value):
    def change(array):
        array[0] = value
        return array

    return change


@pytest.mark.parametrize(
    ("reply", "ask", "told"),
    [
        (edited(lambda array: array[:-1]), SAMPLED, r"must be \(4,\), got \(3,\)"),
        (edited(with_first(np.nan)), SAMPLED, "not finite"),
        (edited(with_first(-np.inf)), SAMPLED, "not finite"),
        (edited(with_first(0.1)), SAMPLED, "a logprob is at most 0"),
        (halves, TOPK, r"topk_logprobs must be \(4, 3\), got None"),
        (lambda row: topk(row, width=2), TOPK, r"topk_logprobs must be \(4, 3\), got \(4, 2\)"),
        (lambda row: topk(row, token=VOCAB), TOPK, f"ids below {VOCAB}"),
        (lambda row: topk(row, token=-1), TOPK, f"ids below {VOCAB}"),
        (lambda row: topk(row, fill=np.nan), TOPK, "not finite"),
        (halves, FULL, r"full_logprobs must be \(4, 40\), got None"),
        (lambda row: full(row, width=39), FULL, r"got \(4, 39\)"),
        (lambda row: full(row, fill=np.nan), FULL, "not finite"),
        (lambda row: full(row, fill=0.5), FULL, "at most 0"),
    ],
)
def test_replies_that_cannot_be_logprobs_are_refused_by_row(reply, ask, told):
    with pytest.raises(BadReply, match=told) as caught:
        column(make_group(5), reply, ask)
    assert "row 5.0" in str(caught.value)


def test_rounding_above_zero_and_ruled_out_entries_of_the_vocabulary_are_fine():
    column(make_group(5), edited(with_first(5e-7)))
    column(make_group(5), lambda row: full(row, fill=-np.inf), FULL)


def test_signals_fill_whole_length_arrays():
    group = make_group(5, samples=[make_sample(5, 0, mask="11"), make_sample(5, 1, status="aborted")])
    found = column(group, topk, TOPK)
    assert values(found, 0, "topk_ids").shape == (PROMPT + 2, 3) and values(found, 0, "topk_ids").dtype == np.int32
    assert np.isnan(values(found, 0, "topk_logprobs")[:PROMPT]).all()
    assert (values(found, 0, "topk_logprobs")[PROMPT:] == -1).all()
    assert np.isnan(values(found, 1, "topk_logprobs")).all() and values(found, 1, "topk_ids").shape == (PROMPT, 3)
    assert values(column(group, full, FULL), 0, "full_logprobs").shape == (PROMPT + 2, VOCAB)


def test_top_k_wider_than_the_vocabulary_is_the_vocabulary():
    ask = Ask("topk", 1000, VOCAB)
    found = column(make_group(5), lambda row: topk(row, width=VOCAB), ask)
    assert values(found, 0, "topk_ids").shape[1] == VOCAB
