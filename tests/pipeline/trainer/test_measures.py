from __future__ import annotations

import pytest

from pipeline.trainer.measures import rollout_measures
from tests.pipeline.trainer.helpers import make_group


def test_unscored_and_aborted_samples_are_counted_beside_the_mean():
    found = rollout_measures([make_group(0, (1.0, 0.0, None, "abort"), version=3), make_group(1, (1.0,), version=4)], step=5)
    assert (found["total"], found["scored"], found["solved"], found["aborted"]) == (5, 3, 2, 1)
    assert found["reward_mean"] == pytest.approx(2 / 3)
    assert (found["staleness_mean"], found["staleness_max"]) == (0.5, 1)


def test_answers_that_histories_left_out_are_counted():
    group = make_group(0, (1.0, 0.0))
    group.samples[0].turns = ({"dropped_tokens": 3}, {}, {"dropped_tokens": 4})
    assert rollout_measures([group], step=1)["dropped_tokens"] == 7


def test_what_is_not_known_is_none():
    found = rollout_measures([make_group(0, ("abort", "abort"))], step=1)
    assert found["reward_mean"] is None and found["response_tokens_mean"] is None
    assert rollout_measures([], step=1)["staleness_max"] is None
