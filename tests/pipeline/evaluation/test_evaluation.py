"""Order, pass@k, summaries and artefacts of evaluations."""

from __future__ import annotations

import json
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import FAILURE_CLASSES, ConfigError
from pipeline.evaluation import details
from pipeline.evaluation.interleave import interleave
from pipeline.evaluation.passk import pass_at_k
from pipeline.evaluation.summary import summarise
from pipeline.records import Sample, Sampling, Stopping, Task, aborted_sample


def make_task(ordinal, dataset="words", samples=1):
    return Task(
        ordinal, f"{dataset}/{ordinal}", dataset, "single_turn", (("user", "hi"),), "ih", "exact", samples,
        Sampling(), Stopping(), 7,
    )  # fmt: skip


def make_sample(task, index=0, reward=1.0, version=3, reason="finish"):
    ones = np.ones(2, np.uint8)
    return Sample(
        f"{task.ordinal}.{index}", index, "ok", reward, np.asarray([1, 2], np.int32), ones, np.zeros(2, np.float32), ones,
        np.full(2, version, np.int32), reason, "ih", turns=({"turn": 0, "tokens": 2, "seconds": 0.5, "node": "n", "gpu": 1},),
    )  # fmt: skip


def make_abort(task, index=0, reason="infra_conn"):
    return aborted_sample(task.ordinal, index, [1], abort_reason=reason, error="E: gone", phase="run")


def test_all_datasets_progress_together():
    tasks = [*(make_task(o, "a", 2) for o in range(2)), *(make_task(o, "b") for o in range(10, 13)), make_task(20, "c")]
    order = [(task.dataset, task.ordinal, index) for task, index in interleave(tasks)]
    assert order == [
        ("a", 0, 0), ("b", 10, 0), ("c", 20, 0), ("a", 0, 1), ("b", 11, 0), ("a", 1, 0), ("b", 12, 0), ("a", 1, 1)
    ]  # fmt: skip


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_draws_that_hold_a_solved_sample(n, data):
    solved, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    draws = list(combinations(range(n), k))
    assert pass_at_k(n, solved, k) == pytest.approx(sum(min(draw) < solved for draw in draws) / len(draws))


def test_pass_at_k_is_stable_for_many_samples():
    assert pass_at_k(100_000, 1, 50_000) == pytest.approx(0.5)
    assert pass_at_k(100_000, 99_999, 1) == pytest.approx(0.99999)


def test_k_above_n_is_refused_with_the_keys():
    with pytest.raises(ConfigError, match=r"pass@5 needs at least 5 samples .* eval\.n .* eval\.k"):
        pass_at_k(4, 1, 5)
    with pytest.raises(ConfigError, match="pass@2"):
        summarise("e", [(make_task(0), make_sample(make_task(0)))], k=(2,))


def test_unscored_samples_are_outside_the_accuracy_and_inside_the_total():
    task = make_task(0, samples=4)
    samples = [make_sample(task, 0), make_sample(task, 1, 0.5), make_sample(task, 2, None), make_abort(task, 3)]
    played = [(task, sample) for sample in samples]
    summary = summarise("e", played, k=(1, 2), min_coverage=0.6, version=3)
    figures = summary["results"]["words"]
    assert (figures["solved"], figures["scored"], figures["total"]) == (1, 2, 4)
    assert (figures["accuracy"], figures["accuracy_all"], figures["coverage"]) == (0.5, 0.25, 0.5)
    assert figures["pass@k"] == {"1": 0.5, "2": 1.0}
    assert summary["valid"] is False and "2 of 4 samples are scored" in summary["why_invalid"][0]
    assert summary["failure_classes"] == dict.fromkeys(FAILURE_CLASSES, 0) | {"solved": 1, "finish_unresolved": 2, "infra": 1}


def test_a_summary_over_two_versions_is_invalid():
    tasks = [make_task(0), make_task(1)]
    mixed = [(tasks[0], make_sample(tasks[0], version=3)), (tasks[1], make_sample(tasks[1], version=4))]
    assert summarise("e", mixed[:1], version=3)["valid"]
    summary = summarise("e", mixed, version=3)
    assert not summary["valid"] and summary["versions"] == [3, 4] and "not 3 alone" in summary["why_invalid"][0]


def test_nothing_measured_is_none_and_not_zero():
    task = make_task(0)
    figures = summarise("e", [(task, make_abort(task))], k=(1,))["results"]["words"]
    assert figures["accuracy"] is None and figures["pass@k"] == {"1": None} and figures["accuracy_all"] == 0.0


def test_the_artefacts_are_whole_and_the_summary_says_so(tmp_path):
    task = make_task(0, samples=2)
    played = [(task, make_sample(task)), (task, make_abort(task, 1))]
    assert details.read_summary(tmp_path / "d", "eval_3") is None
    summary = summarise("eval_3", played, version=3) | {"odd": float("nan")}
    details.write(tmp_path / "d", "eval_3", played, summary)
    lines = [json.loads(line) for line in (tmp_path / "d" / "eval_3.jsonl").read_text().splitlines()]
    heads = [(line["sample_id"], line["class"], line["weight_version"]) for line in lines]
    assert heads == [("0.0", "solved", 3), ("0.1", "infra", None)]
    turns = [json.loads(line) for line in (tmp_path / "d" / "eval_3.turns.jsonl").read_text().splitlines()]
    assert turns == [{"sample_id": "0.0", "task_id": "words/0", "node": "n", "gpu": 1, "turn": 0, "tokens": 2, "seconds": 0.5}]
    assert details.read_summary(tmp_path / "d", "eval_3") == summary | {"odd": None}
    assert len(list((tmp_path / "d").iterdir())) == 3


@pytest.mark.fault(33)
def test_an_evaluation_that_can_no_longer_be_made_is_recorded_as_skipped(tmp_path):
    summary = details.write_skipped(tmp_path / "details", "eval_000004", "version 4 was replaced by 6")
    assert details.read_summary(tmp_path / "details", "eval_000004") == summary
    assert summary["valid"] is False and "replaced by 6" in summary["skipped"]
