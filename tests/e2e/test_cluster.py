"""Runs on a Ray cluster that was there before them, of two nodes: they take what is free, and leave nothing behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.util import list_named_actors, placement_group, placement_group_table, remove_placement_group

from deployments.cluster import SYSTEM
from tests.e2e.program import Program, status, step, wait_for

NODE_CPUS = 2


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    before = {name: os.environ.get(name) for name in SYSTEM}
    os.environ.update(SYSTEM)
    node = {"num_cpus": NODE_CPUS, "storage": f"file://{tmp_path_factory.mktemp('storage')}"}
    made = Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    made.add_node(**node)
    ray.init(address=made.address, namespace="test", log_to_driver=False, configure_logging=False)
    yield made
    ray.shutdown()
    made.shutdown()
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


def run(rollout: Program, tiny: Path, cluster: Cluster, name: str, *more: str):
    return rollout.start("run", tiny, f"run.ray.address={cluster.address}", "--run-id", name, *more)


def left_of(name: str) -> list[str]:
    """Actors and placement groups."""
    groups = [group["name"] for group in placement_group_table().values() if group["state"] != "REMOVED"]
    actors = [actor["name"] for actor in list_named_actors(all_namespaces=True)]
    return [found for found in (*actors, *groups) if found.startswith(f"{name}:")]


def test_a_run_joins_takes_what_is_free_and_leaves_nothing(cluster: Cluster, rollout: Program, tiny: Path) -> None:
    free = ray.available_resources()["CPU"]
    done = run(rollout, tiny, cluster, "joined").done(120)
    assert done.code == 0, done.err
    assert status(rollout.run("joined"))["ordinals"]["trained"] == 20
    assert left_of("joined") == []
    assert ray.available_resources()["CPU"] == pytest.approx(free, abs=0.2)  # the workflow manager and Serve's controller stay


def test_what_another_holds_is_not_promised_again(cluster: Cluster, rollout: Program, tiny: Path) -> None:
    others = placement_group([{"CPU": 1}] * 2, strategy="STRICT_SPREAD")
    assert others.wait(20)
    try:
        done = run(rollout, tiny, cluster, "crowded", "layout.nodes.a.cpu=2", "layout.nodes.a.memory_gb=0.1").done(60)
    finally:
        remove_placement_group(others)
    assert done.code == 2 and "layout.nodes.a asks for" in done.err, done.err
    assert "Traceback" not in done.err and left_of("crowded") == []


def test_a_killed_driver_is_followed_by_a_resume_that_ends_what_it_left(cluster: Cluster, rollout: Program, tiny: Path) -> None:
    driver = run(rollout, tiny, cluster, "killed", "trainer.steps=12")
    wait_for(lambda: step(rollout.run("killed")) >= 2, 90.0, "step 2", driver)
    driver.send(signal.SIGKILL)
    driver.process.wait(10)
    done = rollout.start("resume", "killed").done(120)
    assert done.code == 0, done.err
    found = status(rollout.run("killed"))
    assert found["ordinals"]["trained"] == 48 and found["attempts"]["regenerated"] == 0
    assert left_of("killed") == []
