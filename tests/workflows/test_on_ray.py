"""What the driver asks of Ray Workflow, on a Ray of the test's own."""

from __future__ import annotations

import asyncio
import time

import pytest
from ray import workflow

from deployments import cluster
from pipeline.config.training import Ray
from pipeline.errors import EngineError, StageFailed
from pipeline.paths import RunPaths
from workflows import dag, windows
from workflows.storage import storage_uri
from workflows.windows import Window

FIRST, SECOND = Window(1, 1, 1), Window(2, 2, 2)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    made = RunPaths(tmp_path_factory.mktemp("workflow") / "run")
    made.root.mkdir()
    cluster.start(made, Ray(num_cpus=2), storage_uri(made.workflow))
    yield made
    cluster.stop(made)


@dag.ray.remote(num_cpus=0.01)
def fails() -> None:
    raise EngineError("no memory")


@dag.ray.remote(num_cpus=0.01)
def waits() -> None:
    time.sleep(600)


async def run(graph, window: Window, paths: RunPaths) -> None:
    reference = await asyncio.to_thread(lambda: workflow.run_async(graph, workflow_id=window.workflow_id("run")))
    await windows._ended(reference, paths.workflow, window.workflow_id("run"), time.time() - 1)


async def test_a_window_that_had_ended_is_resumed_at_once(paths):
    """A kill between the end of a window and its removal leaves this."""
    await asyncio.wait_for(run(dag._node(dag.finish, "finish[1]").bind(1), FIRST, paths), 60)
    for _ in range(2):
        assert await asyncio.wait_for(windows._resumed(FIRST, "run", paths.workflow), 30)


async def test_without_its_storage_it_cannot_be_resumed(paths):
    assert not await asyncio.wait_for(windows._resumed(Window(7, 1, 1), "run", paths.workflow), 30)


async def test_a_failing_node_is_named_with_its_own_error(paths):
    graph = dag._node(dag.finish, "finish[2]").bind(2, dag._node(fails, "train[2]").bind())
    with pytest.raises((EngineError, StageFailed), match="no memory") as caught:
        await asyncio.wait_for(run(graph, SECOND, paths), 60)
    assert len(str(caught.value).splitlines()) == 1


async def test_a_node_that_waits_does_not_hold_up_the_failure_of_another(paths):
    """As a training step waits for the groups of a rollout that fails."""
    after = [dag._node(waits, "train[3]").bind(), dag._node(fails, "rollout[3]").bind()]
    with pytest.raises((EngineError, StageFailed), match="no memory"):
        await asyncio.wait_for(run(dag._node(dag.finish, "finish[3]").bind(3, *after), Window(3, 3, 3), paths), 60)
