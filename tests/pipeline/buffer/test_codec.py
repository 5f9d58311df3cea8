"""decode(encode(x)) is x, bit by bit."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pipeline.buffer import codec
from pipeline.buffer.api import Attempt
from pipeline.errors import DataError, StoreCorrupt
from pipeline.records import Column, Group, Sample, Sampling, Stopping, Task
from tests.pipeline.buffer.helpers import make_group, make_sample, same

text = st.text(max_size=8)
any_float = st.floats()
json_value = st.recursive(
    st.none() | st.booleans() | st.integers() | any_float | text,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(text, inner, max_size=3),
    max_leaves=6,
)
json_object = st.dictionaries(text, json_value, max_size=3)
small = st.integers(0, 2**31)


@st.composite
def samples(draw, ordinal: int = 3, index: int = 0) -> Sample:
    length = draw(st.integers(0, 9))
    arrays = {name: draw(hnp.arrays(dtype, length)) for name, dtype in codec.ARRAYS}
    return Sample(
        sample_id=f"{ordinal}.{index}", index=index, status=draw(st.sampled_from(["ok", "aborted"])),
        reward=draw(st.none() | any_float), finish_reason=draw(text), text=draw(text), abort_reason=draw(st.none() | text),
        agent_reason=draw(st.none() | text), error=draw(st.none() | text), phase=draw(text), node=draw(text),
        turns=tuple(draw(st.lists(json_object, max_size=2))), seconds=draw(any_float), **arrays,
    )  # fmt: skip


@st.composite
def tasks(draw) -> Task:
    sampling = Sampling(draw(any_float), draw(any_float), draw(small), draw(small))
    stopping = Stopping(draw(small), draw(st.none() | small), draw(st.none() | any_float), draw(small))
    messages = tuple(draw(st.lists(st.tuples(text, text), max_size=3)))
    needs = tuple(draw(st.lists(text, max_size=2)))
    return Task(
        draw(small), draw(text), draw(text), draw(text), messages, draw(st.none() | text), draw(text), draw(small), sampling,
        stopping, draw(st.integers(0, 2**70)), needs, draw(st.none() | text), draw(json_object),
    )  # fmt: skip


@st.composite
def groups(draw) -> Group:
    rows = tuple(draw(samples(index=index)) for index in range(draw(st.integers(0, 4))))
    return Group(3, draw(small), draw(small), draw(tasks()), draw(small), rows)


@given(groups())
def test_groups_come_back_as_they_were(group):
    assert same(codec.decode_group(codec.encode_group(group)), group)


@given(samples())
def test_samples_come_back_as_they_were(sample):
    assert same(codec.decode_sample(codec.encode_sample(sample)), sample)


@st.composite
def columns(draw) -> Column:
    shapes = {"logprobs": (), "topk_ids": (3,), "topk_logprobs": (3,), "full_logprobs": (2, 2)}
    dtypes = {"logprobs": np.float32, "topk_ids": np.int32, "topk_logprobs": np.float64, "full_logprobs": np.float16}
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for index in range(draw(st.integers(0, 3))):
        names = sorted(draw(st.sets(st.sampled_from(sorted(shapes)))))
        length = draw(st.integers(0, 5))
        arrays[f"3.{index}"] = {name: draw(hnp.arrays(dtypes[name], (length, *shapes[name]))) for name in names}
    return Column(draw(text), 3, draw(text), draw(text), arrays)


@given(columns())
def test_columns_come_back_as_they_were(column):
    assert same(codec.decode_column(codec.encode_column(column)), column)


def test_equal_groups_have_equal_digests_and_a_changed_token_another():
    attempt = Attempt(3, 1, 0, 1)
    first, second = make_group(attempt, 1), make_group(attempt, 1)
    assert codec.digest(codec.encode_group(first)) == codec.digest(codec.encode_group(second))
    second.samples[1].token_ids[0] += 1
    assert codec.digest(codec.encode_group(first)) != codec.digest(codec.encode_group(second))


@pytest.mark.parametrize("highest", [255, 256, 65535, 65536, 2**31 - 1])
def test_token_ids_come_back_whatever_the_size_of_the_vocabulary(highest):
    sample = make_sample(3, 0, tokens=64)
    sample.token_ids = np.linspace(0, highest, 64).astype(np.int32)
    assert same(codec.decode_sample(codec.encode_sample(sample)), sample)


def test_turns_of_a_long_group_cost_little_beside_its_tokens_and_logprobs():
    group = make_group(Attempt(3, 1, 0, 1), 1, samples=40, tokens=4096)
    said = np.arange(4096) % 512 < 300
    for sample in group.samples:
        sample.token_ids = np.random.default_rng(sample.index).integers(0, 50_000, 4096).astype(np.int32)
        sample.loss_mask, sample.executor = said.astype(np.uint8), np.where(said, 1, 0).astype(np.uint8)
        sample.versions = np.where(said, 3 + sample.index % 2, -1).astype(np.int32)
    data = codec.encode_group(group)
    assert same(codec.decode_group(data), group)
    assert len(data) < 40 * 4096 * (2 + 4) * 1.05


def test_decoded_arrays_can_be_written_to():
    decoded = codec.decode_sample(codec.encode_sample(make_sample(1, 0)))
    for name, _ in codec.ARRAYS:
        getattr(decoded, name)[0] = 1
        assert getattr(decoded, name)[0] == 1


def test_numpy_scalars_and_strided_arrays_are_stored_by_value():
    sample = make_sample(1, 0, tokens=6)
    sample.reward = np.float32(0.5)
    sample.logprobs = np.repeat(sample.logprobs, 2)[::2]
    decoded = codec.decode_sample(codec.encode_sample(sample))
    assert decoded.reward == 0.5 and same(decoded.logprobs, np.ascontiguousarray(sample.logprobs))


@pytest.mark.parametrize(
    ("name", "array", "message"),
    [
        ("token_ids", np.zeros(5, np.int64), "token_ids is int64"),
        ("logprobs", np.zeros(4, np.float32), r"logprobs is float32 \(4,\), wanted float32 \(5,\)"),
        ("loss_mask", [1, 1, 1, 1, 1], "loss_mask is list"),
    ],
)
def test_arrays_that_are_not_what_a_sample_says_are_refused(name, array, message):
    sample = make_sample(3, 0)
    setattr(sample, name, array)
    with pytest.raises(DataError, match=message):
        codec.encode_sample(sample)


def test_what_is_no_json_is_refused():
    sample = make_sample(3, 0)
    sample.turns = ({"what": object()},)
    with pytest.raises(DataError, match="cannot store a object"):
        codec.encode_sample(sample)


@settings(max_examples=50)
@given(st.integers(0, 400))
def test_cut_bytes_are_never_taken_for_a_group(length):
    data = codec.encode_group(make_group(Attempt(3, 1, 0, 1), 1))
    if length < len(data) - 16:
        with pytest.raises((StoreCorrupt, ValueError)):
            codec.decode_group(data[:length])


def test_a_large_group_takes_milliseconds():
    group = make_group(Attempt(3, 1, 0, 1), 1, samples=16, tokens=8192)
    best = {"encode": 1.0, "decode": 1.0}
    for _ in range(5):
        began = time.perf_counter()
        data = codec.encode_group(group)
        best["encode"] = min(best["encode"], time.perf_counter() - began)
        began = time.perf_counter()
        codec.decode_group(data)
        best["decode"] = min(best["decode"], time.perf_counter() - began)
    assert max(best.values()) < 0.02
