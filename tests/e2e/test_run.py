"""One small run from the command to its last file. Everything here looks at the same run."""

import json
import math
import time
from dataclasses import dataclass

import pytest

from pipeline.buffer.reader import read_facts
from pipeline.paths import RunPaths
from tests.e2e.program import STAGES, Done, adds_up, status, title_of, trained_as_planned, wait_for

STEPS, TASKS = 5, 4


@dataclass
class Finished:
    done: Done
    paths: RunPaths
    seconds: float
    pids: dict[str, int]
    """Of the stages, by their own reports, while they ran."""
    titles: set[str]
    left: list
    """Processes of the run after its end."""


@pytest.fixture(scope="module")
def finished(shared_rollout, tiny) -> Finished:
    begun = time.monotonic()
    command = shared_rollout.start("run", tiny, "--run-id", "one")
    paths = shared_rollout.run("one")

    def all_report() -> dict[str, int]:
        stages = (status(paths) or {"stages": {}})["stages"]
        return {name: facts["pid"] for name, facts in stages.items()} if set(STAGES) <= set(stages) else {}

    pids = wait_for(all_report, 60, "a report of every stage", command)
    titles = {title_of(process).split(".")[0] for process in shared_rollout.processes()}
    done = command.done(60)
    return Finished(done, paths, time.monotonic() - begun, pids, titles, shared_rollout.processes())


def test_it_ends_well(finished):
    assert finished.done.code == 0, finished.done.err
    assert finished.seconds < 45
    assert finished.left == []


def test_what_it_says_on_stdout(finished):
    first, *rest = finished.done.out.splitlines()
    assert first == f"run one {finished.paths.root}"
    assert rest and rest[0].startswith("╭") and rest[-1].startswith("╰")
    assert all(line.startswith(("╭", "│", "╰")) for line in rest)
    for text in ("finished", "groups", "report.html", "first trained step"):
        assert text in finished.done.out


def test_stderr_holds_no_noise(finished):
    assert "step 5/5" in finished.done.err
    for noise in ("Traceback", "Warning", "WARN", "INFO"):
        assert noise not in finished.done.err


def test_six_processes_of_six_stages(finished):
    assert len({finished.pids[stage] for stage in STAGES}) == 6
    for name in ("ReplayBuffer", "TrainerActor", "TeacherScorerActor", "EvaluatorPoolActor", "FetcherActor", "BatcherActor"):
        assert f"ray::{name}" in finished.titles
    for name in ("student", "teacher:teacher"):
        assert f"ray::ServeReplica:one:{name}:Engine" in finished.titles


def test_the_run_folder_holds_what_the_contract_names(finished):
    root = finished.paths.root
    for name in ("config.yaml", "run.db", "run.lock", "groups", "workflow", "metrics.jsonl", "report.html", "summary.json"):
        assert (root / name).exists(), name
    for folder in ("checkpoints", "tensorboard", "eval_details", "log"):
        assert list((root / folder).iterdir()), folder
    assert (root / "workflow").stat().st_mode & 0o077 == 0
    for name in ("config.json", "tokenizer.json", "trainer_state.pt", "manifest.json"):
        assert (finished.paths.checkpoint(STEPS) / name).is_file(), name
    assert [json.loads(line)["step"] for line in finished.paths.metrics.read_text().splitlines()] == list(range(1, STEPS + 1))
    assert str(root) not in finished.paths.config.read_text(), "a run folder can be moved"


def test_status_adds_up(finished, shared_rollout):
    done = shared_rollout.call("status", "one", "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert found["state"] == "finished" and found["error"] is None
    assert (found["step"], found["steps"], found["weight_version"], found["checkpoint_step"]) == (STEPS, STEPS, STEPS, STEPS)
    assert adds_up(found)
    assert found["ordinals"]["fetched"] == found["ordinals"]["trained"] == STEPS * TASKS
    assert found["attempts"] == {"started": STEPS * TASKS, "lost": 0, "late": 0, "regenerated": 0}
    assert found["capacity"] == {"total": 8, "used": 0}
    assert found["dropped_by_reason"] == {}
    assert set(found["stages"]) == set(STAGES)
    assert all({"actor", "pid", "node", "in", "out", "backlog", "oldest_s"} <= set(facts) for facts in found["stages"].values())
    # five nodes a step, and the evaluations before the first and after the last step
    assert found["workflow"] == {"id": "one.r1", "nodes_done": 5 * STEPS + 2, "nodes_rerun": 0}
    assert trained_as_planned(finished.paths, STEPS, TASKS)


def test_summary(finished):
    summary = json.loads(finished.paths.summary.read_text())
    wanted = {"accuracy_before", "accuracy_after", "accuracy_teacher", "by_dataset", "steps", "ordinals", "dropped_by_reason"}
    assert wanted | {"seconds", "first_step_s", "versions"} <= set(summary)
    assert summary["steps"] == STEPS
    assert summary["accuracy_after"] == 0.0 and summary["accuracy_teacher"] is None, "unscored is not zero"
    assert set(summary["seconds"]) == set(STAGES)
    assert 0 < summary["first_step_s"] < finished.seconds
    assert summary["observer_errors"] == {}


def test_the_checkpoint_is_a_model(finished):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(finished.paths.checkpoint(STEPS))
    logits = model(torch.tensor([[1, 2, 3]])).logits
    assert logits.shape[:2] == (1, 3) and math.isfinite(logits.sum().item())


def test_finished_windows_leave_nothing_in_workflow_storage(finished):
    assert read_facts(finished.paths)["workflow_number"] == 1
    left = (file for file in (finished.paths.workflow / "workflows").rglob("*") if not file.is_dir())
    assert list(left) == []


def test_a_finished_run_is_not_run_again(finished, shared_rollout, tiny):
    before = finished.paths.database.read_bytes()
    again = shared_rollout.call("run", tiny, "--run-id", "one")
    assert (again.code, again.out, len(again.err.splitlines())) == (2, "", 1)
    assert "run 'one' exists already" in again.err
    assert finished.paths.database.read_bytes() == before
