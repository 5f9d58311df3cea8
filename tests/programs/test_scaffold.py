"""Programs that were not written for this play repair tasks, and what they are answered is captured token by token."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from pipeline.agents.base import Trajectory
from pipeline.agents.commands import block
from pipeline.agents.loading import load_agent
from pipeline.engines.base import Completion
from pipeline.errors import ConfigError
from pipeline.records import STUDENT, TEACHER, StepContext
from pipeline.sandboxes.local import MISSING
from tests.pipeline.agents.repairing import DOWN, MEND, World

LOOK = block("cat a.py")


@pytest.fixture(autouse=True)
def needed() -> None:
    if shutil.which("bwrap") is None:
        pytest.skip(MISSING)


def world_of(folder: Path, how: str, algorithm: str = "grpo", **stopping: Any) -> World:
    return World(folder, [DOWN], algorithm, f"tests.pipeline.agents.repairing:{how}", **stopping)


async def test_a_program_solves_the_task_and_every_token_is_captured_as_it_was_sampled(tmp_path: Path):
    world = world_of(tmp_path, "append")
    sample, student = await world.play("I look. " + LOOK, block(MEND), block("submit"))
    assert (sample.status, sample.reward, sample.finish_reason) == ("ok", 1.0, "finish")
    assert "+    return x - 1\n" in sample.text
    assert [turn["action"] for turn in sample.turns] == ["cat a.py", MEND, None]
    assert sample.turns[0]["output"] == DOWN["files"]["a.py"] and sample.turns[0]["executor"] == "student"
    for earlier, later in zip(student.prompts, student.prompts[1:], strict=False):
        assert later[: len(earlier)].tolist() == earlier.tolist()
    whole = world.renderer.render(
        (
            ("system", "Repair."),
            ("user", DOWN["problem_statement"]),
            ("assistant", "I look. " + LOOK),
            ("user", DOWN["files"]["a.py"]),
            ("assistant", block(MEND)),
            ("user", ""),
        )
    )
    assert student.prompts[2].tolist() == whole.tolist() == sample.token_ids[: len(whole)].tolist()
    said = sample.loss_mask == 1
    assert world.renderer.decode(sample.token_ids[said]) == "I look. " + LOOK + block(MEND) + block("submit")
    assert (sample.logprobs[said] == -1.0).all() and np.isnan(sample.logprobs[~said]).all()
    assert (sample.executor[said] == STUDENT).all() and (sample.versions[said] == 0).all()


async def test_answers_that_a_rewritten_history_leaves_out_are_dropped_and_counted(tmp_path: Path):
    world = world_of(tmp_path, "forget")
    sample, student = await world.play(LOOK, block("ls"), block(MEND), block("submit"))
    assert (sample.status, sample.reward) == ("ok", 1.0)
    said = [world.renderer.encode_text(line).tolist() for line in (LOOK, block("ls"), block(MEND), block("submit"))]
    dropped = [turn.get("dropped_tokens", 0) for turn in sample.turns]
    assert dropped == [0, 0, len(said[0]) + len(said[1]) + 2, len(said[2]) + 1]
    last = [*student.prompts[3].tolist(), *said[3], world.renderer.eos_token_id]
    assert sample.token_ids.tolist() == last
    assert world.renderer.decode(sample.token_ids[sample.loss_mask == 1]) == block("submit")


async def test_a_question_that_is_asked_again_drops_its_first_answer_alone(tmp_path: Path):
    sample, _ = await world_of(tmp_path, "retry").play(
        LOOK, LOOK + " ", block(MEND), block(MEND) + " ", block("submit"), block("submit")
    )
    assert sample.reward == 1.0
    assert [turn.get("dropped_tokens", 0) > 0 for turn in sample.turns] == [False, True, False, True, False, True]
    assert sum(sample.loss_mask) == sum(turn["tokens"] for turn in sample.turns[1::2])


@pytest.mark.parametrize(
    ("stopping", "lines", "reason"),
    [
        ({"max_turns": 2}, [LOOK, block("pwd")], "max_turns"),
        ({"max_repeats": 3}, [block("ls")], "repeated_action_loop"),
        ({"max_context": 150}, [LOOK, block("cat a.py a.py a.py"), block("pwd")], "context_overflow"),
        ({"max_seconds": 8}, [block("sleep 30"), block("sleep 31")], "agent_timeout"),
    ],
)
async def test_what_ends_an_episode_ends_the_program(
    tmp_path: Path, programs, stopping: dict[str, Any], lines: list[str], reason: str
):
    sample, _ = await world_of(tmp_path, "append", **stopping).play(*lines)
    assert (sample.status, sample.finish_reason, sample.reward) == ("ok", reason, 0.0)
    assert not programs()


@pytest.mark.parametrize(
    ("how", "error"), [("fail", "exit code 1: RuntimeError: out of ideas"), ("silent", "without asking the model")]
)
async def test_a_program_that_fails_or_never_asks_is_no_sample(tmp_path: Path, how: str, error: str):
    sample, _ = await world_of(tmp_path, how).play(LOOK)
    assert (sample.status, sample.abort_reason, sample.phase) == ("aborted", "data", "run") and error in sample.error
    assert not sample.loss_mask.any()


async def test_a_program_that_hangs_goes_with_all_that_it_started(tmp_path: Path, programs):
    sample, _ = await world_of(tmp_path, "hang", max_seconds=5).play(LOOK)
    assert (sample.finish_reason, sample.reward, len(sample.token_ids)) == ("agent_timeout", 0.0, 0)
    assert not programs() and not [p for p in psutil.process_iter(["cmdline"]) if p.info["cmdline"] == ["sleep", "8181"]]


async def test_an_engine_that_fails_is_the_engines_fault(tmp_path: Path):
    world = world_of(tmp_path, "append")
    sample, _ = await world.play()
    assert (sample.status, sample.phase) == ("aborted", "run") and "IndexError" in sample.error


async def test_a_teacher_may_act_behind_the_endpoint(tmp_path: Path):
    sample, _ = await world_of(tmp_path, "append", "dagger").play("?", context=StepContext(1, beta=1.0))
    assert sample.reward == 1.0 and (sample.executor[sample.loss_mask == 1] == TEACHER).all()


def test_a_scaffold_that_is_not_installed_is_one_clear_line(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("pipeline.agents.loading.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"agent 'mini-swe-agent' is not installed: pip install -e '\.\[scaffold\]'"):
        load_agent("mini-swe-agent")


def test_an_answer_of_which_a_part_is_left_is_context():
    trajectory = Trajectory()
    trajectory.append_context(np.asarray([1, 2], np.int32))
    trajectory.append_completion(Completion("0", np.asarray([3, 4, 5], np.int32), np.zeros(3, np.float32), "stop", 7))
    assert trajectory.go_back_to(np.asarray([1, 2, 3, 4, 5, 6], np.int32)) == 0 and trajectory.loss_mask == [0, 0, 1, 1, 1]
    assert trajectory.go_back_to(np.asarray([1, 2, 3, 9], np.int32)) == 3
    assert (trajectory.token_ids, trajectory.loss_mask, trajectory.versions) == ([1, 2, 3], [0, 0, 0], [-1, -1, -1])


@pytest.fixture
def programs() -> Callable[[], list[psutil.Process]]:
    """What lives below this process and did not before the test."""
    before = set(psutil.Process().children(recursive=True))
    return lambda: [process for process in psutil.Process().children(recursive=True) if process not in before]
