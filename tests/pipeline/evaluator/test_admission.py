"""The start-up proof: what is admitted can be placed, what cannot is refused with the sum and the key."""

from __future__ import annotations

import re
import sys

import pytest

from pipeline.errors import AdmissionError, ConfigError
from pipeline.evaluator.admission import prove
from pipeline.evaluator.machine import Machine, pretended_gpus, this_machine
from pipeline.evaluator.placement import PlacementPool
from pipeline.evaluator.spec import NodeSpec, specs_from_config
from tests.pipeline.evaluator.parts import make_config


@pytest.mark.parametrize("cpus", [1, 2, 4])
@pytest.mark.fault(43)
def test_samples_that_ask_for_nothing_are_admitted_on_any_machine(cpus):
    config = make_config(teachers={"big": {"architecture": {}}}, algorithm={"name": "opd"})
    proof = prove(config, Machine(cpus, 0, 4.0))
    assert proof.total.cpu == cpus and proof.remaining.cpu == 0
    assert proof.tokens["single_turn"].held is None
    assert 0 < proof.pool[0].cpu < cpus


@pytest.mark.fault(43)
def test_a_machine_that_is_too_small_is_refused_with_the_sum():
    with pytest.raises(
        AdmissionError, match=r"asks for 0\.2 CPU besides its pool, the machine has 0\.1 CPU; raise run\.ray\.num_cpus"
    ):
        prove(make_config(), Machine(0.1))


@pytest.mark.fault(25)
def test_a_sample_larger_than_every_node_is_refused_naming_the_nearest():
    config = make_config(spec={"resource": {"cpu": 2, "memory_gb": 64}})
    nodes = (NodeSpec("thin", (), 1, 256), NodeSpec("wide", (), 16, 32))
    with pytest.raises(AdmissionError) as refused:
        prove(config, Machine.of(nodes))
    text = str(refused.value)
    assert "'wide'" in text or "'thin'" in text
    assert re.search(r"(memory_gb 64 > 32|cpu 2 > 0\.\d+)", text) and "specs.single_turn.resource." in text


@pytest.mark.fault(25)
def test_twenty_samples_of_a_twentieth_are_admitted():
    config = make_config(
        spec={"resource": {"gpu": 0.05}, "batch_size": 5},
        layout={"nodes": {"box": {"gpus": [0], "cpu": 1, "memory_gb": 1}}},
    )
    proof = prove(config, Machine(4, 1, 8))
    assert proof.tokens["single_turn"].asked == 16 and proof.tokens["single_turn"].held == 20


def test_a_batch_that_asks_for_more_tokens_than_there_are_is_refused_with_the_arithmetic_and_the_key():
    config = make_config(spec={"resource": {"cpu": 4, "memory_gb": 16}}, rollout={"samples_per_task": 32})
    layout = {"nodes": {"node": {"cpu": 96, "memory_gb": 384}}}
    with pytest.raises(AdmissionError, match=r"asks for 32 tokens .* holds 24 .*specs\.single_turn\.resource\.concurrency to 24"):
        prove(config.model_copy(update={"layout": make_config(layout=layout).layout}), Machine(128, 0, 512))


def test_what_the_proof_admits_the_pool_places():
    config = make_config(
        spec={"resource": {"gpu": 0.33, "cpu": 1}},
        layout={"nodes": {"a": [0], "b": [0, 1]}, "default_cpu": 8, "default_memory_gb": 8},
    )
    proof = prove(config, Machine.of((NodeSpec("x", (0, 1), 16, 64), NodeSpec("y", (0,), 9, 64))))
    spec, pool = specs_from_config(config)["single_turn"], PlacementPool(proof.pool)
    held = proof.tokens["single_turn"].held
    assert held == 9 and len(pool.try_acquire_batch(spec.resource.times(held), spec.sample_resource, held)) == held


def test_a_shorthand_node_without_defaults_is_an_error_and_not_zero():
    with pytest.raises(ConfigError, match=r"layout\.nodes\.box says no memory_gb; set .* or layout\.default_memory_gb"):
        prove(make_config(layout={"nodes": {"box": [0]}, "default_cpu": 4}), Machine(8, 1, 8))


def test_a_layout_that_the_machine_lacks_is_refused_naming_the_nearest_node():
    config = make_config(layout={"nodes": {"box": {"gpus": [0, 1], "cpu": 4, "memory_gb": 8}}})
    with pytest.raises(AdmissionError, match=r"layout\.nodes\.box asks for gpu 2, .* nearest, 'local', has gpu 1"):
        prove(config, Machine(8, 1, 16))


def test_the_layouts_share_is_taken_from_the_machine_and_the_table_shows_every_demand():
    config = make_config(layout={"nodes": {"box": {"cpu": 4, "memory_gb": 8}}})
    proof = prove(config, Machine(8, 0, 16))
    assert proof.remaining.cpu == pytest.approx(8 - proof.total.cpu)
    assert proof.remaining.memory_gb == 8
    table = proof.table()
    for who in ("actor Trainer", "workflow nodes", "engine student", "pool on box", "total asked", "remaining"):
        assert who in table


