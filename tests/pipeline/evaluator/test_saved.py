"""Saved trajectories are replayed in place of rollouts when that is asked for: the task's own, and nothing else in between."""

from __future__ import annotations

import json

import numpy as np
import pytest

from pipeline.errors import BreakerTripped, ConfigError
from pipeline.evaluator.saved import locate, open_saved
from tests.pipeline.evaluator.parts import Echo, make_config, make_task, world

pytestmark = pytest.mark.looptime


def config(**rollout):
    return make_config(spec={"agent": "single_turn", "resource": {"cpu": 1}}, rollout=rollout)


async def test_a_runs_groups_are_replayed_without_an_engine():
    async with world(config()) as first:
        await first.rollout(1)
        made = await first.groups(0, 1, 2, 3)
        saved = open_saved("run:run", first.paths.root.parent)
        engine = Echo()
        async with world(config(), engine=engine, saved=saved) as w:
            report = await w.rollout(1)
            assert (report.committed, report.attempts, report.tokens, engine.calls) == (4, 4, 0, [])
            assert await w.states() == {"fetched": 4, "ready": 4}
            for old, new in zip(made, await w.groups(0, 1, 2, 3), strict=True):
                assert (new.ordinal, new.step, new.task) == (old.ordinal, 1, old.task)
                for before, after in zip(old.samples, new.samples, strict=True):
                    assert (after.sample_id, after.reward, after.text) == (before.sample_id, before.reward, before.text)
                    np.testing.assert_array_equal(after.token_ids, before.token_ids)
                    np.testing.assert_array_equal(after.logprobs, before.logprobs)
                    assert (after.versions == -1).all()
            again = await w.rollout(1)
            assert (again.already, again.committed) == (4, 0)
        assert open_saved(str(first.paths.root), first.paths.root.parent).source == str(first.paths.root)


async def test_another_ordinal_of_the_same_item_takes_turns_over_what_was_saved(tmp_path):
    lines = [{"task_id": "words/a", "samples": [sample(reward)]} for reward in (0.0, 0.25, 0.5)]
    saved = open_saved(f"file:{write(tmp_path / 'x.jsonl', lines)}", tmp_path)
    async with world(config(), lambda ordinal: make_task(ordinal, task_id="words/a"), saved=saved) as w:
        await w.rollout(1, 4)
        rewards = [group.samples[0].reward for group in await w.groups(0, 1, 2, 3)]
        assert rewards == [0.0, 0.0, 0.25, 0.5]  # 0 in turn; 1, 2 and 3 are the places of the lines themselves


async def test_a_task_that_was_not_saved_is_dropped_and_replaced_and_too_many_end_the_run(tmp_path):
    write(tmp_path / "x.jsonl", [{"task_id": f"words/{item}", "ordinal": item, "samples": [sample(1.0)]} for item in (0, 2, 3, 4)])
    saved = open_saved(str(tmp_path), tmp_path)
    engine = Echo()
    async with world(config(), engine=engine, saved=saved) as w:
        report = await w.rollout(1)
        assert (report.committed, report.replaced, dict(report.dropped)) == (4, 1, {"not_saved": 1})
        with pytest.raises(BreakerTripped, match="20 groups failed in a row .* holds no trajectory of words/"):
            await w.rollout(2)
        assert engine.calls == []


def sample(reward):
    return {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "logprobs": [None, -1.0, -0.5], "reward": reward}


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [None, -1.0]}, "sample 0: 3 token_ids, 3 in loss_mask, 2 logprobs"),
        ({"logprobs": [None, None, -1.0]}, "sample 0: a token that is trained on has no logprob"),
        ({"executor": [0, 2, 0]}, "sample 0: executor is not 1 or 2"),
        ({"token_ids": None}, "TypeError|ValueError"),
    ],
)
def test_a_line_that_is_no_trajectory_is_refused_with_its_place(tmp_path, change, message):
    path = write(tmp_path / "x.jsonl", [{"task_id": "a", "samples": [sample(1.0) | change]}])
    with pytest.raises(ConfigError, match=f"x.jsonl:1: not a trajectory .*({message})"):
        open_saved(f"file:{path}", tmp_path)


def test_who_said_what_is_kept(tmp_path):
    lines = [{"task_id": "a", "samples": [sample(1.0), sample(1.0) | {"executor": [0, 2, 1]}]}]
    group = open_saved(f"file:{write(tmp_path / 'x.jsonl', lines)}", tmp_path).group(make_task(0, task_id="a"), 1, 0, 0)
    assert [made.executor.tolist() for made in group.samples] == [[0, 1, 1], [0, 2, 1]]


def test_what_is_not_there_is_refused_before_anything_starts(tmp_path):
    assert locate("none", tmp_path) == [] and open_saved("none", tmp_path) is None
    for reuse, message in [
        ("run:gone", "no run 'gone'"),
        (f"file:{tmp_path}/x", "no file"),
        (str(tmp_path), ".* holds no .*jsonl"),
    ]:
        with pytest.raises(ConfigError, match=f"rollout.reuse '{reuse}': {message}"):
            locate(reuse, tmp_path)
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ConfigError, match="holds no trajectories"):
        open_saved(f"file:{tmp_path}/empty.jsonl", tmp_path)
