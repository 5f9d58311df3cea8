from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.provenance import resolve_eval_sampling, resolve_sampling, resolve_stopping
from pipeline.config.schema import RunConfig
from pipeline.records import Sampling, Stopping

SAMPLING = {"temperature": st.sampled_from([0.5, 2.0]), "top_p": st.sampled_from([0.5, 0.9]), "top_k": st.integers(1, 3)}
STOPPING = {"max_turns": st.integers(1, 5), "max_context": st.integers(2, 9), "max_seconds": st.floats(1, 9)}


def parts(fields):
    return st.fixed_dictionaries({}, optional=fields)


def config(**more) -> RunConfig:
    return RunConfig.model_validate({"student": {"architecture": {}}, "algorithm": {"name": "grpo"}, **more})


@given(parts(SAMPLING), parts(SAMPLING))
def test_the_finest_level_wins_for_sampling(run, dataset):
    resolved = resolve_sampling(config(rollout={"sampling": run}, datasets={"d": {"sampling": dataset}}), "d")
    assert resolved.value == Sampling(**{**run, **dataset})
    for name, origin in resolved.origins.items():
        level = f"datasets.d.sampling.{name}" if name in dataset else f"rollout.sampling.{name}" if name in run else "built-in"
        assert origin == level


@given(parts(STOPPING), parts(STOPPING))
def test_the_finest_level_wins_for_stopping(spec, dataset):
    specs = [{"task_type": "other"}, {"task_type": "t", "default_stopping": spec}]
    resolved = resolve_stopping(config(specs=specs, datasets={"d": {"task_type": "t", "stopping": dataset}}), "d")
    assert resolved.value == Stopping(**{**spec, **dataset})
    for name, origin in resolved.origins.items():
        level = f"specs.1.default_stopping.{name}" if name in spec else "built-in"
        assert origin == (f"datasets.d.stopping.{name}" if name in dataset else level)


def test_evaluation_is_greedy_unless_asked_otherwise():
    settings = config(datasets={"d": {"sampling": {"temperature": 0.7, "max_tokens": 5}}})
    resolved = resolve_eval_sampling(settings, "d")
    assert (resolved.value.temperature, resolved.origins["temperature"]) == (0.0, "eval.temperature")
    assert (resolved.value.max_tokens, resolved.origins["max_tokens"]) == (5, "datasets.d.sampling.max_tokens")
    warm = resolve_eval_sampling(config(datasets={"d": {}}, eval={"temperature": 1.0, "max_tokens": 9}), "d")
    assert (warm.value.temperature, warm.value.max_tokens) == (1.0, 9)
