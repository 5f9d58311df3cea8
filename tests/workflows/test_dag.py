"""Which node waits for which. Graphs are built, not run."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.config.schema import RunConfig
from workflows import dag


def config(steps: int = 6, every: int = 0, staleness: int = 1, sampler: str = "in_order") -> RunConfig:
    return RunConfig.model_validate(
        {
            "student": {"architecture": {}},
            "teachers": {"big": {"engine": "fixed_cost"}},
            "datasets": {"d": {}},
            "rollout": {"max_staleness": staleness},
            "buffer": {"sampler": sampler},
            "trainer": {"steps": steps},
            "eval": {"every": every},
        }
    )


def graph(root: Any) -> dict[str, set[str]]:
    """Node -> the nodes whose results it is given."""
    found: dict[str, set[str]] = {}
    todo = [root]
    while todo:
        node = todo.pop()
        if _name(node) not in found:
            before = [value for value in node._bound_args if hasattr(value, "_bound_args")]
            found[_name(node)] = {_name(value) for value in before}
            todo += before
    return found


def _name(node: Any) -> str:
    return node.get_options()["_metadata"]["workflow.io/options"]["task_id"]


def upstream(edges: dict[str, set[str]], node: str) -> set[str]:
    """Everything that is done before `node` begins."""
    direct = edges[node]
    return direct.union(*(upstream(edges, other) for other in direct))


def test_a_step_passes_its_five_stages_in_order():
    edges = graph(dag.window(config(), "r", 1, 6, True))
    assert edges["batch[3]"] == {"fetch[3]"}
    assert edges["rollout[3]"] == {"batch[3]", "train[1]"}
    assert edges["score[3]"] == {"rollout[3]"}
    assert edges["train[3]"] == {"train[2]"}, "the trainer waits in the buffer for what the sampler takes"
    assert {name for name in edges if name.endswith("[3]")} == {
        f"{name}[3]" for name in ("fetch", "batch", "rollout", "score", "train")
    }


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_the_staleness_bound_is_an_edge(staleness):
    edges = graph(dag.window(config(staleness=staleness), "r", 1, 6, True))
    for step in range(1, 7):
        before = upstream(edges, f"rollout[{step}]")
        trained = {name for name in before if name.startswith("train")}
        assert trained == {f"train[{earlier}]" for earlier in range(1, step - staleness)}


def test_steps_are_fetched_and_trained_one_after_the_other():
    edges = graph(dag.window(config(), "r", 1, 6, True))
    for step in range(2, 7):
        assert f"fetch[{step - 1}]" in edges[f"fetch[{step}]"]
        assert f"train[{step - 1}]" in edges[f"train[{step}]"]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_only_the_rollout_waits_for_the_weights(staleness):
    edges = graph(dag.window(config(staleness=staleness), "r", 1, 6, True))
    for step in range(staleness + 2, 7):
        released_by = step - 1 - staleness
        before = upstream(edges, f"batch[{step}]")
        assert f"train[{released_by}]" not in before, "the step's batches are there when its training step ends"
        assert f"rollout[{released_by}]" in before, "and no replacement is drawn any more when they are"


def test_a_window_in_the_middle_waits_for_nothing_before_it():
    edges = graph(dag.window(config(), "r", 3, 4, False))
    assert {name for name in edges if name.startswith("train")} == {"train[3]", "train[4]"}
    assert edges["fetch[3]"] == set()


@pytest.mark.parametrize("sampler", ["in_order", "ready_first", "windowed"])
def test_a_window_ends_when_all_of_it_is_scored_and_trained(sampler):
    edges = graph(dag.window(config(sampler=sampler), "r", 1, 3, True))
    assert edges["finish[3]"] >= {"score[1]", "score[2]", "score[3]", "train[3]"}


@pytest.mark.parametrize("sampler", ["ready_first", "windowed"])
def test_other_samplers_train_on_what_is_ready(sampler):
    edges = graph(dag.window(config(sampler=sampler), "r", 1, 3, True))
    assert edges["train[3]"] == {"train[2]"}
    assert edges["fetch[3]"] == {"train[1]", "fetch[2]"}, "a straggler of the step before does not hold it up"


@pytest.mark.fault(33)
def test_evaluations_are_due_at_both_ends_and_between():
    edges = graph(dag.window(config(steps=6, every=2), "r", 1, 6, True))
    assert {name for name in edges if name.startswith("evaluate")} == {f"evaluate[{step}]" for step in (0, 2, 4, 6)}
    assert edges["evaluate[0]"] == set()
    assert edges["evaluate[4]"] == {"train[4]"}
    scored = {f"score[{step}]" for step in range(1, 7)}
    assert edges["finish[6]"] == {"train[6]", *scored, *(f"evaluate[{step}]" for step in (0, 2, 4, 6))}


def test_an_evaluation_that_a_crash_left_undone_is_a_window_of_its_own():
    assert graph(dag.window(config(steps=6), "r", 7, 6, True)) == {"finish[6]": {"evaluate[6]"}, "evaluate[6]": set()}


def test_every_node_asks_for_a_little_cpu_and_is_not_run_again_by_ray():
    todo, seen = [dag.window(config(), "r", 1, 2, True)], []
    while todo:
        node = todo.pop()
        seen.append(node.get_options())
        todo += [value for value in node._bound_args if hasattr(value, "_bound_args")]
    assert all(0 < options["num_cpus"] <= 0.01 and options["max_retries"] == 0 for options in seen)
