from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import StageFailed
from pipeline.trainer.packing import Row, RowRules, make_rows, split_chunks, split_minibatches
from tests.pipeline.trainer.helpers import make_group, tiny_model


def ids_of(groups) -> set[str]:
    return {sample.sample_id for group in groups for sample in group.samples}


def rows_of(groups, **rules) -> tuple[Row, ...]:
    return make_rows(groups, ids_of(groups), RowRules(**{"max_tokens": 100, **rules})).rows


def row(sample_id: str, length: int, ordinal: int = 0) -> Row:
    nothing = np.zeros(0, np.float32)
    return Row(sample_id, ordinal, np.zeros(length, np.int32), np.zeros(0, np.int64), nothing, 1.0, None, nothing > 0, nothing)


@given(st.lists(st.integers(1, 20), max_size=30), st.integers(20, 60), st.integers(0, 99))
def test_chunks_hold_every_row_once_within_the_bound_whatever_the_order(lengths, bound, seed):
    rows = [row(f"{index}", length) for index, length in enumerate(lengths)]
    chunks = split_chunks(rows, bound)
    assert sorted(r.sample_id for chunk in chunks for r in chunk) == sorted(r.sample_id for r in rows)
    assert all(len(chunk) * max(r.length for r in chunk) <= bound for chunk in chunks)
    random.Random(seed).shuffle(rows)
    assert [[r.sample_id for r in chunk] for chunk in split_chunks(rows, bound)] == [[r.sample_id for r in c] for c in chunks]


@settings(max_examples=50)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_minibatches_split_groups_evenly_and_never_tear_one(count, parts, seed):
    rows = [row(f"{ordinal}.{index}", 3, ordinal) for ordinal in range(count) for index in range(2)]
    batches = split_minibatches(rows, parts, (seed, 1, 0))
    assert sorted(r.sample_id for batch in batches for r in batch) == sorted(r.sample_id for r in rows)
    groups = [{r.ordinal for r in batch} for batch in batches]
    assert sum(map(len, groups)) == count and len(groups) == min(parts, count)
    assert max(map(len, groups)) - min(map(len, groups)) <= 1
    assert split_minibatches(rows, parts, (seed, 1, 0)) == batches


def test_an_aborted_sample_leaves_the_advantages_of_its_group_alone():
    with_abort = rows_of([make_group(0, (1.0, 1.0, 0.0, "abort"))], max_tokens=100)
    without = rows_of([make_group(0, (1.0, 1.0, 0.0))])
    assert [r.advantage for r in with_abort] == [r.advantage for r in without]
    ones = [r.advantage for r in rows_of([make_group(0, (1.0, 1.0, 1.0, "abort"))])]
    assert ones == [0.0, 0.0, 0.0] == [r.advantage for r in rows_of([make_group(0, (1.0, 1.0, 1.0))])]


def test_filtered_and_too_long_samples_are_out_of_the_baseline():
    group = make_group(0, (1.0, 0.0, 0.0))  # responses of 3, 4 and 5 tokens after a prompt of 3
    packed = make_rows([group], {"0.0", "0.1", "0.2"}, RowRules(max_tokens=7, std=False))
    assert packed.rejected == {"too_long": 1}
    assert [r.advantage for r in packed.rows] == [0.5, -0.5]
    assert [r.advantage for r in make_rows([group], {"0.0", "0.2"}, RowRules(100, std=False)).rows] == [0.5, -0.5]


def test_unscored_samples_train_with_a_teacher_and_are_rejected_without():
    group = make_group(0, (1.0, None, 0.0))
    assert [r.advantage for r in rows_of([group], std=False)] == [0.5, None, -0.5]
    assert make_rows([group], ids_of([group]), RowRules(100, scored_only=True)).rejected == {"unscored": 1}


def test_a_sample_that_cannot_be_what_an_engine_made_is_rejected():
    group = make_group(0, (1.0, 1.0, 1.0))
    first, second, third = group.samples
    missing = first.logprobs.copy()
    missing[-1] = np.nan
    mask = second.loss_mask.copy()
    mask[0] = 1
    bad = (replace(first, logprobs=missing), replace(second, loss_mask=mask), replace(third, executor=third.executor[:-1]))
    packed = make_rows([replace(group, samples=bad)], ids_of([group]), RowRules(100))
    assert packed.rows == () and packed.rejected == {"malformed": 3}


@pytest.mark.parametrize("signal", ["sampled", "topk", "full"])
def test_teacher_columns_are_joined_by_id_whatever_their_order(signal):
    group = make_group(0, teacher=tiny_model(9), signal=signal)
    column = group.columns["teacher"]
    turned = replace(column, samples=dict(reversed(column.samples.items())))
    plain, shuffled = rows_of([group], signal=signal), rows_of([replace(group, columns={"teacher": turned})], signal=signal)
    for left, right, sample in zip(plain, shuffled, group.samples, strict=True):
        own = column.samples[sample.sample_id]["logprobs"][sample.loss_mask > 0]
        np.testing.assert_array_equal(left.teacher, own)
        np.testing.assert_array_equal(left.teacher, right.teacher)
        assert left.covered.all()


def test_only_the_tokens_that_a_column_reaches_are_covered():
    group = make_group(0, (1.0, 1.0, 1.0), teacher=tiny_model(9))
    column = group.columns["teacher"]
    del column.samples["0.1"]
    column.samples["0.2"]["logprobs"][-1] = np.nan
    assert [r.covered.mean() for r in rows_of([group], signal="sampled")] == [1.0, 0.0, 0.8]
    assert [r.covered.mean() for r in rows_of([group], signal="topk")] == [0.0, 0.0, 0.0]


def test_a_column_of_another_group_or_of_another_length_is_refused_by_name():
    group = make_group(0, teacher=tiny_model(9))
    foreign = replace(group.columns["teacher"], ordinal=5)
    with pytest.raises(StageFailed, match="ordinal 5 came with group 0"):
        rows_of([replace(group, columns={"teacher": foreign})], signal="sampled")
    group.columns["teacher"].samples["0.2"]["logprobs"] = np.zeros(3, np.float32)
    with pytest.raises(StageFailed, match=r"sample 0\.2 has 3 entries"):
        rows_of([group], signal="sampled")
