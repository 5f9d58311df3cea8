from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.config.stages import Filters
from pipeline.records import Group
from pipeline.trainer import filters
from tests.pipeline.trainer.helpers import aborted, make_group, make_sample, make_task

REWARD = st.sampled_from([None, 0.0, 0.5, 1.0])


def refuse_odd(group: Group) -> str | None:
    return "odd" if group.ordinal % 2 else None


@st.composite
def groups(draw) -> list[Group]:
    made = []
    for ordinal in range(draw(st.integers(0, 4))):
        samples = []
        for index in range(draw(st.integers(1, 4))):
            kind = draw(st.sampled_from(["ok", "cut", "abort", "empty"]))
            if kind == "abort":
                samples.append(aborted(ordinal, index))
                continue
            response, reason = (0 if kind == "empty" else 3), ("length" if kind == "cut" else "finish")
            samples.append(make_sample(ordinal, index, reward=draw(REWARD), response=response, finish_reason=reason))
        made.append(Group(ordinal, 1, 1, make_task(ordinal, len(samples)), 0, tuple(samples)))
    return made


@settings(max_examples=60, deadline=None)
@given(
    groups(),
    st.sampled_from(["none", "all", "warmup_only"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, "tests.pipeline.trainer.test_filters:refuse_odd"]),
    st.integers(1, 4),
)
def test_kept_and_dropped_by_reason_add_up_to_the_input(made, rejection, finish_only, zero_advantage, custom, step):
    rules = Filters(rejection=rejection, warmup_steps=3, finish_only=finish_only, zero_advantage=zero_advantage, custom=custom)
    result = filters.apply(made, step, rules)
    samples = {sample.sample_id: sample for group in made for sample in group.samples}
    assert len(result.groups) + sum(result.dropped_groups.values()) == len(made)
    assert len(result.kept) + sum(result.dropped_samples.values()) == len(samples)
    rejecting = rejection == "all" or (rejection == "warmup_only" and step < 3)
    for sample_id in result.kept:
        sample = samples[sample_id]
        assert sample.status == "ok" and sample.loss_mask.any()
        assert not rejecting or (sample.reward is not None and sample.reward > 0)
        assert not finish_only or sample.finish_reason == "finish"
    assert all(any(sample.sample_id in result.kept for sample in group.samples) for group in result.groups)


def test_warmup_only_rejects_before_the_warmup_ends_and_not_at_it():
    made, rules = [make_group(0, (1.0, 0.0))], Filters(rejection="warmup_only", warmup_steps=3)
    assert filters.apply(made, 2, rules).dropped_samples == {"rejected": 1}
    assert filters.apply(made, 3, rules).dropped_samples == {}


def test_a_rejected_sample_is_not_also_unfinished():
    made = [make_group(0, (0.0, 1.0, 1.0), finish_reason="length")]
    result = filters.apply(made, 1, Filters(rejection="all", finish_only=True))
    assert result.dropped_samples == {"rejected": 1, "unfinished": 2}
    assert result.dropped_groups == {"emptied": 1}


def test_zero_advantage_looks_at_scored_samples_only():
    rules = Filters(zero_advantage=True)
    assert filters.drop_reason(make_group(0, (1.0, 1.0, "abort", None)), rules) == "zero_advantage"
    assert filters.drop_reason(make_group(0, (1.0, 0.0, "abort", None)), rules) is None
    assert filters.drop_reason(make_group(0, (1.0, 1.0)), Filters()) is None


def test_a_response_of_no_tokens_is_dropped_by_rule():
    made = [Group(0, 1, 1, make_task(0, 2), 0, (make_sample(0, 0, response=0), make_sample(0, 1)))]
    result = filters.apply(made, 1, Filters())
    assert result.kept == {"0.1"} and result.dropped_samples == {"empty": 1}
    assert np.isnan(made[0].samples[0].logprobs).all()
