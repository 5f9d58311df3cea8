import pytest

from pipeline.config.differences import changed, refuse
from pipeline.config.schema import RunConfig
from pipeline.errors import ConfigError


def config(**parts) -> RunConfig:
    return RunConfig.model_validate(
        {"student": {"architecture": {}}, "datasets": {"d": {}}, "algorithm": {"name": "grpo"}, "trainer": {"steps": 10}, **parts}
    )


@pytest.mark.parametrize(
    "parts",
    [
        {"trainer": {"steps": 20}},
        {"trainer": {"steps": 10, "keep_checkpoints": 5}},
        {"buffer": {"keep_groups": 4}},
        {"observe": {"bars": False}},
        {"layout": {"nodes": {"a": {"cpu": 4, "memory_gb": 4}}}},
        {"engine": {"call_timeout_s": 5}},
        {"specs": [{"run_timeout_s": 5}]},
        {"run": {"stop_grace_s": 1, "ray": {"num_cpus": 2}}},
    ],
)
def test_what_a_resume_may_change(parts):
    differences = changed(config(), config(**parts))
    assert differences
    assert all(difference.allowed for difference in differences)
    refuse(differences, "r")


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"trainer": {"steps": 5}}, "trainer.steps: 10 -> 5"),
        ({"rollout": {"samples_per_task": 8}}, "rollout.samples_per_task: 4 -> 8"),
        ({"datasets": {"d": {}, "e": {}}}, "datasets.e.source: None -> 'reasoning_gym'"),
        ({"run": {"seed": 1}}, "run.seed: 0 -> 1"),
    ],
)
@pytest.mark.fault(38)
def test_anything_else_is_refused_with_the_difference(parts, line):
    with pytest.raises(ConfigError) as caught:
        refuse(changed(config(), config(**parts)), "r1")
    assert f"run r1: cannot change {line} on resume" in str(caught.value)


def test_equal_configurations_have_no_difference():
    assert changed(config(), config()) == []


def test_a_resume_may_find_its_engines_elsewhere():
    def served(**where):
        return config(engine={"kind": "vllm", **where}, teachers={"t": {"path": "/model", "engine": "sglang", **where}})

    differences = changed(served(url="http://a"), served(launch={"python": "/env/bin/python", "gpus": 0.5}))
    assert {key.split(".")[-1] for key in (difference.key for difference in differences)} >= {"url", "python", "gpus"}
    refuse(differences, "r")
    with pytest.raises(ConfigError, match="engine.kind: 'torch' -> 'vllm'"):
        refuse(changed(config(), config(engine={"kind": "vllm", "url": "http://a"})), "r")
