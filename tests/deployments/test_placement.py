"""Budgets on a Ray of several nodes with pretended GPUs: the placement group is the layout, and a sample's process is its token."""

from __future__ import annotations

import os
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from ray import serve
from ray.cluster_utils import Cluster
from ray.util.state import list_actors, list_placement_groups

from deployments import placement
from deployments.cluster import SYSTEM
from deployments.engines import replica_options
from deployments.evaluator_worker import EvaluatorWorkerActor
from deployments.names import NAMESPACE
from pipeline.buffer.api import Attempt
from pipeline.cli.runs import write_config
from pipeline.config.loading import read_config
from pipeline.config.models import Launch
from pipeline.config.schema import RunConfig
from pipeline.errors import AdmissionError
from pipeline.evaluator.placement import PlacementPool
from pipeline.evaluator.spec import NodeSpec, Resource
from pipeline.fetcher.catalog import Catalog
from pipeline.paths import RunPaths
from pipeline.records import StepContext
from tests.e2e.program import wait_for

NODES = (NodeSpec("a", (0, 1), cpu=2.0, memory_gb=1.0), NodeSpec("b", (0, 1), cpu=2.0, memory_gb=1.0))
AGENT = '''
import asyncio
import os

from pipeline.agents.scripted import Scripted


class Witness(Scripted):
    """Answers with the GPUs that its process sees, once `together` processes have said that they are there."""

    async def run(self, episode):
        trajectory = await super().run(episode)
        folder = episode.task.metadata["folder"]
        with open(os.path.join(folder, f"{episode.task.ordinal}.{episode.index}"), "w") as file:
            file.write(f"{os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES')}")
        while len(os.listdir(folder)) < episode.task.metadata["together"]:
            await asyncio.sleep(0.02)
        if episode.task.metadata.get("die") == episode.index:
            os._exit(1)
        return trajectory
'''


@serve.deployment
class Engine:
    """In place of one that is launched."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """A run folder whose agent says what it sees."""
    root = tmp_path_factory.mktemp("run")
    paths = RunPaths(root)
    paths.code.mkdir(parents=True)
    (paths.code / "witness.py").write_text(AGENT)
    (paths.code / "words.jsonl").write_text("".join(f'{{"prompt": "say {n}", "answer": "{n}"}}\n' for n in range(20)))
    config = RunConfig.model_validate(
        {
            "student": {"architecture": {"hidden": 16, "layers": 1, "heads": 2, "mlp": 16}},
            "datasets": {"words": {"source": "jsonl", "path": str(paths.code / "words.jsonl"), "verifier": "exact"}},
            "specs": [{"agent": "witness:Witness", "resource": {"gpu": 0.5, "cpu": 0.25, "memory_gb": 0.1}}],
            "algorithm": {"name": "grpo"},
        }
    )
    write_config(paths, config)
    return paths


@pytest.fixture(scope="module")
def cluster(run: RunPaths):
    before = {name: os.environ.get(name) for name in (*SYSTEM, "PYTHONPATH")}
    os.environ.update(SYSTEM | {"PYTHONPATH": str(run.code)})
    head = {"num_cpus": 1, "num_gpus": 0, "include_dashboard": True}  # which answers for Ray's state
    cluster = Cluster(initialize_head=True, head_node_args=head)
    for _ in NODES:
        cluster.add_node(num_cpus=4, num_gpus=3, object_store_memory=80 * 2**20)
    ray.init(address=cluster.address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()
    for name, value in before.items():
        os.environ.pop(name, None) if value is None else os.environ.update({name: value})


@pytest.fixture(scope="module")
def workers(cluster: Cluster, run: RunPaths) -> dict[str, ray.actor.ActorHandle]:
    group = placement.place("layout", NODES, 30.0)
    options = {"num_cpus": 0, "max_concurrency": 100}
    made = {
        node.node: ray.remote(EvaluatorWorkerActor)
        .options(**options, **placement.in_bundle(group, index))
        .remote(str(run.root), node.node, index)
        for index, node in enumerate(NODES)
    }
    ray.get([worker.ready.remote() for worker in made.values()], timeout=60)
    return made


def test_the_group_takes_exactly_the_layout(workers: dict) -> None:
    whole, free = ray.cluster_resources(), ray.available_resources()
    assert whole["GPU"] - free.get("GPU", 0.0) == sum(len(node.gpu_ids) for node in NODES)
    assert whole["CPU"] - free["CPU"] == sum(node.cpu for node in NODES)
    assert whole["memory"] - free["memory"] == sum(node.memory_gb for node in NODES) * placement.GB


def played(workers: dict, run: RunPaths, folder: Path, count: int, gpu: float, **metadata: object) -> tuple[list, list]:
    """`count` samples, each with a token of the pool, all running at the same time. Returns samples and tokens."""
    calls, tokens = play(workers, run, folder, count, gpu, **metadata)
    return ended(calls), tokens


def play(workers: dict, run: RunPaths, folder: Path, count: int, gpu: float, **metadata: object) -> tuple[list, list]:
    """Begin them. Returns the workers' calls, and tokens."""
    folder.mkdir()
    need = Resource(gpu=gpu, cpu=0.25, memory_gb=0.1)
    tokens = PlacementPool(NODES).try_acquire_batch(need.times(count), need, count)
    assert tokens is not None and len(tokens) == count
    task = Catalog(read_config(run.config).config).task(0)
    task = replace(task, samples=count, metadata={"folder": str(folder), "together": count} | metadata)
    calls = []
    for node, worker in workers.items():
        mine = [index for index, token in enumerate(tokens) if token.node == node]
        held = [tokens[index] for index in mine]
        calls.append(worker.run_samples.remote(task, mine, Attempt(0, 1, 0, 1), StepContext(1, 0), held))
    return calls, tokens