def test_two_specs_for_one_task_type_are_refused():
    with pytest.raises(ConfigError, match="has a spec already"):
        specs_from_config(make_config(specs=[{}, {}]))


def test_the_sample_resource_is_the_larger_of_run_and_eval_field_by_field():
    config = make_config(spec={"run_resource": {"cpu": 2, "memory_gb": 1}, "eval_resource": {"cpu": 1, "memory_gb": 4}})
    sample = specs_from_config(config)["single_turn"].sample_resource
    assert (sample.cpu, sample.memory_gb) == (2, 4)


def test_the_machine_of_a_private_ray_has_the_cpus_it_is_told():
    assert this_machine(make_config(run={"ray": {"num_cpus": 3}}).run.ray).cpus == 3


def test_who_asks_for_a_gpu_that_is_only_said_is_told_so():
    launched = {"kind": "vllm", "launch": {"python": "/x", "gpus": 1}}
    said = {"run": {"ray": {"num_gpus": 4}}}
    told = pretended_gpus(make_config(spec={"resource": {"gpu": 0.5}}, engine=launched, **said), 0)
    assert [line.split(":")[0] for line in told] == ["engine.launch.gpus 1", "specs.single_turn.resource.gpu 0.5"]
    assert all("run.ray.num_gpus 4 is only said" in line and "lists no GPUs" in line for line in told)
    assert pretended_gpus(make_config(engine=launched, **said), 4) == [], "they are there"
    assert pretended_gpus(make_config(engine=launched), 0) == [], "Ray counts them itself, and the proof refuses"
    assert pretended_gpus(make_config(**said), 0) == [], "nobody asks for one"


@pytest.mark.fault(25)
def test_a_thing_that_no_node_has_is_refused_with_the_keys_on_both_sides():
    spec = {"resource": {"cpu": 1, "custom": {"licence": 2}}}
    with pytest.raises(AdmissionError, match=r"licence 2 > 0; lower specs.single_turn.resource.custom.licence"):
        prove(make_config(spec=spec), Machine(4, 0, 8))
    layout = {"nodes": {"box": {"cpu": 4, "memory_gb": 4, "custom": {"licence": 6}}}}
    with pytest.raises(AdmissionError, match=r"asks for 4 tokens .* licence 2, but the pool holds 3"):
        prove(make_config(spec=spec, layout=layout), Machine(8, 0, 8))
    spec["resource"]["concurrency"] = 3
    assert prove(make_config(spec=spec, layout=layout), Machine(8, 0, 8)).tokens["single_turn"].held == 3


LAUNCHED = {"kind": "vllm", "launch": {"python": sys.executable, "gpus": 0.4, "cpus": 2}}


def test_launched_engines_are_on_the_bill_and_their_gpus_are_not_the_pools():
    teacher = {"path": "/model", "engine": "sglang", "launch": {"python": sys.executable, "gpus": 0.5}}
    config = make_config(teachers={"big": teacher}, algorithm={"name": "opd"}, engine=LAUNCHED | {"replicas": 2})
    proof = prove(config, Machine(8, 3, 8))
    asked = {line.who: (line.count, line.cpu, line.gpu) for line in proof.lines}
    assert asked["engine student, launched"] == (2, 2, 0.4) and asked["engine teacher big, launched"] == (1, 0.01, 0.5)
    assert proof.pool[0].gpu_ids == (2,)  # two replicas share the first, the teacher stands on the second


def test_an_environment_that_is_not_there_is_refused_by_its_key():
    with pytest.raises(ConfigError, match=r"engine\.launch\.python /nowhere/python: no such interpreter"):
        prove(make_config(engine={"kind": "vllm", "launch": {"python": "/nowhere/python"}}), Machine(4))


def test_engines_that_no_gpu_is_left_for_are_refused_with_the_sum():
    with pytest.raises(AdmissionError, match=r"0.4 GPU and no node has it left.*asks for 6.* and 1.2 GPU.*has 8 CPU and 1 GPU"):
        prove(make_config(engine=LAUNCHED | {"replicas": 3}), Machine(8, 1, 8))


def test_a_student_whose_engine_takes_no_weights_or_gives_other_logprobs_is_refused():
    with pytest.raises(ConfigError, match="takes no new weights"):
        prove(make_config(engine={"kind": "openai", "url": "http://host"}), Machine(4))
    sglang = {"kind": "sglang", "url": ["http://a", "http://b"]}
    prove(make_config(engine=sglang), Machine(4))
    with pytest.raises(ConfigError, match=r"top_p 0\.9.*uncut"):
        prove(make_config(engine=sglang, rollout={"sampling": {"top_p": 0.9}}), Machine(4))
