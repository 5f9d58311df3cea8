"""Which steps the windows of a run cover, and which workflow id drives them. The workflows themselves are played."""

from __future__ import annotations

import os
import time

import pytest
import ray

from pipeline.buffer.api import NO_RESULTS
from pipeline.config.schema import RunConfig
from pipeline.errors import EngineError, StageFailed
from pipeline.paths import RunPaths
from workflows import windows
from workflows.windows import Window, end_of_data, run_windows


class Played:
    """A ledger, and workflows that do what they should. `ends_at`: the first step without data. `resumable`: ids in storage.
    `unclosed`: a step whose rollout goes on although later ones are trained. `lose`: runs of a workflow whose manager is killed."""

    def __init__(
        self,
        paths: RunPaths,
        trained: int = 0,
        ends_at: int | None = None,
        resumable: tuple[str, ...] = (),
        unclosed: int | None = None,
        lose: int = 0,
    ) -> None:
        self.lose = lose
        self.paths, self.trained, self.ends_at, self.resumable, self.unclosed = paths, trained, ends_at, resumable, unclosed
        self.facts: list[list[int]] = []
        self.after: list[int] = []
        self.ran: list[tuple[int, int, int]] = []
        self.resumed: list[str] = []
        self.deleted: list[str] = []
        self.evaluated_before: list[int] = []

    async def steps(self, after: int = 0) -> dict:
        self.after.append(after)
        ended = self.ends_at or self.trained + 1
        results = {step: {"end_of_data": step >= ended} for step in range(after + 1, self.trained + 1)}
        first_open = self.unclosed or self.trained + 1
        return {"trained_step": self.trained, "first_open": first_open, "results": results}

    async def set_run(self, state, error=None, **facts) -> None:
        assert facts["workflow_id"] == f"{self.paths.run_id}.r{facts['workflow_number']}"
        self.facts.append(facts["window"])

    async def run(self, window: Window, config, run_id: str, storage, evaluate_before: bool) -> None:
        assert self.facts[-1] == [window.number, window.first, window.last], "recorded before it runs"
        self.ran.append((window.number, window.first, window.last))
        if evaluate_before:
            self.evaluated_before.append(window.first - 1)
        if self.lose:
            self.lose -= 1
            raise windows._NoStageFailed("the actor died")
        self._do(window)

    async def resume(self, window: Window, run_id: str, storage) -> bool:
        self.resumed.append(window.workflow_id(run_id))
        if self.resumed[-1] in self.resumable:
            self._do(window)
            return True
        return False

    def _do(self, window: Window) -> None:
        self.unclosed = None
        self.trained = max(self.trained, window.last)
        for step in (window.first - 1, window.last):
            self.paths.details.mkdir(parents=True, exist_ok=True)
            self.paths.evaluation(step).touch()


def config(steps: int = 100) -> RunConfig:
    return RunConfig.model_validate(
        {"student": {"architecture": {}}, "datasets": {"d": {}}, "algorithm": {"name": "grpo"}, "trainer": {"steps": steps}}
        | {"run": {"window_steps": 40}, "eval": {"every": 0}}
    )


async def drive(played: Played, monkeypatch, facts: dict | None = None, steps: int = 100) -> None:
    monkeypatch.setattr(windows, "_run", played.run)
    monkeypatch.setattr(windows, "_resumed", played.resume)
    monkeypatch.setattr(windows.workflow, "delete", played.deleted.append)
    await run_windows(config(steps), played.paths, played, facts or {}, played.paths.workflow)


@pytest.fixture
def paths(tmp_path) -> RunPaths:
    return RunPaths(tmp_path / "run")


async def test_a_run_goes_on_window_by_window_and_removes_what_is_done(paths, monkeypatch):
    played = Played(paths)
    await drive(played, monkeypatch)
    assert played.ran == [(1, 1, 40), (2, 41, 80), (3, 81, 100)]
    assert played.deleted == ["run.r1", "run.r2", "run.r3"]
    assert played.evaluated_before == [0], "no node runs in two windows"
    assert played.resumed == []
    assert played.after == [NO_RESULTS, 0, 0, 40, 80], "each result is read once"


async def test_an_interrupted_window_is_resumed_under_its_id(paths, monkeypatch):
    played = Played(paths, trained=50, resumable=("run.r2",))
    await drive(played, monkeypatch, {"workflow_number": 2, "window": [2, 41, 80]})
    assert played.resumed == ["run.r2"]
    assert played.ran == [(3, 81, 100)]


async def test_without_its_storage_a_new_id_begins_at_the_first_step_that_is_not_trained(paths, monkeypatch):
    played = Played(paths, trained=50)
    await drive(played, monkeypatch, {"workflow_number": 2, "window": [2, 41, 80]})
    assert played.ran == [(3, 51, 90), (4, 91, 100)]


