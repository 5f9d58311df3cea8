"""mini-swe-agent itself, where the extra `scaffold` is installed: real package, endpoint and sandbox, a student of few words."""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from pipeline.sandboxes.local import MISSING
from tests.pipeline.agents.repairing import DOWN, MEND, World

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("minisweagent") is None, reason="did not run: mini-swe-agent (extra scaffold) is not installed"),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason=f"did not run: {MISSING}"),
]


def said(command: str) -> str:
    return f"THOUGHT: so.\n\n```mswea_bash_command\n{command}\n```"


async def test_it_solves_a_task_and_what_it_drops_is_counted(tmp_path: Path):
    world = World(tmp_path, [DOWN], "grpo", "mini-swe-agent")
    lines = [said("cat a.py"), "no command", said(MEND), said("echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT")]
    sample, student = await world.play(*lines)
    assert (sample.status, sample.reward, sample.finish_reason) == ("ok", 1.0, "finish"), sample.error
    assert "+    return x - 1\n" in sample.text
    # it takes an answer that holds no command out of its history, and that one alone is dropped
    dropped = [turn.get("dropped_tokens", 0) for turn in sample.turns]
    assert dropped == [0, 0, len(world.renderer.encode_text("no command")) + 1, 0]
    for earlier, later in ((0, 1), (2, 3)):
        before = student.prompts[earlier]
        assert student.prompts[later][: len(before)].tolist() == before.tolist()
    trained = world.renderer.decode(sample.token_ids[sample.loss_mask == 1])
    assert trained == lines[0] + lines[2] + lines[3]
