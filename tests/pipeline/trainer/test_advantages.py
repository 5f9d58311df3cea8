from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.trainer.advantages import STD_EPS, group_advantages

REWARDS = st.lists(st.one_of(st.none(), st.sampled_from([0.0, 0.07, 0.5, 1.0])), max_size=8)


@given(REWARDS, st.booleans())
def test_equals_plain_loops(rewards, std):
    scored = [r for r in rewards if r is not None]
    mean = sum(scored) / len(scored) if scored else 0.0
    deviation = math.sqrt(sum((r - mean) ** 2 for r in scored) / len(scored)) if scored else 0.0
    scale = deviation + STD_EPS if std else 1.0
    for reward, advantage in zip(rewards, group_advantages(rewards, std=std), strict=True):
        if reward is None:
            assert advantage is None
        else:
            assert advantage == pytest.approx((reward - mean) / scale, abs=1e-9)


@given(REWARDS, st.booleans(), st.integers(0, 8))
@pytest.mark.fault(17)
def test_a_sample_without_a_reward_changes_nobodys_advantage(rewards, std, place):
    with_one_more = [*rewards[:place], None, *rewards[place:]]
    found = group_advantages(with_one_more, std=std)
    del found[min(place, len(rewards))]
    assert found == group_advantages(rewards, std=std)


def test_a_lone_scored_sample_has_no_advantage():
    assert group_advantages([1.0, None], std=True) == [0.0, None]