async def test_a_rollout_that_was_left_open_behind_what_is_trained_is_part_of_the_new_window(paths, monkeypatch):
    """Samplers that take groups of any step train past a straggler; without its node nobody would roll it out again."""
    played = Played(paths, trained=50, unclosed=48)
    await drive(played, monkeypatch, {"workflow_number": 2, "window": [2, 41, 80]})
    assert played.ran == [(3, 48, 90), (4, 91, 100)]


async def test_a_window_whose_steps_are_all_trained_is_resumed_for_what_may_be_missing(paths, monkeypatch):
    played = Played(paths, trained=80, resumable=("run.r2",))
    await drive(played, monkeypatch, {"workflow_number": 2, "window": [2, 41, 80]})
    assert (played.resumed, played.ran) == (["run.r2"], [(3, 81, 100)])


async def test_a_window_before_what_is_trained_is_left_alone(paths, monkeypatch):
    played = Played(paths, trained=85, resumable=("run.r2",))
    await drive(played, monkeypatch, {"workflow_number": 2, "window": [2, 41, 80]})
    assert (played.resumed, played.ran) == ([], [(3, 86, 100)])
    assert played.after[:2] == [NO_RESULTS, 85 - 40], "a resume reads as much after many steps as after few"


async def test_a_window_whose_manager_is_killed_is_resumed(paths, monkeypatch):
    played = Played(paths, resumable=("run.r1",), lose=1)
    await drive(played, monkeypatch)
    assert played.ran == [(1, 1, 40), (2, 41, 80), (3, 81, 100)]
    assert played.resumed == ["run.r1"]


async def test_workflows_that_are_lost_again_without_progress_fail_the_run(paths, monkeypatch):
    played = Played(paths, lose=99)
    with pytest.raises(windows._NoStageFailed, match="the actor died"):
        await drive(played, monkeypatch)
    assert played.ran == [(1, 1, 40), (2, 1, 40)] and played.resumed == ["run.r1"]


async def test_the_end_of_the_data_ends_the_run(paths, monkeypatch):
    played = Played(paths, trained=40, ends_at=38)
    await drive(played, monkeypatch)
    assert played.ran == []
    assert end_of_data((await played.steps())["results"]) == 38


async def test_more_steps_than_before_go_on_behind_the_last(paths, monkeypatch):
    played = Played(paths, trained=100)
    await drive(played, monkeypatch, {"workflow_number": 3, "window": None}, steps=120)
    assert played.ran == [(4, 101, 120)]


async def test_a_missing_last_evaluation_is_made_good(paths, monkeypatch):
    played = Played(paths, trained=100)
    await drive(played, monkeypatch, {"workflow_number": 3})
    assert played.ran == [(4, 101, 100)]
    again = Played(paths, trained=100)
    await drive(again, monkeypatch, {"workflow_number": 4})
    assert again.ran == []


def _failed_node(paths: RunPaths, node: str, error: Exception, age_s: float = 0.0):
    folder = paths.workflow / "workflows" / "run.r1" / "tasks" / node
    folder.mkdir(parents=True)
    file = folder / "exception.pkl"
    file.write_bytes(ray.cloudpickle.dumps(error))
    os.utime(file, (time.time() - age_s,) * 2)


def test_the_failing_nodes_own_exception_is_found(paths):
    _failed_node(paths, "rollout[2]", EngineError("of an earlier life"), age_s=60)
    _failed_node(paths, "train[3]", ray.exceptions.RayTaskError("train", "traceback", StageFailed("trainer", "no memory")))
    found = windows._node_failure(paths.workflow, "run.r1", time.time() - 10)
    assert isinstance(found, StageFailed) and str(found) == "stage trainer: no memory"


def test_a_failure_of_no_kind_of_ours_is_named_after_its_node(paths):
    _failed_node(paths, "train[3]", KeyError("x"))
    assert str(windows._node_failure(paths.workflow, "run.r1", time.time() - 10)) == "stage train[3]: KeyError: 'x'"


def test_no_stage_is_to_blame_when_no_node_failed(paths):
    assert windows._node_failure(paths.workflow, "run.r1", 0.0) is None


@pytest.mark.parametrize(
    "error", [ray.exceptions.ActorDiedError(), ValueError("Failed to look up actor\nThe actor died")], ids=["dying", "gone"]
)
async def test_a_manager_that_dies_while_it_takes_or_removes_a_window_ends_nothing(paths, monkeypatch, error):
    def die(*_, **__):
        raise error

    monkeypatch.setattr(windows.dag, "window", lambda *_: None)
    for call in ("run_async", "resume_async", "delete", "list_all"):
        monkeypatch.setattr(windows.workflow, call, die)
    window = windows.Window(1, 1, 40)
    with pytest.raises(windows._NoStageFailed, match=r"workflow run\.r1 was not begun: The actor died"):
        await windows._run(window, None, "run", paths.workflow, False)
    assert not await windows._resumed(window, "run", paths.workflow)
    await windows._forget("run.r1")
    windows.cancel_windows("run")
