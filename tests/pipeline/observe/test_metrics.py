import json
import math
import resource
import signal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.observe.jsonlines import JsonLines, jsonable, read_jsonlines
from pipeline.observe.metrics import MetricsWriter, read_metrics
from tests.pipeline.observe.fakes import results


def test_each_step_is_written_once_and_in_order_over_restarts(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsWriter(path)
    assert first.sync({2: {"loss": 2.0}, 1: {"loss": 1.0}}) == [1, 2]
    assert first.sync({1: {"loss": 9.0}, 2: {"loss": 9.0}}) == []
    again = MetricsWriter(path)
    assert again.step == 2
    assert again.sync({1: {}, 2: {}, 3: {"loss": 3.0}}) == [3]
    assert [(line["step"], line["loss"]) for line in read_metrics(path)] == [(1, 1.0), (2, 2.0), (3, 3.0)]


@given(cut=st.integers(0, 400), junk=st.sampled_from([b"", b"\0\0\0", b'{"step": 3, "lo', b"\n\n", b'"text"\n']))
def test_a_torn_tail_is_repaired_and_nothing_is_lost(tmp_path_factory, cut, junk):
    path = tmp_path_factory.mktemp("torn") / "metrics.jsonl"
    made = results(3)
    MetricsWriter(path).sync(made)
    whole = path.read_bytes()
    path.write_bytes(whole[: max(0, len(whole) - cut)] + junk)
    MetricsWriter(path).sync(made)
    assert path.read_bytes() == whole


def test_a_line_longer_than_the_chunk_is_found_from_behind(tmp_path):
    path = tmp_path / "long.jsonl"
    JsonLines(path).append([{"step": 1, "text": "x" * 200_000}])
    with open(path, "ab") as file:
        file.write(b'{"step": 2, "text": "' + b"y" * 200_000)
    assert JsonLines(path).last["step"] == 1


def test_unmeasured_is_null_and_never_zero(tmp_path):
    path = tmp_path / "metrics.jsonl"
    MetricsWriter(path).sync(
        {1: {"reward_mean": None, "loss": math.nan, "kl": np.float32("inf"), "tokens": np.int64(7), "ok": True}}
    )
    assert json.loads(path.read_text()) == {"step": 1, "reward_mean": None, "loss": None, "kl": None, "tokens": 7, "ok": True}


def test_arrays_and_nested_values_become_json():
    assert jsonable({1: (np.array([1.0, np.nan]), {"a": None})}) == {"1": [[1.0, None], {"a": None}]}


def test_a_line_being_written_is_left_out(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": 1}\n{"t": ')
    assert read_jsonlines(path) == [{"t": 1}]


def test_a_full_disk_is_an_error_and_leaves_whole_lines(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.sync({1: {"loss": 1.0}})
    whole = path.read_bytes()
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 10, limit[1]))
    try:
        with pytest.raises(OSError):
            writer.sync({2: {"loss": 2.0}})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == whole
    assert writer.sync({2: {"loss": 2.0}}) == [2]
