"""A run on a Ray cluster that exists. Invariant: the run takes what it names, and when it leaves nothing of it is left there.

Every node must see the run folder under the same path and have this package installed; stages that own the folder stay on the
driver's node. Every node must be started with workflow storage: `ray start --storage=file:///folder/all/nodes/see`.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from pathlib import Path
from urllib.parse import urlparse

import ray
from ray import serve
from ray._private import storage
from ray._private.state import available_resources_per_node
from ray.serve.context import _set_global_client
from ray.util import get_placement_group, list_named_actors, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.cluster import SYSTEM
from deployments.names import NAMESPACE, temporary_folder
from deployments.placement import GB, group_name
from pipeline.config.training import Ray
from pipeline.errors import ConfigError
from pipeline.evaluator.admission import INFRASTRUCTURE_CPU
from pipeline.evaluator.machine import Machine
from pipeline.evaluator.spec import NodeSpec
from pipeline.paths import RunPaths

ANSWER_S = 30.0


@ray.remote(num_cpus=INFRASTRUCTURE_CPU, max_retries=0)
def _storage() -> str:
    """Of the node that it runs on."""
    return storage._get_storage_uri() or ""


class JoinedCluster:
    def __init__(self, paths: RunPaths, settings: Ray) -> None:
        self._paths = paths
        self._address = settings.address

    def start(self) -> None:
        """Connect, and end what an earlier driver of the run left there."""
        os.environ.update(SYSTEM)
        try:
            ray.init(address=self._address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
        except ConnectionError as error:
            raise ConfigError(f"run.ray.address {self._address!r}: no cluster answers there") from error
        self._leave()

    def machine(self) -> Machine:
        """What the cluster has left, node by node: what others hold cannot be promised again."""
        free = available_resources_per_node()
        alive = [node for node in ray.nodes() if node["Alive"]]
        names = [node["NodeManagerHostname"] for node in alive]
        return Machine.of(
            tuple(
                _node(name if names.count(name) == 1 else f"{name}-{node['NodeID'][:6]}", free.get(node["NodeID"], {}))
                for name, node in zip(names, alive, strict=True)
            )
        )

    def storage(self) -> Path:
        """Where the cluster keeps workflows. Raises ConfigError when a node keeps none, or not in a folder."""
        for node in (node for node in ray.nodes() if node["Alive"]):
            here = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            asked = _storage.options(scheduling_strategy=here).remote()
            uri = urlparse(ray.get(asked, timeout=ANSWER_S))
            if uri.scheme not in ("file", "custom"):
                raise ConfigError(
                    f"run.ray.address {self._address!r}: node {node['NodeManagerHostname']} keeps workflows"
                    f" {'in ' + uri.geturl() if uri.scheme else 'nowhere'}; start every node of the cluster with `ray start"
                    " --storage=file:///folder/all/nodes/see`"
                )
        return Path(uri.path)

    def processes(self) -> list:
        """None of the cluster's processes is this run's to end by pid."""
        return []

    def services(self) -> dict:
        """Nor to watch: they may be on other machines."""
        return {}

    def stop(self) -> None:
        if not ray.is_initialized():
            return
        self._leave()
        ray.shutdown()
        _set_global_client(None)

    def _leave(self) -> None:
        """End the run's actors, engines and placement group, by name. The stage actors had their channels on this node."""
        mine = f"{self._paths.run_id}:"
        for actor in list_named_actors(all_namespaces=True):
            if actor["namespace"] == NAMESPACE and actor["name"].startswith(mine):
                with contextlib.suppress(ValueError):  # it ended by itself meanwhile
                    ray.kill(ray.get_actor(actor["name"], namespace=NAMESPACE))
        if any(actor["namespace"] == "serve" for actor in list_named_actors(all_namespaces=True)):
            for app in [name for name in serve.status().applications if name.startswith(mine)]:
                serve.delete(app)
        with contextlib.suppress(ValueError):  # there is none
            remove_placement_group(get_placement_group(group_name(self._paths.run_id)))
        shutil.rmtree(temporary_folder(self._paths), ignore_errors=True)


def _node(name: str, free: dict[str, float]) -> NodeSpec:
    gpus = tuple(range(int(free.get("GPU", 0.0))))
    return NodeSpec(name, gpus, free.get("CPU", 0.0), math.floor(free.get("memory", 0.0) / GB * 100) / 100)
