"""Agents are found by name, and the scripted one does what its script says."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from pipeline.agents.base import Episode
from pipeline.agents.loading import load_agent
from pipeline.agents.scripted import Scripted, script_of
from pipeline.errors import ConfigError, DataError, SandboxError
from pipeline.records import Sampling, StepContext, Stopping, Task


class Letters:
    def render(self, messages):
        return np.asarray([ord(letter) for _, content in messages for letter in content], np.int32)

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))


def make_episode(script, index=0, attempt=0, stopping=None):
    task = Task(
        5, "w/5", "w", "single_turn", (("user", "hi"),), "ih", "exact", 2, Sampling(), stopping or Stopping(), 7,
        metadata={"script": script},
    )  # fmt: skip
    return Episode(task, index, StepContext(4, min_version=2), None, Letters(), attempt)


async def play(script, **where):
    agent, episode = Scripted(), make_episode(script, **where)
    await agent.init(episode)
    trajectory = await agent.run(episode)
    reward = await agent.verify(episode, trajectory)
    await agent.cleanup(episode)
    return trajectory, reward


def test_short_names_and_references_are_found_and_others_refused_with_the_nearest():
    assert type(load_agent("single_turn")()).__name__ == "SingleTurn"
    assert load_agent("pipeline.agents.scripted:Scripted") is Scripted
    with pytest.raises(ConfigError, match="did you mean 'single_turn'"):
        load_agent("single_trun")


@pytest.mark.looptime
async def test_turns_tokens_times_and_rewards_follow_the_script():
    times = {"init_s": 1, "run_s": 2, "verify_s": 3, "cleanup_s": 4}
    trajectory, reward = await play(times | {"turns": 2, "tokens": 3, "reward": 0.5, "finish_reason": "max_turns"})
    assert asyncio.get_running_loop().time() == 1 + 2 * 2 + 3 + 4
    assert trajectory.loss_mask == [0, 0, 1, 1, 1, 0, 1, 1, 1] and trajectory.versions[2] == 2
    assert (reward, trajectory.finish_reason) == (0.5, "max_turns")


async def test_one_ordinal_one_sample_and_the_first_attempts_can_be_told_apart():
    script = {
        "reward": 1.0,
        "by_ordinal": {"5": {"reward": 0.0}, "6": {"reward": 0.25}},
        "by_index": {"1": {"fail_phase": "run", "fail": "SandboxError", "fail_attempts": 1}},
    }
    assert (await play(script))[1] == 0.0
    with pytest.raises(SandboxError, match="scripted fault in run of 5.1"):
        await play(script, index=1)
    assert (await play(script, index=1, attempt=1))[1] == 0.0


async def test_a_leaked_cancellation_and_a_hang_can_be_played():
    with pytest.raises(asyncio.CancelledError):
        await play({"fail_phase": "verify", "fail": "cancel"})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(play({"fail_phase": "cleanup", "fail": "hang"}), 0.01)


def test_a_script_with_an_unknown_field_is_the_items_fault():
    with pytest.raises(DataError, match="no field 'rewad'"):
        script_of(make_episode({"rewad": 1}).task, 0)


@pytest.mark.parametrize(
    ("stopping", "script", "turns", "reason"),
    [
        ({"max_turns": 3}, {}, 3, "max_turns"),
        ({"max_context": 2 + 4 + 5}, {}, 2, "context_overflow"),
        ({"max_repeats": 2}, {"repeats": True}, 2, "repeated_action_loop"),
        ({"max_repeats": 2}, {}, 9, "finish"),
    ],
)
async def test_stopping_ends_the_episode_whatever_the_script_says(stopping, script, turns, reason):
    trajectory, _ = await play({"turns": 9, "tokens": 4, **script}, stopping=Stopping(**stopping))
    assert (sum(trajectory.loss_mask) // 4, trajectory.finish_reason) == (turns, reason)
