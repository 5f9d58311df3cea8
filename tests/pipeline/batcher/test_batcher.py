from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.batcher.service import Batcher, partition
from pipeline.batcher.strategies import fifo, interleaved, longest_first
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError
from pipeline.evaluator.spec import EvaluatorSpec
from pipeline.records import Batch, Sampling, Stopping, Task

SPECS = {
    "a": EvaluatorSpec("ev_a", "a", "single_turn", batch_size=2),
    "b": EvaluatorSpec("ev_b", "b", "single_turn", batch_size=None),
}
STRATEGIES = {"fifo": fifo, "longest_first": longest_first, "interleaved": interleaved}


def task(ordinal: int, task_type: str = "a", length: int = 3, **row) -> Task:
    messages = (("user", "x" * length),)
    return Task(
        ordinal, f"d/{ordinal}", "d", task_type, messages, None, "exact", 1, Sampling(), Stopping(), 0, metadata={"row": row}
    )


def shape(batches: list[Batch]) -> list[tuple[int, ...]]:
    return [batch.ordinals for batch in batches]


def test_fifo_seals_at_the_batch_size_and_keeps_one_open_batch_otherwise():
    tasks = [task(0), task(1, "b"), task(2), task(3, "b"), task(4), task(5, "b")]
    assert shape(fifo(tasks, SPECS)) == [(0, 2), (1, 3, 5), (4,)]


def test_longest_first():
    tasks = [task(0, length=1), task(1, length=9), task(2, length=5), task(3, expected_length=100)]
    assert shape(longest_first(tasks, SPECS)) == [(3, 1), (2, 0)]


def test_interleaved_is_round_robin_over_types():
    specs = {name: replace(spec, batch_size=1) for name, spec in SPECS.items()}
    tasks = [task(0), task(1), task(2), task(3, "b"), task(4, "b")]
    assert shape(interleaved(tasks, specs)) == [(0,), (3,), (1,), (4,), (2,)]


TASKS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 9)), max_size=30).map(
    lambda parts: [task(10 + n, kind, length) for n, (kind, length) in enumerate(parts)]
)


@given(TASKS, st.sampled_from(sorted(STRATEGIES)))
def test_every_task_is_in_exactly_one_batch(tasks, name):
    batches = partition(name, STRATEGIES[name], tasks, SPECS)
    assert sorted(ordinal for batch in batches for ordinal in batch.ordinals) == [task.ordinal for task in tasks]
    for batch in batches:
        size = SPECS[batch.task_type].batch_size
        assert size is None or len(batch.ordinals) <= size


@given(TASKS.filter(bool), st.data(), st.sampled_from(["lost", "repeated", "invented"]))
def test_a_strategy_that_is_no_partition_is_refused_by_name(tasks, data, fault):
    victim = data.draw(st.sampled_from([task.ordinal for task in tasks]))

    def wrong(tasks, specs):
        batches = fifo(tasks, specs)
        index = next(n for n, batch in enumerate(batches) if victim in batch.ordinals)
        ordinals = batches[index].ordinals
        changed = {
            "lost": tuple(ordinal for ordinal in ordinals if ordinal != victim),
            "repeated": (*ordinals, victim),
            "invented": (*ordinals, 999),
        }[fault]
        batches[index] = replace(batches[index], ordinals=changed)
        return batches

    named = 999 if fault == "invented" else victim
    with pytest.raises(ConfigError, match=rf"rollout.strategy 'my:wrong' {fault} ordinal {named} of {len(tasks)} tasks"):
        partition("my:wrong", wrong, tasks, SPECS)


def test_misplaced_tasks_and_evaluators_are_refused():
    with pytest.raises(ConfigError, match="of another type into a 'b' batch"):
        partition("s", lambda *_: [Batch("", "ev_b", "b", (0,))], [task(0)], SPECS)
    with pytest.raises(ConfigError, match="gave a batch to evaluator 'ev_b' for 'a'"):
        partition("s", lambda *_: [Batch("", "ev_b", "a", (0,))], [task(0)], SPECS)
    with pytest.raises(ConfigError, match="which has no spec; specs cover"):
        partition("fifo", fifo, [task(0, "c")], SPECS)


def batcher(strategy: str) -> Batcher:
    return Batcher(
        RunConfig.model_validate(
            {
                "student": {"architecture": {}},
                "algorithm": {"name": "grpo"},
                "datasets": {"w": {"task_type": "a"}},
                "specs": [{"task_type": "a", "batch_size": 2}],
                "rollout": {"strategy": strategy},
            }
        )
    )


def test_batches_are_named_by_step_and_the_same_every_time():
    stage = batcher("fifo")
    tasks = [task(n) for n in range(5)]
    first = stage.batch(7, tasks)
    assert [batch.batch_id for batch in first] == ["7.0", "7.1", "7.2"]
    assert stage.batch(7, tasks) == first
    assert stage.report().finished == 10


def test_strategy_by_import_path(tmp_path, monkeypatch):
    (tmp_path / "own_strategy_for_test.py").write_text(
        "from pipeline.records import Batch\n"
        "def one(tasks, specs):\n    return [Batch('x', specs['a'].evaluator_id, 'a', tuple(t.ordinal for t in tasks))]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert shape(batcher("own_strategy_for_test:one").batch(1, [task(n) for n in range(3)])) == [(0, 1, 2)]
    with pytest.raises(ConfigError, match="rollout.strategy 'fifi' is unknown.*did you mean 'fifo'"):
        batcher("fifi")
