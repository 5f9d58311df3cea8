"""A run that fails says what failed, in one line and in the ledger, and leaves nothing behind."""

import json

from tests.e2e.program import adds_up, status


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


def test_the_end_of_the_data_is_an_end_and_says_so(rollout, tiny):
    done = rollout.call("run", tiny, "datasets.words.epochs=1", "rollout.tasks_per_step=16", "trainer.steps=40", "--run-id", "r")
    assert done.code == 0, done
    assert "the data ended before step" in done.out
    found = status(rollout.run("r"))
    assert found["state"] == "finished" and adds_up(found)
    assert found["ordinals"]["trained"] == found["ordinals"]["fetched"] > 40
