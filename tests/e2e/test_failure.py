"""A run that fails says what failed, in one line and in the ledger, and leaves nothing behind."""

import json
import shutil
import time

import pytest

from tests.chaos.witnesses import lines
from tests.e2e.program import adds_up, status

DIES = """
import os

from pipeline.agents.scripted import Scripted


class Dies(Scripted):
    async def run(self, episode):
        os._exit(1)
"""


def test_a_failing_stage_ends_the_run_and_is_named(rollout, tiny):
    failing = "engine.script={tokens: 6, fail_by_ordinal: {4: DataError, 5: DataError, 6: DataError, 7: DataError}}"
    done = rollout.call("run", tiny, failing, "rollout.max_consecutive_failures=3", "--run-id", "r")
    assert done.code == 1, done
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: stage evaluator_pool: ") and "DataError" in line
    assert "Traceback" not in done.err
    assert rollout.processes() == []
    paths = rollout.run("r")
    found = status(paths)
    assert found["state"] == "failed" and "evaluator_pool" in found["error"] and adds_up(found)
    assert json.loads(paths.summary.read_text())["state"] == "failed"


@pytest.mark.fault(9)
def test_workers_that_all_die_at_their_first_call_fail_the_run_within_a_minute(rollout, tiny, tmp_path):
    for file in (tiny, tiny.with_name("words.jsonl")):
        shutil.copy(file, tmp_path)
    (tmp_path / "dies.py").write_text(DIES)
    done = rollout.call("run", tmp_path / tiny.name, "specs=[{agent: 'dies:Dies'}]", "--run-id", "r", timeout_s=120)
    ended = time.time()
    assert done.code == 1, done
    (line,) = [line for line in done.err.splitlines() if line.startswith("error: ")]
    assert line.startswith("error: stage evaluator_pool: every evaluator worker died more than 3 times in a row")
    paths = rollout.run("r")
    assert ended - lines(paths.plays)[0]["t"] < 60, "since the first call"
    assert rollout.processes() == [] and adds_up(status(paths))


def test_the_end_of_the_data_is_an_end_and_says_so(rollout, tiny):
    done = rollout.call("run", tiny, "datasets.words.epochs=1", "rollout.tasks_per_step=16", "trainer.steps=40", "--run-id", "r")
    assert done.code == 0, done
    assert "the data ended before step" in done.out
    found = status(rollout.run("r"))
    assert found["state"] == "finished" and adds_up(found)
    assert found["ordinals"]["trained"] == found["ordinals"]["fetched"] > 40
