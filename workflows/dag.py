"""The durable DAG: which node waits for which. Nodes hold no state; running one again does only what is missing.

`max_staleness` is an edge: rollout[k] waits for train[k - 1 - max_staleness]. train[k] waits for train[k - 1], and in the trainer
until the ledger says that its groups are ready, whichever the sampler means: no node is on the way from the last of them to the
training, and what rollout[k] or score[k] fails with ends the window at once. fetch[k] and batch[k] are done by the time that
rollout[k] may begin: with `in_order` fetch[k] waits for the rollout of that training step, and in the fetcher until the step has
taken its groups, which makes room.
"""

from __future__ import annotations

from typing import Any

import ray
from ray import workflow

from deployments.calls import node_call
from pipeline.config.schema import RunConfig
from pipeline.evaluator.admission import INFRASTRUCTURE_CPU


@ray.remote(num_cpus=INFRASTRUCTURE_CPU)
def fetch(run_id: str, step: int, *_after: Any) -> list[int]:
    """Ordinals of the step; fewer than asked for, or none, at the end of the data."""
    return node_call(run_id, "fetcher", f"fetch[{step}]", "fetch", step)


@ray.remote(num_cpus=INFRASTRUCTURE_CPU)
def batch(run_id: str, step: int, ordinals: list[int]) -> list[Any]:
    return node_call(run_id, "batcher", f"batch[{step}]", "batch", step, ordinals)


@ray.remote(num_cpus=INFRASTRUCTURE_CPU)
def rollout(run_id: str, step: int, batches: list[Any], *_after: Any) -> Any:
    return node_call(run_id, "evaluator_pool", f"rollout[{step}]", "rollout", step, batches)


@ray.remote(num_cpus=INFRASTRUCTURE_CPU)
def score(run_id: str, step: int, *_after: Any) -> Any:
    return node_call(run_id, "teacher_scorer", f"score[{step}]", "drain", step)


@ray.remote(num_cpus=INFRASTRUCTURE_CPU)
def train(run_id: str, step: int, *_after: Any) -> Any:
    return node_call(run_id, "trainer", f"train[{step}]", "train", step)


@ray.remote(num_cpus=INFRASTRUCTURE_CPU)
def evaluate(run_id: str, step: int, *_after: Any) -> Any:
    return node_call(run_id, "evaluator_pool", f"evaluate[{step}]", "evaluate", step)


@ray.remote(num_cpus=INFRASTRUCTURE_CPU)
def finish(step: int, *_after: Any) -> int:
    """The window's end: every node of it is done."""
    return step


def _node(function: Any, name: str) -> Any:
    """A failing actor call is the run's failure; what can be retried was retried below, within its budget."""
    return function.options(**workflow.options(task_id=name), max_retries=0)


def window(config: RunConfig, run_id: str, first: int, last: int, evaluate_before: bool) -> Any:
    """The DAG of training steps first..last (1-based). evaluate_before: the evaluation before the first step belongs to it, as in
    the first window, or when a crash left it undone; first = last + 1 is a window of that evaluation alone."""
    fetched: dict[int, Any] = {}
    rolled: dict[int, Any] = {}
    trained: dict[int, Any] = {}
    in_order = config.buffer.sampler == "in_order"
    ends: list[Any] = []
    if evaluate_before:
        ends.append(_node(evaluate, f"evaluate[{first - 1}]").bind(run_id, first - 1))
    for step in range(first, last + 1):
        released_by = step - 1 - config.rollout.max_staleness
        before = (rolled if in_order else trained).get(released_by)
        fetched[step] = _node(fetch, f"fetch[{step}]").bind(run_id, step, before, fetched.get(step - 1))
        batches = _node(batch, f"batch[{step}]").bind(run_id, step, fetched[step])
        rolled[step] = _node(rollout, f"rollout[{step}]").bind(run_id, step, batches, trained.get(released_by))
        ends.append(_node(score, f"score[{step}]").bind(run_id, step, rolled[step]))
        trained[step] = _node(train, f"train[{step}]").bind(run_id, step, trained.get(step - 1))
        if config.evaluation_due(step):
            ends.append(_node(evaluate, f"evaluate[{step}]").bind(run_id, step, trained[step]))
    return _node(finish, f"finish[{last}]").bind(last, trained.get(last), *ends)