def ended(calls: list) -> list:
    return sorted((sample for part in ray.get(calls, timeout=90) for sample in part), key=lambda sample: sample.index)


def alive(**where: str) -> list:
    """Actors, as Ray's state API says."""
    return list_actors(filters=[("state", "=", "ALIVE"), *((name, "=", value) for name, value in where.items())], detail=True)


def seen(folder: Path) -> dict[int, tuple[int, str]]:
    """index -> (pid, CUDA_VISIBLE_DEVICES) of each sample's process."""
    found = {}
    for file in folder.iterdir():
        pid, devices = file.read_text().split()
        found[int(file.suffix[1:])] = (int(pid), devices)
    return found


def test_every_sample_has_a_process_that_sees_the_gpu_of_its_token_and_no_other(
    workers: dict, run: RunPaths, tmp_path: Path
) -> None:
    samples, tokens = played(workers, run, tmp_path / "seen", 8, gpu=0.5)
    assert [sample.status for sample in samples] == ["ok"] * 8
    witnessed = seen(tmp_path / "seen")
    assert len({pid for pid, _ in witnessed.values()}) == 8
    assert {index: devices for index, (_, devices) in witnessed.items()} == {n: str(t.gpu_id) for n, t in enumerate(tokens)}
    assert set(Counter((token.node, token.gpu_id) for token in tokens).values()) == {2}


def test_a_third_of_a_gpu_packs_three_and_ray_counts_them_in_the_bundle(workers: dict, run: RunPaths, tmp_path: Path) -> None:
    folder = tmp_path / "thirds"
    samples, tokens = played(workers, run, folder, 12, gpu=0.33)
    assert [sample.status for sample in samples] == ["ok"] * 12
    assert set(Counter((token.node, token.gpu_id) for token in tokens).values()) == {3}


def test_rays_state_shows_the_group_and_every_worker_and_child_in_its_bundle(workers: dict, run: RunPaths, tmp_path: Path) -> None:
    folder = tmp_path / "held"
    calls, tokens = play(workers, run, folder, 8, gpu=0.5, together=9)
    wait_for(lambda: len(list(folder.iterdir())) == 8, 60.0, "the processes of eight samples")

    (group,) = [found for found in list_placement_groups(detail=True) if found.name == placement.group_name("layout")]
    assert group.state == "CREATED"
    assert [bundle["unit_resources"] for bundle in group.bundles] == [placement.bundle_of(node) for node in NODES]
    standing = alive(placement_group_id=group.placement_group_id)
    children = [actor for actor in standing if actor.class_name == "SampleActor"]
    held = Counter(token.node for token in tokens)
    for index, (node, bundle) in enumerate(zip(NODES, group.bundles, strict=True)):
        here = [actor for actor in standing if actor.node_id == bundle["node_id"]]
        assert Counter(actor.class_name for actor in here) == {"EvaluatorWorkerActor": 1, "SampleActor": held[node.node]}
        asked = [f"{name}_group_{index}_{group.placement_group_id}" for name in ("GPU", "CPU", "memory")]
        for child in (actor for actor in here if actor in children):
            assert [child.required_resources[name] for name in asked] == [0.5, 0.25, int(0.1 * placement.GB)]
    assert {child.pid for child in children} == {pid for pid, _ in seen(folder).values()}
    (folder / "0.go").touch()
    assert [sample.status for sample in ended(calls)] == ["ok"] * 8


def test_rays_state_shows_every_engine_in_a_group_of_its_own(cluster: Cluster) -> None:
    launch = Launch(python=Path(sys.executable), cpus=0.5, gpus=0.5)
    serve.start(proxy_location="Disabled")
    serve.run(Engine.options(**replica_options(2, launch)).bind(), name="engines", route_prefix=None)
    groups = {group.placement_group_id: group for group in list_placement_groups(detail=True)}
    own = [groups[replica.placement_group_id] for replica in alive(class_name="ServeReplica:engines:Engine")]
    assert [[bundle["unit_resources"] for bundle in group.bundles] for group in own] == [[{"CPU": 0.5, "GPU": 0.5}]] * 2
    assert len({group.placement_group_id for group in own}) == 2
    serve.delete("engines")


def test_the_death_of_a_samples_process_costs_that_sample_alone(workers: dict, run: RunPaths, tmp_path: Path) -> None:
    samples, tokens = played(workers, run, tmp_path / "dies", 4, gpu=0.5, die=2)
    assert [sample.status for sample in samples] == ["ok", "ok", "aborted", "ok"]
    lost = samples[2]
    assert lost.reward is None and lost.abort_reason == "infra_conn" and not lost.loss_mask.any()
    assert (lost.phase, lost.node) == ("run", tokens[2].node) and lost.seconds > 0


def test_a_layout_that_ray_cannot_give_is_refused_with_what_it_has(cluster: Cluster) -> None:
    with pytest.raises(AdmissionError, match=r"'GPU': 9.0.*Ray has"):
        placement.place("greedy", (NodeSpec("c", tuple(range(9)), 1.0, 1.0),), timeout_s=0.5)
